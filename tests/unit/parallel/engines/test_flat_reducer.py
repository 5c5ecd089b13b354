"""How parameters share buckets. Sums over ranks: tests/distributed/parallel/test_data_parallel.py."""

from __future__ import annotations

import torch
from torch import nn

from megatron_glue.parallel.engines.flat_reducer import FlatReducer


def test_neighbours_share_a_bucket_until_it_is_full() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 100, 1)]
    assert FlatReducer(params, None, bucket_bytes=32).num_buckets == 4
    assert FlatReducer(params, None, bucket_bytes=1024).num_buckets == 1
    assert FlatReducer([], None).num_buckets == 0


def test_dtypes_do_not_mix() -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    assert FlatReducer(params, None).num_buckets == 2


def test_without_a_group_nothing_happens() -> None:
    param = nn.Parameter(torch.zeros(2))
    FlatReducer([param], None).reduce()
    assert param.grad is None
