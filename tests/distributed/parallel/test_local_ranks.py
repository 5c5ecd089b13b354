"""Local ranks: answers come back by rank, failures and hangs end every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import RankFailedError, run_distributed


def answer(rank: int, world_size: int, offset: int) -> dict[str, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return {"total": total, "rank": torch.tensor(rank)}


def test_answers_come_back_by_rank() -> None:
    results = run_distributed(answer, 2, 10)
    assert [int(result["rank"]) for result in results] == [0, 1]
    assert [int(result["total"]) for result in results] == [21, 21]


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_one_failing_rank_ends_all_and_its_reason_is_told() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="the reason") as caught:
        run_distributed(raise_on_one, 2)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 30


def die_silently(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def test_a_dying_rank_is_noticed() -> None:
    with pytest.raises(RankFailedError, match="rank 1: the process ended"):
        run_distributed(die_silently, 2)


def sleep_long(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_a_hang_is_cut_off() -> None:
    with pytest.raises(RankFailedError, match="no answer within"):
        run_distributed(sleep_long, 2, timeout_s=3.0)
