"""Collectives on gloo ranks: values, gradients, and ranks that have nothing to send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_glue.parallel.collectives import (
    all_reduce_max,
    all_reduce_sum,
    all_reduce_sum_many,
    all_to_all_equal,
    all_to_all_rows,
    broadcast_,
    gather_rows,
    max_over_ranks,
)
from tests.support.processes import run_distributed

# SPLITS[i][j]: rows that rank i sends to rank j. Rank 1 sends nothing, rank 2 receives nothing.
SPLITS = [[1, 2, 0], [0, 0, 0], [3, 1, 0]]


def exchange_rows(rank: int, world_size: int) -> None:
    send = SPLITS[rank]
    receive = [SPLITS[peer][rank] for peer in range(world_size)]
    x = (torch.arange(sum(send), dtype=torch.float32)[:, None] + 10 * rank).expand(-1, 2).clone().requires_grad_()
    received = all_to_all_rows(x, send, receive, dist.group.WORLD)
    expected = [
        10.0 * p + i for p in range(world_size) for i in range(sum(SPLITS[p][:rank]), sum(SPLITS[p][: rank + 1]))
    ]
    assert received[:, 0].tolist() == expected
    assert received.requires_grad
    (received * (rank + 1)).sum().backward()
    assert x.grad is not None
    weights = [float(p + 1) for p in range(world_size) for _ in range(send[p])]
    assert x.grad[:, 0].tolist() == weights


def test_f53_uneven_exchange_keeps_edges_and_collectives_of_empty_ranks() -> None:
    run_distributed(exchange_rows, 3)


def reduce_and_agree(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    mine = torch.full((2,), float(rank), requires_grad=True)
    assert all_reduce_sum(mine, group).tolist() == [3.0, 3.0]
    assert all_reduce_max(mine, group).tolist() == [2.0, 2.0]
    assert mine.tolist() == [rank, rank]
    counts = torch.arange(3) * (rank + 1)
    loss = torch.tensor(0.5 + rank)
    summed_counts, summed_loss, again = all_reduce_sum_many([counts, loss, counts[:0]], group)
    assert summed_counts.tolist() == [0, 6, 12]
    assert summed_counts.dtype == torch.int64
    assert summed_loss.shape == ()
    assert summed_loss.item() == 4.5
    assert again.shape == (0,)
    sent = torch.arange(2 * world_size) + 100 * rank
    assert all_to_all_equal(sent, group).tolist() == [100 * p + 2 * rank + i for p in range(world_size) for i in (0, 1)]
    assert max_over_ranks(10 - rank, group) == 10
    assert broadcast_(torch.tensor([rank + 5]), group).tolist() == [5]


def test_sums_maxima_and_agreement() -> None:
    run_distributed(reduce_and_agree, 3)


def refuse_wrong_splits(rank: int, world_size: int) -> None:
    x = torch.zeros(3, 2)
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="send_splits: 1 entries for a group of 2"):
        all_to_all_rows(x, [3], [1, 2], group)
    with pytest.raises(ValueError, match="sum 2 for 3 rows"):
        all_to_all_rows(x, [1, 1], [1, 1], group)
    with pytest.raises(ValueError, match="needed with a process group"):
        all_to_all_rows(x, None, None, group)


def test_wrong_splits_are_refused_before_anything_is_sent() -> None:
    run_distributed(refuse_wrong_splits, 2)


def gather_uneven(rank: int, world_size: int) -> None:
    mine = torch.arange(2 * rank).view(rank, 2) + 10 * rank
    rows = gather_rows(mine, dist.group.WORLD)
    assert [table.tolist() for table in rows] == [[], [[10, 11]], [[20, 21], [22, 23]]]
    assert gather_rows(mine, None)[0].tolist() == mine.tolist()


def test_tables_of_unequal_length_reach_all_ranks() -> None:
    run_distributed(gather_uneven, 3)
