"""What the expert-parallel dispatcher must remember between dispatch and combine.

Returned by ``dispatch`` and handed back to ``combine``, never stored on the dispatcher, so that several micro-batches
can be in flight. The routing decision is what recompute reuses instead of routing, grouping and exchanging anew.

Shape suffixes: T tokens, K top-k, R received rows, e experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_glue.types.token_groups import ReplicatedGroups, TokenGroups


@dataclass(frozen=True, eq=False)
class DispatchMetadata:
    """The layout of one exchange.

    Attributes:
        groups: Grouping of this rank's own pairs.
        send_splits: Rows sent to each rank of the exchange (host integers; ``None`` where nothing is exchanged).
        receive_splits: Rows received from each of them (host integers; ``None`` likewise).
        regroup_R: int64. Received row that stands at each row of the local expert order; ``None`` when the received
            order already is the expert order.
        regroup_inverse_R: int64. Inverse of ``regroup_R``.
        counts_e: int64. Rows of each local expert after the exchange.
        replicated: The grouping of the rows that are sent, where several ranks hold a part of each expert; ``None``
            where they are those of ``groups``.
    """

    groups: TokenGroups
    send_splits: tuple[int, ...] | None
    receive_splits: tuple[int, ...] | None
    regroup_R: Tensor | None
    regroup_inverse_R: Tensor | None
    counts_e: Tensor
    replicated: ReplicatedGroups | None = None


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
    dispatch: DispatchMetadata | None
    balance_counts: Tensor | None = None
