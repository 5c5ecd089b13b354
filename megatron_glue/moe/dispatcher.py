"""How rows get to their experts and back: what every dispatcher offers, and the one that never leaves its rank.

A dispatcher starts from the router's choice. ``begin`` groups it and starts what can start without knowing what other
ranks send; ``send`` puts rows on their way; ``run`` waits for them, lets the experts compute and adds up each token's
results. What a layer computes between the three runs beside the exchanges. The state of a micro-batch lives in its
:class:`Dispatch`, so a dispatcher keeps none, and what a recompute reuses is ``Dispatch.metadata``.

A layer is dropless: every pair has an expert, or the step is run again (``dispatcher_bounded.py``).

Stands between the router and the experts, and again behind the experts. The dispatchers over ranks are in
``dispatcher_alltoall.py``, ``dispatcher_bounded.py`` and ``dispatcher_tokens.py``, their names in
``dispatcher_registry.py``.

Shape suffixes: T tokens, D model, K top-k, R received rows, E experts, e local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.moe.experts import ComputeExperts
from megatron_glue.types import DispatchLayout, DispatchMetadata, TokenGroups

SplitExperts = Callable[[Sequence[int], torch.dtype], list[ComputeExperts]]
"""(numbers of local experts with sum e, compute dtype) -> what computes so many experts, in order."""

GroupTokens = Callable[[Tensor, int, int], TokenGroups]
"""(int64 ids [T, K], number of experts, number of ranks that share them) -> the grouping, sentinels at the tail."""


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """What the router hands to a dispatcher.

    Attributes:
        x_TD: This rank's tokens.
        expert_ids_TK: int64. Their experts.
        weights_TK: fp32. Weights of these; differentiable.
        num_rows: Rows that every rank brings, tokens and padding together: the same number on all of them.
        may_overflow: Whether somebody looks after pairs that find no room in an exchange of fixed size; without, every
            pair must reach its expert.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    num_rows: int
    may_overflow: bool = False


class Dispatch(ABC):
    """One micro-batch on its way through the experts.

    Attributes:
        counts_E: int64. This rank's pairs of each expert.
        num_overflowing: int64 scalar. Pairs of this rank that reach no expert; ``None`` where that cannot be.
    """

    counts_E: Tensor
    num_overflowing: Tensor | None = None

    @abstractmethod
    def send(self) -> None:
        """Put rows on their way. The host may have to wait for the sizes of the exchange here, and nowhere else."""

    @abstractmethod
    def run(self, split_experts: SplitExperts) -> Tensor:
        """Wait for rows, compute, bring results back and add up each token's K, weighted.

        Args:
            split_experts: Gives the experts of this rank; where they are split over ranks, they return their share of
                each sum.

        Returns:
            [T, D]. Differentiable with respect to tokens, weights and the experts' parameters.
        """

    @property
    @abstractmethod
    def metadata(self) -> DispatchLayout:
        """What a second dispatch of the same choice reuses; known once the dispatch has run."""


class Dispatcher(Protocol):
    """Brings rows to experts and results back."""

    @property
    def is_local(self) -> bool:
        """Whether all experts are here, whole."""
        ...

    def begin(
        self,
        tokens: RoutedTokens,
        group_tokens: GroupTokens,
        reuse: DispatchLayout | None = None,
    ) -> Dispatch:
        """Group the choice and start what needs no other rank.

        Args:
            tokens: This rank's tokens.
            group_tokens: Groups ids by expert.
            reuse: The metadata of an earlier dispatch of the same choice: nothing is grouped, and nothing exchanged but
                rows.

        Returns:
            The dispatch; :meth:`Dispatch.send` and :meth:`Dispatch.run` follow, once each.
        """
        ...


class LocalDispatcher:
    """All experts on this rank: no collective, no host read.

    Args:
        num_experts: E.
        permutation: Moves rows into expert order and back.
    """

    is_local = True

    def __init__(self, num_experts: int, permutation: RowPermutation = TORCH_PERMUTATION) -> None:
        self._num_experts = num_experts
        self._permutation = permutation

    def begin(
        self,
        tokens: RoutedTokens,
        group_tokens: GroupTokens,
        reuse: DispatchLayout | None = None,
    ) -> Dispatch:
        """See :class:`Dispatcher`."""
        if reuse is None:
            groups = group_tokens(tokens.expert_ids_TK, self._num_experts, 1)
            reuse = DispatchMetadata(groups.counts_E, groups)
        assert isinstance(reuse, DispatchMetadata), "a layer keeps its dispatcher"
        return _LocalDispatch(tokens, reuse, self._permutation)


class _LocalDispatch(Dispatch):
    def __init__(self, tokens: RoutedTokens, metadata: DispatchMetadata, permutation: RowPermutation) -> None:
        self.counts_E = metadata.counts_E
        self._metadata = metadata
        self._permutation = permutation
        self._weights_TK = tokens.weights_TK
        self._rows_RD = permutation.permute_rows(tokens.x_TD, metadata.groups, has_sentinels=False)

    def send(self) -> None:
        """Nothing leaves this rank."""

    def run(self, split_experts: SplitExperts) -> Tensor:
        """See :class:`Dispatch`."""
        (compute,) = split_experts([self.counts_E.shape[0]], self._rows_RD.dtype)
        y_RD = compute(self._rows_RD, self.counts_E)
        return self._permutation.unpermute_rows(y_RD, self._metadata.groups, self._weights_TK, has_sentinels=False)

    @property
    def metadata(self) -> DispatchMetadata:
        """See :class:`Dispatch`."""
        return self._metadata
