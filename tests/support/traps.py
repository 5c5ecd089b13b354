"""Traps for :func:`tests.support.job.run_job`: something happens to a rank in the middle of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_glue.training import loop


def at_step(number: int, act: Callable[[], None]) -> None:
    """Call something at the start of a step, counted from 1 in this process."""
    real, steps = loop.train_step, iter(range(1, 1000))

    @functools.wraps(real)
    def train_step(session: Any) -> Any:
        if next(steps) == number:
            act()
        return real(session)

    loop.train_step = train_step
