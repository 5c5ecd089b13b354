"""Invariants of a grouping; which grouping is right is tested with ``ops/grouping.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_glue.types import TokenGroups


def groups() -> TokenGroups:
    return TokenGroups(
        order_N=torch.tensor([1, 0, 2, 3]),
        inverse_N=torch.tensor([1, 0, 2, 3]),
        counts_E=torch.tensor([1, 2, 0]),
        offsets_E=torch.tensor([1, 3, 3]),
        rank_splits_P=torch.tensor([3]),
        top_k=2,
    )


def test_sizes_count_experts_and_pairs_sentinels_included() -> None:
    assert (groups().num_experts, groups().num_pairs) == (3, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_k": 0}, "top_k"),
        ({"inverse_N": torch.arange(3)}, "permutations of the same pairs"),
        ({"offsets_E": torch.arange(2)}, "one end offset per expert"),
        ({"counts_E": torch.zeros(3, dtype=torch.int32)}, "int64"),
        ({"rank_splits_P": torch.zeros(1)}, "int64"),
        ({"rank_splits_P": torch.zeros(1, 1, dtype=torch.int64)}, "one row"),
    ],
)
def test_parts_that_do_not_fit_break_an_invariant(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        replace(groups(), **changes)
