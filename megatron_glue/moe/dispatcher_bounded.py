"""Experts shared by ranks, a fixed number of rows from each rank to each, so that the host reads nothing.

Every rank has C slots for every rank, C = ceil(F * N / P) rounded up, where N is the number of pairs that a rank can
bring and F the factor of ``--moe-static-capacity-factor``. Pairs take the slots of their expert's rank in expert order;
the exchange is an all-to-all of whole slots, empty ones too. Counts are exchanged as device tensors and say which
received rows are rows: those are put into (expert, source rank) order, and the empty ones behind them, past the last
offset, where neither forward nor backward of a grouped product looks.

Pairs past the last slot of a rank overflow: they reach no expert and are counted. This is not a way to drop tokens. The
dispatcher does so only where its caller has promised to look at the count (``RoutedTokens.may_overflow``), and the
training step then runs again with exchanges of any size (``training/step.py``): those, and everything that is not
training, go through :class:`~megatron_glue.moe.dispatcher_alltoall.AllToAllDispatcher`.

The fixed capacity of an expert, behind which tokens are dropped, is GShard's (arXiv:2006.16668). Here it belongs to a
rank, holds all of its experts' rows together, and is no part of the model.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, P ranks, C slots for each rank, S = P*C sent and R = P*C
received rows, E experts, e local experts, X = e + 1 groups of received rows: each expert's and the empty ones.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from megatron_glue.moe.dispatcher import Dispatch, GroupTokens, RoutedTokens, SplitExperts
from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher, regrouping
from megatron_glue.ops.permute import gather_rows
from megatron_glue.ops.slots import assign_slots, fill_slots, sum_slots
from megatron_glue.parallel.collectives import Pending, start_all_to_all_equal
from megatron_glue.parallel.row_exchange import RowExchange
from megatron_glue.types import BoundedMetadata, DispatchLayout, PairSlots

ROW_MULTIPLE = 8
"""Slots for a rank are a multiple of this, so that blocks of rows start at aligned addresses."""


def slots_per_rank(capacity_factor: float, num_pairs: int, num_ranks: int) -> int:
    """Slots of each rank for each rank.

    Args:
        capacity_factor: Multiple of an even share; from the number of ranks on nothing can overflow.
        num_pairs: Pairs that a rank can bring, the same number on all ranks.
        num_ranks: P.

    Returns:
        C, at least 1 and no more than all pairs need.
    """
    share = math.ceil(capacity_factor * num_pairs / num_ranks)
    return max(1, min(num_pairs, -(-share // ROW_MULTIPLE) * ROW_MULTIPLE))


class BoundedDispatcher:
    """See the text of this file.

    Args:
        exact: Takes over where nothing may overflow; one chunk, every expert whole on its rank.
        capacity_factor: F, at least 1.

    Raises:
        ValueError: If the exact dispatcher works in chunks or ranks hold parts of experts.
    """

    is_local = False

    def __init__(self, exact: AllToAllDispatcher, capacity_factor: float) -> None:
        if len(exact.chunk_sizes) > 1 or exact.num_replicas > 1:
            raise ValueError(
                f"capacity_factor={capacity_factor}: exchanges of fixed size have neither chunks "
                f"({len(exact.chunk_sizes)}) nor ranks that hold parts of an expert ({exact.num_replicas})"
            )
        self._exact = exact
        self._capacity_factor = capacity_factor

    def begin(self, tokens: RoutedTokens, group_tokens: GroupTokens, reuse: DispatchLayout | None = None) -> Dispatch:
        """See :class:`~megatron_glue.moe.dispatcher.Dispatcher`."""
        if isinstance(reuse, BoundedMetadata):
            return _BoundedDispatch(tokens, self._exact, reuse)
        if reuse is not None or not tokens.may_overflow:
            return self._exact.begin(tokens, group_tokens, reuse)
        return _BoundedDispatch(tokens, self._exact, self._plan(tokens, group_tokens))

    def _plan(self, tokens: RoutedTokens, group_tokens: GroupTokens) -> _BoundedPlan:
        num_experts, num_ranks = self._exact.num_experts, self._exact.num_ranks
        groups = group_tokens(tokens.expert_ids_TK, num_experts, num_ranks)
        num_pairs = tokens.num_rows * tokens.expert_ids_TK.shape[1]
        capacity = slots_per_rank(self._capacity_factor, num_pairs, num_ranks)
        counting = start_all_to_all_equal(groups.counts_E.view(num_ranks, -1), self._exact.group)
        return _BoundedPlan(groups.counts_E, assign_slots(groups, capacity), capacity, counting)


class _BoundedPlan:
    """The metadata of a dispatch, as far as it is known: counts are on their way."""

    def __init__(self, counts_E: Tensor, slots: PairSlots, capacity_rows: int, counting: Pending) -> None:
        self.counts_E = counts_E
        self.slots = slots
        self.capacity_rows = capacity_rows
        self._counting = counting

    def finish(self) -> BoundedMetadata:
        """Let the device wait for the counts."""
        counts_PX = received_counts(self._counting.wait(), self.capacity_rows)
        regroup_R, inverse_R = regrouping(counts_PX, counts_PX.shape[0] * self.capacity_rows)
        assert regroup_R is not None, "empty rows make one more group, so orders differ"
        assert inverse_R is not None, "it comes with the other"
        return BoundedMetadata(
            self.counts_E, self.slots, self.capacity_rows, regroup_R, inverse_R, counts_PX[:, :-1].sum(0)
        )


class _BoundedDispatch(Dispatch):
    def __init__(
        self, tokens: RoutedTokens, dispatcher: AllToAllDispatcher, layout: BoundedMetadata | _BoundedPlan
    ) -> None:
        self.counts_E = layout.counts_E
        self.num_overflowing = layout.slots.num_overflowing
        self._layout = layout
        self._weights_TK = tokens.weights_TK
        self._group, self._num_local_experts = dispatcher.group, dispatcher.num_experts // dispatcher.num_ranks
        self._rows_SD = fill_slots(tokens.x_TD, layout.slots)

    def send(self) -> None:
        """Launch the exchange of rows. The host knows its size."""
        self._dtype = self._rows_SD.dtype
        self._exchange = self._new_exchange()
        self._arriving = self._exchange.start(self._rows_SD)
        del self._rows_SD

    def run(self, split_experts: SplitExperts) -> Tensor:
        """See :class:`Dispatch`."""
        if isinstance(self._layout, _BoundedPlan):
            self._layout = self._layout.finish()
        layout = self._layout
        rows_RD = self._exchange.finish(self._arriving)
        del self._arriving
        (compute,) = split_experts([self._num_local_experts], self._dtype)
        y_RD = compute(gather_rows(rows_RD, layout.regroup_R, layout.regroup_inverse_R), layout.counts_e)
        y_RD = gather_rows(y_RD, layout.regroup_inverse_R, layout.regroup_R)
        back = self._new_exchange()
        return sum_slots(back.finish(back.start(y_RD)), layout.slots, self._weights_TK)

    @property
    def metadata(self) -> BoundedMetadata:
        """See :class:`Dispatch`."""
        assert isinstance(self._layout, BoundedMetadata), "the layout is known once the dispatch has run"
        return self._layout

    def _new_exchange(self) -> RowExchange:
        splits = [self._layout.capacity_rows] * self._group.size()
        return RowExchange(splits, splits, self._group)


def received_counts(counts_Pe: Tensor, capacity: int) -> Tensor:
    """What stands in the slots that came from each rank.

    Args:
        counts_Pe: int64 pairs that each rank has for each local expert, those that overflow included.
        capacity: C.

    Returns:
        int64 [P, X]: rows of each local expert and, last, empty ones; each row sums to C.
    """
    ends_Pe = counts_Pe.cumsum(1).clamp(max=capacity)
    ends_PX = F.pad(ends_Pe, (1, 1))
    ends_PX[:, -1] = capacity
    return ends_PX.diff(dim=1)
