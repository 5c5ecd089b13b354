from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_glue.parallel import collectives
from megatron_glue.parallel.meter import OTHER_THREADS, CollectiveMeter


class Clock:
    """Fences that tests move on by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def meter(self) -> CollectiveMeter:
        return CollectiveMeter(lambda: self.now, lambda begin, end: end - begin)


class StandInWork(dist.Work):
    """Takes 5 ms of the clock for whoever waits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        self.clock.now += 5
        return True

    def get_future(self) -> Any:
        return self.future


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        clock.now += 1
        return StandInWork(clock) if async_op else None

    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        dist.all_reduce(output)  # one that calls another is one
        clock.now += 2

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    return clock


def test_calls_that_block_and_works_that_are_awaited(clock: Clock) -> None:
    with clock.meter() as meter:
        dist.all_reduce(torch.zeros(8))
        assert (meter.num_calls, meter.num_bytes) == (0, 0), "not in a step"
        meter.open(is_timing=True)
        dist.all_reduce(torch.zeros(8))
        dist.all_to_all_single(torch.zeros(1), torch.zeros(3))
        work = dist.all_reduce(torch.zeros(2), async_op=True)
        clock.now += 100  # compute
        assert isinstance(work, dist.Work), "FSDP2 waits for nothing else"
        work.wait()
        meter.close()
        assert meter.num_calls == 3
        assert meter.num_bytes == 4 * (8 + 3 + 2)
        assert meter.take_waited_ms() == 1 + 3 + 5
        assert meter.take_waited_ms() == 0


def test_a_future_is_waited_for_from_the_last_launch_to_the_end(clock: Clock) -> None:
    """As DDP does: hooks start buckets during backward, its reducer waits in C++."""
    with clock.meter() as meter:
        meter.open(is_timing=True)
        works = [dist.all_reduce(torch.zeros(2), async_op=True) for _ in range(2)]
        assert works[0] is not None
        assert works[1] is not None
        followed = []
        for work in works:
            clock.now += 10
            followed.append(work.get_future())
        clock.now += 7
        for work in works:
            inner: Any = work
            inner._metered_work.future.set_result("value")
        meter.close()
        assert [future.wait() for future in followed] == ["value", "value"]
        assert meter.take_waited_ms() == 7


def test_steps_that_are_not_timed_are_counted(clock: Clock) -> None:
    with clock.meter() as meter:
        meter.open(is_timing=False)
        work: Any = dist.all_reduce(torch.zeros(2), async_op=True)
        assert type(work) is StandInWork
        meter.close()
        assert meter.num_bytes == 8
        assert meter.take_waited_ms() == 0


def test_what_other_threads_do_is_not_training(clock: Clock) -> None:
    with clock.meter() as meter:
        meter.open(is_timing=True)
        for name in OTHER_THREADS:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.zeros(2),), name=f"{name}")
            thread.start()
            thread.join()
        meter.close()
        assert meter.num_calls == 0


def test_everything_is_put_back() -> None:
    before = [dist.all_reduce, collectives._all_gather_single, collectives._reduce_scatter_single]
    with CollectiveMeter():
        assert dist.all_reduce is not before[0]
    assert [dist.all_reduce, collectives._all_gather_single, collectives._reduce_scatter_single] == before
