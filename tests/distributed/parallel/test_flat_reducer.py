"""Sums in flat buckets: several buckets, missing and non-contiguous gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from tests.support.processes import run_distributed


def reduce_in_buckets(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5, 2), (1,))]
    params[0].grad = torch.arange(6.0).view(3, 2).T * (rank + 1)
    params[1].grad = torch.ones(4) if rank == 1 else None
    params[2].grad = torch.full((2, 5), 1.0 + rank).T
    reducer = FlatReducer(params, dist.group.WORLD, bucket_bytes=40)
    assert reducer.num_buckets == 3
    reducer.reduce()
    grads = [param.grad for param in params]
    assert all(grad is not None for grad in grads)
    assert torch.equal(grads[0], torch.arange(6.0).view(3, 2).T * 3)
    assert torch.equal(grads[1], torch.ones(4))
    assert torch.equal(grads[2], torch.full((5, 2), 3.0))
    assert torch.equal(grads[3], torch.zeros(1))


def test_f54_every_rank_joins_with_what_it_has() -> None:
    run_distributed(reduce_in_buckets, 2)


def reduce_during_backward(rank: int, world_size: int) -> None:
    first, second, rare = (nn.Parameter(torch.full((4,), float(n))) for n in (1, 2, 3))
    reducer = FlatReducer([first, second, rare], dist.group.WORLD, bucket_bytes=16, overlap=True)
    for _ in range(2):
        for param in (first, second, rare):
            param.grad = None
        launched = []
        reducer.expect_backwards(2)
        for micro_batch in range(2):
            # Ranks differ in what they touch: the rare parameter is reached by one rank in one micro-batch.
            loss = ((first * second).sum() * (rank + 1)).sum()
            if rank == 1 and micro_batch == 0:
                loss = loss + rare.sum()
            loss.backward()
            launched.append(reducer.num_launched)
        # Buckets go in one order on all ranks: the rare one stands first, and holds the others back.
        assert launched == [0, 0]
        reducer.reduce()
        assert torch.equal(first.grad, torch.full((4,), 2.0 * 2 * 3))
        assert torch.equal(second.grad, torch.full((4,), 1.0 * 2 * 3))
        assert torch.equal(rare.grad, torch.ones(4))


def reduce_before_backward_ends(rank: int, world_size: int) -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    reducer = FlatReducer([first, second], dist.group.WORLD, bucket_bytes=16, overlap=True)
    seen: list[int] = []
    hidden = first * (rank + 1.0)
    hidden.register_hook(lambda grad: seen.append(reducer.num_launched))
    reducer.expect_backwards(1)
    (hidden * second).sum().backward()
    assert seen == [1], "the last layer's sum is on its way before the first layer's gradient is computed"
    assert reducer.num_launched == 2
    reducer.reduce()
    assert torch.equal(first.grad, torch.full((4,), 3.0))
    first.grad = second.grad = None
    reducer.expect_backwards(1)
    (first * second).sum().backward()
    with pytest.raises(AssertionError, match="last expected backward"):
        (first * second).sum().backward()
    reducer.reset()
    first.grad = second.grad = None
    (first * second).sum().backward()
    reducer.reduce()
    assert torch.equal(first.grad, torch.full((4,), 2.0))


def test_f54_buckets_keep_one_order_whatever_a_rank_touches() -> None:
    run_distributed(reduce_during_backward, 2)


def test_a_bucket_is_reduced_while_backward_runs() -> None:
    run_distributed(reduce_before_backward_ends, 2)
