"""The two exchanges among context-parallel ranks, on real process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.parallel.context import ContextExchange, GatherExchange, RingExchange, _Passing
from tests.support.processes import run_distributed

SIZES = pytest.mark.parametrize("size", [2, 4])
RINGS = pytest.mark.parametrize("is_ring", [False, True], ids=["gather", "ring"])


def exchange_of(rank: int, size: int, is_ring: bool) -> ContextExchange:
    group = dist.group.WORLD
    assert group is not None
    return RingExchange(group, rank, size) if is_ring else GatherExchange(group)


def exchange(rank: int, size: int, is_ring: bool) -> dict[str, Any]:
    """See the rows of all ranks; give row i of rank s the gradient 100 * (own rank) + value."""
    context = exchange_of(rank, size, is_ring)
    rows = torch.arange(3.0)[:, None].expand(3, 2) + 10 * rank
    seen: list[Tensor] = []
    context.visit_all(rows, lambda step, x: seen.append(x.clone()))
    steps: list[int] = []

    def gradient(step: int, x: Tensor) -> Tensor:
        steps.append(step)
        return x.double() + 100 * rank

    grad = context.sum_gradients(rows, gradient)
    return {"seen": torch.cat(seen), "grad": grad, "steps": steps, "dtype": str(grad.dtype)}


@SIZES
@RINGS
def test_every_rank_sees_all_rows_and_gets_the_sum_of_its_gradients(size: int, is_ring: bool) -> None:
    results = run_distributed(exchange, size, is_ring)
    rows = [torch.arange(3.0)[:, None].expand(3, 2) + 10 * rank for rank in range(size)]
    for rank, result in enumerate(results):
        order = [(rank - step) % size for step in range(size)] if is_ring else range(size)
        assert torch.equal(result["seen"], torch.cat([rows[source] for source in order]))
        assert torch.equal(result["grad"], size * rows[rank] + 100 * sum(range(size)))
        assert result["steps"] == list(range(size if is_ring else 1))
        assert result["dtype"] == "torch.float32"


def overlap(rank: int, size: int) -> list[str]:
    """The order of what a ring does, as seen by one rank."""
    context = exchange_of(rank, size, True)
    events: list[str] = []
    start, wait = RingExchange._pass_on, _Passing.wait

    def watched_start(self: RingExchange, rows: Tensor, tag: int) -> Any:
        passing = start(self, rows, tag)
        events.append(f"start {tag}")
        return passing

    def watched_wait(self: _Passing) -> Tensor:
        events.append("wait")
        return wait(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RingExchange, "_pass_on", watched_start)
        patch.setattr(_Passing, "wait", watched_wait)
        context.visit_all(torch.zeros(2), lambda step, _: events.append(f"use {step}"))
        events.append("|")
        context.sum_gradients(torch.zeros(2), lambda step, x: events.append(f"use {step}") or x)
    return events


def test_the_next_block_is_under_way_while_the_present_one_is_used() -> None:
    expected = "start 0, use 0, wait, start 0, use 1, wait, use 2, |, "
    expected += "start 0, use 0, start 1, wait, start 0, use 1, wait, start 1, wait, use 2, wait, start 1, wait"
    for events in run_distributed(overlap, 3):
        assert ", ".join(events) == expected
