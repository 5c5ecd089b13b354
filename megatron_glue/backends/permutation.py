"""The role ``permutation``: the two functions that move rows into expert order and back.

The contract, dtypes and sentinels included, is that of ``ops/permute.py``, whose functions are the backend ``torch``.
Dispatchers are given the pair and call it. Replicas of rows and the regrouping of received rows have no other backend.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_glue.ops import permute
from megatron_glue.types import TokenGroups


class PermuteRows(Protocol):
    """Copies of token rows in expert order."""

    def __call__(self, x_TD: Tensor, groups: TokenGroups, *, has_sentinels: bool = True) -> Tensor:
        """See :func:`megatron_glue.ops.permute.permute_rows`."""
        ...


class UnpermuteRows(Protocol):
    """Weighted sums of each token's rows."""

    def __call__(self, y_ND: Tensor, groups: TokenGroups, weights_TK: Tensor, *, has_sentinels: bool = True) -> Tensor:
        """See :func:`megatron_glue.ops.permute.unpermute_rows`."""
        ...


@dataclass(frozen=True)
class RowPermutation:
    """A pair that belongs together.

    Attributes:
        permute_rows: Into expert order.
        unpermute_rows: Back.
    """

    permute_rows: PermuteRows
    unpermute_rows: UnpermuteRows


TORCH_PERMUTATION = RowPermutation(permute.permute_rows, permute.unpermute_rows)
"""Gathers and ``embedding_bag``; on every device."""
