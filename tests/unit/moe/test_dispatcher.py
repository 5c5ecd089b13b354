"""The dispatcher that sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glue.moe.dispatcher import LocalDispatcher, RoutedTokens
from megatron_glue.moe.experts import ComputeExperts
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.types import TokenGroups
from tests.support.moe_cases import random_rows
from tests.support.tolerances import assert_close

IDS = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [2, 1], [0, 2], [1, 0]])


def group(ids: Tensor, num_experts: int, num_ranks: int) -> TokenGroups:
    return group_tokens(ids, num_experts, num_ranks=num_ranks)


def test_without_experts_it_is_a_weighted_identity() -> None:
    x, weights = random_rows(7, 4), torch.rand(7, 2)
    seen: list[Tensor] = []

    def split_experts(sizes: Sequence[int], dtype: torch.dtype) -> list[ComputeExperts]:
        assert (sizes, dtype) == ([3], torch.float32)
        return [lambda rows, counts: seen.extend((rows, counts)) or rows]

    dispatch = LocalDispatcher(3).begin(RoutedTokens(x, IDS, weights, 7), group)
    dispatch.send()
    out = dispatch.run(split_experts)
    rows, counts = seen
    assert counts.tolist() == dispatch.counts_E.tolist() == [5, 4, 5]
    assert torch.equal(rows[:5], x[[0, 2, 3, 5, 6]])
    assert_close(out, x * weights.sum(1, keepdim=True))


def test_reused_metadata_is_returned_as_it_is_and_nothing_is_grouped() -> None:
    def refuse(ids: Tensor, num_experts: int, num_ranks: int) -> TokenGroups:
        raise AssertionError("grouped twice")

    tokens = RoutedTokens(random_rows(7, 4), IDS, torch.rand(7, 2), 7)
    metadata = LocalDispatcher(3).begin(tokens, group).metadata
    assert LocalDispatcher(3).begin(tokens, refuse, metadata).metadata is metadata
