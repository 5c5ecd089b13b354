"""Exchanges of rows that run beside a computation: values, gradients, the order of what starts and ends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_glue.parallel.collectives import all_to_all_rows
from megatron_glue.parallel.row_exchange import RowExchange, RowGather, RowScatter
from tests.support.collective_watch import CollectiveWatch
from tests.support.processes import run_distributed

# SPLITS[i][j]: rows that rank i sends to rank j. Rank 1 sends nothing, rank 2 receives nothing.
SPLITS = [[1, 2, 0], [0, 0, 0], [3, 1, 0]]


def splits_of(rank: int) -> tuple[list[int], list[int]]:
    return SPLITS[rank], [row[rank] for row in SPLITS]


def rows_of(rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    return torch.randn(sum(SPLITS[rank]), 2, generator=generator).requires_grad_()


def exchange_as_one(rank: int, world_size: int) -> None:
    """Two exchanges under way at once, finished out of order, against the exchange that waits."""
    group = dist.group.WORLD
    assert group is not None
    exchanges = [RowExchange(*splits_of(rank), group) for _ in range(2)]
    inputs = [rows_of(rank, seed) for seed in range(2)]
    arriving = [exchange.start(x * 2) for exchange, x in zip(exchanges, inputs, strict=True)]
    received = [exchanges[index].finish(arriving[index]) for index in (1, 0)][::-1]
    torch.cat(received).square().mul(rank + 1).sum().backward()
    for index, rows in enumerate(received):
        x = rows_of(rank, index)
        expected = all_to_all_rows(x * 2, *splits_of(rank), group)
        (expected.square() * (rank + 1)).sum().backward()
        assert torch.equal(rows, expected)
        assert rows.requires_grad
        actual_grad = inputs[index].grad
        assert actual_grad is not None
        assert x.grad is not None
        assert torch.equal(actual_grad, x.grad)


def test_f53_equals_the_exchange_that_waits_on_ranks_with_and_without_rows() -> None:
    run_distributed(exchange_as_one, 3)


def watch(rank: int, world_size: int) -> list[list[str]]:
    """Products that need no received row stand between start and end of the exchange, in both passes."""
    group = dist.group.WORLD
    assert group is not None
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    exchange = RowExchange([2, 2], [2, 2], group)
    with CollectiveWatch() as forward:
        arriving = exchange.start(x)
        beside = x @ weight
        out = exchange.finish(arriving) + beside
    with CollectiveWatch() as backward:
        out.sum().backward()
    return [forward.events, backward.events]


def test_f51_what_stands_between_start_and_finish_runs_beside_both_exchanges() -> None:
    for forward, backward in run_distributed(watch, 2):
        assert forward == ["all_to_all", "product", "all_to_all done"]
        assert backward == ["all_to_all", "product", "product", "all_to_all done"]


def gather_and_scatter(rank: int, world_size: int, num_rows: int) -> None:
    """Each rank weighs the gathered rows differently; the gradient of a row is the sum over ranks."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((num_rows, 2), rank + 1.0, requires_grad=True)
    gather, scatter = RowGather(group), RowScatter(group)
    with CollectiveWatch() as forward:
        gathered = gather.finish(gather.start(x))
        out = scatter.finish(scatter.start(gathered * (rank + 1)))
    with CollectiveWatch() as backward:
        (out * (rank + 2)).sum().backward()
    total = world_size * (world_size + 1) / 2
    expected = torch.arange(1, world_size + 1).repeat_interleave(num_rows).float()[:, None].expand(-1, 2)
    assert torch.equal(gathered, expected)
    assert torch.equal(out, torch.full((num_rows, 2), (rank + 1) * total))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((num_rows, 2), (rank + 2) * total))
    assert forward.events == ["gather", "gather done", "reduce_scatter", "reduce_scatter done"]
    assert backward.events == ["gather", "gather done", "reduce_scatter", "reduce_scatter done"]


@pytest.mark.parametrize("num_rows", [0, 3])
def test_gather_and_scatter_are_each_others_transpose(num_rows: int) -> None:
    run_distributed(gather_and_scatter, 3, num_rows)


def refuse(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="send_splits: 1 entries for a group of 2"):
        RowExchange([4], [2, 2], group)
    with pytest.raises(ValueError, match="receive_splits: 3 entries"):
        RowExchange([2, 2], [1, 1, 2], group)
    with pytest.raises(ValueError, match="sum 4 for 5 rows"):
        RowExchange([2, 2], [2, 2], group).start(torch.zeros(5, 1))


def test_splits_that_do_not_fit_are_refused() -> None:
    run_distributed(refuse, 2)
