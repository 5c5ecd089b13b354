"""What an expert-parallel dispatcher found out about a micro-batch, so that its recompute need not find out again.

A dispatch returns it and the routing decision keeps it; it is never stored on the dispatcher, so that several
micro-batches can be in flight. Recompute then exchanges rows and nothing else.

Shape suffixes: T tokens, K top-k, E experts, R received rows, S sent rows, e experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_glue.types.token_groups import PairSlots, ReplicatedGroups, TokenGroups


@dataclass(frozen=True, eq=False)
class ExchangeLayout:
    """One exchange of rows: all of them, or those for some of each rank's experts.

    Attributes:
        send_splits: Rows sent to each rank of the exchange (host integers).
        receive_splits: Rows received from each of them (host integers).
        regroup_R: int64. Received row that stands at each row of the local expert order; ``None`` when the received
            order already is the expert order.
        regroup_inverse_R: int64. Inverse of ``regroup_R``.
        counts_e: int64. Rows of each local expert that the exchange is for.
    """

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    regroup_R: Tensor | None
    regroup_inverse_R: Tensor | None
    counts_e: Tensor


@dataclass(frozen=True, eq=False)
class DispatchMetadata:
    """The layout of a dispatch that sends one row per pair, or keeps all of them here.

    Attributes:
        counts_E: int64. This rank's pairs of each expert.
        groups: Grouping of this rank's own pairs; its order of experts is that of the exchanges.
        exchanges: Exchanges in order; none where all experts are here.
        replicated: The grouping of the rows that are sent, where several ranks hold a part of each expert; ``None``
            where they are those of ``groups``.
    """

    counts_E: Tensor
    groups: TokenGroups
    exchanges: tuple[ExchangeLayout, ...] = ()
    replicated: ReplicatedGroups | None = None

    @property
    def sent(self) -> TokenGroups:
        """Grouping of the rows that are sent."""
        return self.groups if self.replicated is None else self.replicated.groups


@dataclass(frozen=True, eq=False)
class TokenMetadata:
    """The layout of a dispatch that brings whole tokens to the ranks of their experts.

    Attributes:
        counts_E: int64. This rank's pairs of each expert.
        groups: Grouping by local expert of all pairs of the tokens that were brought here; pairs of other ranks'
            experts are sentinels.
        handle: What the exchange itself needs to be repeated.
    """

    counts_E: Tensor
    groups: TokenGroups
    handle: Any = None


@dataclass(frozen=True, eq=False)
class BoundedMetadata:
    """The layout of a dispatch that exchanges a fixed number of rows with every rank.

    Attributes:
        counts_E: int64. This rank's pairs of each expert, those that overflow included.
        slots: Where this rank's pairs stand in what it sends.
        capacity_rows: Rows exchanged with each rank, empty ones included (host integer).
        regroup_R: int64. Received row that stands at each row of the local expert order, empty rows last.
        regroup_inverse_R: int64. Inverse of ``regroup_R``.
        counts_e: int64. Rows of each local expert; their sum is R less the empty rows.
    """

    counts_E: Tensor
    slots: PairSlots
    capacity_rows: int
    regroup_R: Tensor
    regroup_inverse_R: Tensor
    counts_e: Tensor


DispatchLayout = DispatchMetadata | TokenMetadata | BoundedMetadata
"""What a recompute reuses, by the kind of dispatch."""


@dataclass(frozen=True, eq=False)
class RoutingDecision:
    """What one MoE layer decided in the forward pass and must not decide again in its recompute.

    Attributes:
        expert_ids_TK: int64. Chosen experts of each valid token.
        dispatch: The exchange that follows from them; ``None`` for the per-expert mask loop, which makes no plan.
        balance_counts: int64. Pairs per expert, or per segment and expert, of the whole micro-batch over all ranks that
            share it: what the balancing loss compares; ``None`` if there is none.
    """

    expert_ids_TK: Tensor
    dispatch: DispatchLayout | None
    balance_counts: Tensor | None = None
