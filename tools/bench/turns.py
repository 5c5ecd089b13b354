"""Lets several ways of doing one thing take turns, so that a slow moment of the machine falls on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron_glue.training.metrics import StepTimer


def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Run each way once per round, in rotating order.

    Args:
        ways: By name.
        rounds: How often.
        device: Where they run.

    Returns:
        By name the milliseconds of each round.
    """
    timer, names = StepTimer(device), list(ways)
    times_ms: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            timer.start()
            ways[name]()
            times_ms[name].append(1e3 * timer.stop(wait_for_device=True))
    return times_ms
