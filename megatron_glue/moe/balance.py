"""The balance of one layer's router over a micro-batch, whichever ranks hold its rows.

Tensor- and context-parallel ranks hold different rows of one micro-batch. Its balance is that of all of them together,
so their counts are summed, once per micro-batch and layer: the sum is started as soon as the experts are chosen and
awaited when the layer is done. How many tokens the micro-batch has, every rank knows from its layout. The recompute of
a layer finds the summed counts in its saved decision.

It stands behind the router and again at the end of the layer. The formulas are in ``aux_loss.py``.

Shape suffixes: T valid tokens of this rank, D model, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.moe.aux_loss import (
    attach_losses,
    count_by_document,
    document_balancing_loss,
    load_balancing_loss,
    z_loss,
)
from megatron_glue.moe.router import Routing
from megatron_glue.parallel.collectives import Pending, start_all_reduce_
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Which rows of a micro-batch a layer was given.

    Attributes:
        sequence: The micro-batch on this context-parallel rank.
        start: First row of it that is here.
        num_rows: Rows that are here, padding included.
    """

    sequence: PackedSequence
    start: int
    num_rows: int

    @classmethod
    def of(cls, context: ForwardContext, num_rows: int) -> OwnRows:
        """Find the rows of the residual stream.

        Args:
            context: The micro-batch.
            num_rows: Rows that the layer was called with.

        Returns:
            The rows.

        Raises:
            ValueError: If their number is another one.
        """
        rows = context.residual_rows or slice(0, context.sequence.num_tokens)
        if num_rows != rows.stop - rows.start:
            raise ValueError(f"x_TD has {num_rows} rows; the layout describes {rows.stop - rows.start}")
        return cls(context.sequence, rows.start, num_rows)

    @property
    def num_valid(self) -> int:
        """Rows that are tokens; they come first. 0 is legal. Host integer."""
        return min(max(self.sequence.num_valid_tokens - self.start, 0), self.num_rows)

    @property
    def segment_ids_T(self) -> Tensor:
        """Segment of each token."""
        return self.sequence.segment_ids_T[self.start : self.start + self.num_valid]

    @property
    def num_tokens_everywhere(self) -> int:
        """Tokens of the whole micro-batch over all ranks. Host integer."""
        return sum(self.sequence.whole_lengths)


@dataclass(frozen=True, eq=False)
class RouterBalance:
    """Computes, logs and attaches the auxiliary losses of one layer.

    Attributes:
        layer_index: Global index of the layer.
        aux_loss_coeff: Weight of the balancing loss.
        z_loss_coeff: Weight of the z-loss.
        by_document: Balance inside each document instead of over the micro-batch.
        group: Ranks that hold rows of the same micro-batch; ``None`` for one.
    """

    layer_index: int
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    by_document: bool = False
    group: ProcessGroup | None = None

    def start_counts(
        self, routing: Routing, counts_E: Tensor, rows: OwnRows, context: ForwardContext
    ) -> Pending | None:
        """Start to count the pairs of the whole micro-batch, in forward.

        Args:
            routing: Of this rank's tokens.
            counts_E: int64 pairs of each expert on this rank.
            rows: This rank's rows.
            context: The micro-batch.

        Returns:
            int64 counts to come, [E] or [S, E]; ``None`` if nothing needs them: no weight, or no backward, and no log.
        """
        is_trained = self.aux_loss_coeff != 0.0 and (torch.is_grad_enabled() or context.decisions is not None)
        if not is_trained and context.router_log is None:
            return None
        if self.by_document:
            num_segments, num_experts = rows.sequence.num_segments, counts_E.shape[0]
            counts = count_by_document(routing.expert_ids_TK, rows.segment_ids_T, num_segments, num_experts)
        else:
            counts = counts_E if self.group is None else counts_E.clone()
        return Pending(counts, None) if self.group is None else start_all_reduce_(counts, self.group)

    def finish(
        self,
        out_TD: Tensor,
        routing: Routing,
        counts_E: Tensor,
        balance_counts: Tensor | None,
        rows: OwnRows,
        context: ForwardContext,
    ) -> Tensor:
        """Attach the layer's losses to its output and, in forward, report its statistics.

        Args:
            out_TD: Output of the layer's valid rows.
            routing: Of the same rows.
            counts_E: int64 pairs of each expert on this rank.
            balance_counts: What :meth:`start_counts` counted, now or in the forward that is recomputed.
            rows: This rank's rows.
            context: The micro-batch.

        Returns:
            ``out_TD``; its backward also sends ``context.aux_loss_scale`` into the weighted losses.
        """
        is_logged = context.router_log is not None and not context.is_recompute
        terms: list[Tensor] = []
        aux = z = None
        if balance_counts is not None and (self.aux_loss_coeff != 0.0 or is_logged):
            aux = self._balancing_loss(routing, balance_counts, rows)
        if is_logged or (self.z_loss_coeff != 0.0 and torch.is_grad_enabled()):
            source = routing if self.z_loss_coeff != 0.0 else routing.detach()
            z = z_loss(source.log_sum_exp_T, rows.num_tokens_everywhere)
        if context.router_log is not None and is_logged:
            assert aux is not None, "counted where something is logged"
            assert z is not None, "computed where something is logged"
            num_dropped = routing.expert_ids_TK.numel() - counts_E.sum()
            record = RouterRecord(self.layer_index, counts_E, aux.detach(), z.detach(), num_dropped)
            context.router_log.append(record)
        if aux is not None and self.aux_loss_coeff != 0.0:
            terms.append(self.aux_loss_coeff * aux)
        if z is not None and self.z_loss_coeff != 0.0:
            terms.append(self.z_loss_coeff * z)
        return attach_losses(out_TD, sum(terms[1:], terms[0]), context.aux_loss_scale) if terms else out_TD

    def _balancing_loss(self, routing: Routing, balance_counts: Tensor, rows: OwnRows) -> Tensor:
        """This rank's share; without a weight also without a graph, so that a recompute saves the same tensors."""
        source = routing if self.aux_loss_coeff != 0.0 else routing.detach()
        num_tokens = rows.num_tokens_everywhere
        if self.by_document:
            return document_balancing_loss(source.probs_TE, balance_counts, rows.segment_ids_T, num_tokens)
        return load_balancing_loss(source.prob_sums_E, balance_counts, routing.expert_ids_TK.shape[1], num_tokens)
