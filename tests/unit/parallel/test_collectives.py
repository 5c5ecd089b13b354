"""Collectives without a process group are the identity; wrong splits are refused before anything is sent."""

from __future__ import annotations

import math

import torch

from megatron_glue.parallel.collectives import (
    all_reduce_max,
    all_reduce_sum,
    all_reduce_sum_many,
    all_to_all_equal,
    all_to_all_rows,
    broadcast_,
    is_same_on_all_ranks,
    max_over_ranks,
    maxima_over_ranks,
)


def test_without_a_group_everything_is_the_identity() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert all_to_all_rows(x, None, None, None) is x
    assert all_to_all_equal(x, None) is x
    assert torch.equal(all_reduce_sum(x, None), x)
    assert torch.equal(all_reduce_max(x, None), x)
    assert [t.tolist() for t in all_reduce_sum_many([x, x[0].long()], None)] == [x.tolist(), [0, 1]]
    assert max_over_ranks(7, None) == 7
    assert maxima_over_ranks([7, -math.inf], None) == [7.0, -math.inf]
    assert is_same_on_all_ranks(7, None)
    assert broadcast_(x, None) is x


def test_reductions_leave_their_input_alone() -> None:
    x = torch.ones(2)
    all_reduce_sum(x, None).add_(1)
    all_reduce_sum_many([x], None)[0].add_(1)
    assert x.tolist() == [1, 1]
