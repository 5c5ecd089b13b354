"""Sums in flat buckets: several buckets, missing and non-contiguous gradients."""

from __future__ import annotations

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
