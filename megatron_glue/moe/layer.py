"""One mixture-of-experts feed-forward layer: route, group once, dispatch, compute, combine.

Takes the place of a block's feed-forward: ``layer(x_TD, context) -> x_TD``. Only the valid tokens of the micro-batch
are routed, counted and computed; padding comes out as zeros.

The decision (chosen experts, grouping, splits) is made once per micro-batch. The recompute of a checkpointed block
finds it in ``context.decisions``: the same experts, no second grouping, no second exchange of counts, no second log
entry.

Shape suffixes: T tokens, D model, K top-k, R received rows, E experts, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.moe.aux_loss import attach_losses, document_balancing_loss, load_balancing_loss, z_loss
from megatron_glue.moe.dispatcher import Dispatcher
from megatron_glue.moe.experts import GroupedExperts
from megatron_glue.moe.router import Router, Routing
from megatron_glue.ops.grouping import GroupingImplementation, count_ids, group_tokens
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import DispatchMetadata, ForwardContext, RouterRecord, RoutingDecision


@dataclass(frozen=True)
class MoELayerConfig:
    """What the layer needs beside its parts.

    Attributes:
        layer_index: Global index of the layer.
        one_pass: Group all pairs in one pass and compute experts by grouped products; else loop over experts.
        grouping_implementation: Of the one pass.
        aux_loss_coeff: Weight of the balancing loss.
        z_loss_coeff: Weight of the z-loss.
        balance_documents: Balance inside each document instead of over the micro-batch.
    """

    layer_index: int
    one_pass: bool = True
    grouping_implementation: GroupingImplementation = "auto"
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    balance_documents: bool = False


class MoELayer(nn.Module):
    """Routed experts, and a shared one if given.

    Args:
        router: Chooses experts.
        experts: This rank's experts.
        dispatcher: Brings rows to experts and back.
        shared_expert: Called ``shared_expert(x_TD, context)`` on every valid token and added; ``None`` for none.
        config: See :class:`MoELayerConfig`.
        host_reader: Counts every read of a device value; the one-pass way on one rank makes none.
    """

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        dispatcher: Dispatcher,
        shared_expert: nn.Module | None,
        config: MoELayerConfig,
        host_reader: HostReader,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.shared_expert = shared_expert
        self.config = config
        self._host_reader = host_reader

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the layer on one micro-batch.

        Args:
            x_TD: [T, D] all tokens, padding at the tail.
            context: The micro-batch.

        Returns:
            [T, D]; zeros on padding.

        Raises:
            ValueError: If the rows are not those of ``context.sequence``.
        """
        sequence = context.sequence
        if x_TD.shape[0] != sequence.num_tokens:
            raise ValueError(f"x_TD has {x_TD.shape[0]} rows; the layout describes {sequence.num_tokens}")
        if sequence.num_pad_tokens:
            x_TD = x_TD[: sequence.num_valid_tokens]
        saved = self._saved_decision(context)
        routing = self.router(x_TD, None if saved is None else saved.expert_ids_TK)
        # Before dispatch, so that a GPU has work while the host waits for the splits.
        shared_TD = None if self.shared_expert is None else self.shared_expert(x_TD, context)
        out_TD, dispatch = self._run_experts(x_TD, routing, None if saved is None else saved.dispatch)
        if shared_TD is not None:
            out_TD = out_TD + shared_TD
        out_TD = self._balance_and_log(out_TD, routing, dispatch, context)
        if saved is None and context.decisions is not None:
            context.decisions.put(self._decision_key, RoutingDecision(routing.expert_ids_TK, dispatch))
        return F.pad(out_TD, (0, 0, 0, sequence.num_pad_tokens)) if sequence.num_pad_tokens else out_TD

    @property
    def _decision_key(self) -> str:
        return f"moe.{self.config.layer_index}"

    def _saved_decision(self, context: ForwardContext) -> RoutingDecision | None:
        if not context.is_recompute or context.decisions is None:
            return None
        saved = context.decisions.get(self._decision_key)
        assert isinstance(saved, RoutingDecision), "a recompute follows a forward that saved its decision"
        return saved

    def _run_experts(
        self, x_TD: Tensor, routing: Routing, reuse: DispatchMetadata | None
    ) -> tuple[Tensor, DispatchMetadata | None]:
        """Bring tokens through the experts; the metadata is ``None`` where no plan was made (loop, one rank)."""
        if not self.config.one_pass and self.dispatcher.num_ranks == 1:
            return self.experts.forward_by_mask(
                x_TD, routing.expert_ids_TK, routing.weights_TK, self._host_reader
            ), None
        groups = (
            reuse.groups
            if reuse
            else group_tokens(
                routing.expert_ids_TK,
                self.router.config.num_experts,
                num_ranks=self.dispatcher.num_ranks,
                method="one-pass" if self.config.one_pass else "loop",
                implementation=self.config.grouping_implementation,
                host_reader=self._host_reader,
            )
        )
        x_RD, counts_e, dispatch = self.dispatcher.dispatch(x_TD, groups, reuse)
        if self.config.one_pass:
            y_RD = self.experts(x_RD, counts_e)
        else:
            y_RD = self.experts.forward_by_slice(x_RD, counts_e, self._host_reader)
        return self.dispatcher.combine(y_RD, dispatch, routing.weights_TK), dispatch

    def _balance_and_log(
        self, out_TD: Tensor, routing: Routing, dispatch: DispatchMetadata | None, context: ForwardContext
    ) -> Tensor:
        """Attach this layer's losses to its output and, in forward, report its statistics."""
        config, ids_TK = self.config, routing.expert_ids_TK
        counts_E = dispatch.groups.counts_E if dispatch else count_ids(ids_TK, self.router.config.num_experts)
        if config.balance_documents:
            segment_ids_T = context.sequence.segment_ids_T[: ids_TK.shape[0]]
            aux = document_balancing_loss(routing.probs_TE, ids_TK, segment_ids_T, context.sequence.num_segments)
        else:
            aux = load_balancing_loss(routing.probs_TE, counts_E, ids_TK.shape[1])
        z = z_loss(routing.logits_TE)
        if context.router_log is not None and not context.is_recompute:
            dropped = ids_TK.numel() - counts_E.sum()
            record = RouterRecord(config.layer_index, counts_E, aux.detach(), z.detach(), dropped)
            context.router_log.append(record)
        if config.aux_loss_coeff == 0.0 and config.z_loss_coeff == 0.0:
            return out_TD
        loss = config.aux_loss_coeff * aux + config.z_loss_coeff * z
        return attach_losses(out_TD, loss, context.aux_loss_scale)
