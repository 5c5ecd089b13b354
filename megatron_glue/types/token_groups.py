"""The result of grouping (token, choice) pairs by expert.

Produced by ``ops/grouping.py``, consumed by ``moe/dispatcher.py`` and the grouped experts. It holds no activations.

Shape suffixes: T tokens, K top-k, N = T*K pairs, E experts, P expert-parallel ranks, Q replicas, S rows that are sent:
N*Q, or one per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Where each (token, choice) pair goes when pairs are ordered by expert, ties by token.

    A pair is numbered ``n = t * K + k``. Pairs with a sentinel expert id (below 0 or at least E) stand behind the last
    expert's rows, in their original order, and belong to no count.

    Attributes:
        order_N: int64. ``order_N[i]`` is the pair that stands at sorted row i (stable).
        inverse_N: int64. ``inverse_N[n]`` is the sorted row of pair n.
        counts_E: int64. Pairs of each expert.
        offsets_E: int64. Exclusive end row of each expert, the running sum of ``counts_E``.
        rank_splits_P: int64. Pairs bound for each expert-parallel rank (rank p owns experts p*E/P ... (p+1)*E/P - 1).
        top_k: K, so that ``order_N // top_k`` is the token of a row.
    """

    order_N: Tensor
    inverse_N: Tensor
    counts_E: Tensor
    offsets_E: Tensor
    rank_splits_P: Tensor
    top_k: int

    def __post_init__(self) -> None:
        assert self.top_k >= 1, "top_k counts the choices of a token"
        assert self.order_N.shape == self.inverse_N.shape, "order and inverse are permutations of the same pairs"
        assert self.counts_E.shape == self.offsets_E.shape, "one end offset per expert"
        for tensor in (self.order_N, self.inverse_N, self.counts_E, self.offsets_E, self.rank_splits_P):
            assert tensor.dtype == torch.int64, "every index and count is an int64"
            assert tensor.dim() == 1, "every index and count is one row"

    @property
    def num_experts(self) -> int:
        """Number of experts E."""
        return self.counts_E.shape[0]

    @property
    def num_pairs(self) -> int:
        """Number of (token, choice) pairs N, sentinels included."""
        return self.order_N.shape[0]


@dataclass(frozen=True, eq=False)
class ReplicatedGroups:
    """A grouping in which each pair has Q rows, one for each rank that holds a part of its expert.

    Attributes:
        groups: Grouping of N * Q pairs: K * Q choices of each token (choice k, replica q is choice k * Q + q), E * Q
            experts (those of rank p stand there Q times, replica after replica) and P * Q ranks, q inner.
        rows_NQ: int64. The rows in ``groups`` of each row of the grouping that was replicated.
        source_S: int64. The row of that grouping which each row of ``groups`` is a replica of.
    """

    groups: TokenGroups
    rows_NQ: Tensor
    source_S: Tensor


@dataclass(frozen=True, eq=False)
class PairSlots:
    """Where (token, choice) pairs stand in a buffer that has the same number of slots for every rank.

    The pairs of a rank take its first slots, in expert order. Those past the last slot overflow: they stand nowhere.

    Attributes:
        slots_TK: int64. Slot of each pair; for one that overflows the last slot of its rank, which another pair has.
        is_placed_TK: bool. Whether the slot is the pair's own.
        pairs_S: int64. Pair of each slot; 0 for an empty one.
        is_taken_S: bool. Whether a pair stands in the slot.
        num_overflowing: int64 scalar. Pairs without a slot.
    """

    slots_TK: Tensor
    is_placed_TK: Tensor
    pairs_S: Tensor
    is_taken_S: Tensor
    num_overflowing: Tensor
