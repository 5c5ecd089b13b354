"""One mixture-of-experts feed-forward layer: route, group once, dispatch, compute, combine.

Takes the place of a block's feed-forward: ``layer(x_TD, context) -> x_TD``. Only the valid tokens of the micro-batch
are routed, counted and computed; padding comes out as zeros. Under sequence parallelism the layer sees only this rank's
rows; which of them are tokens follows on the host from the layout, and a rank without any joins every collective.

The decision (chosen experts, grouping, splits, counts of the whole micro-batch) is made once per micro-batch. The
recompute of a checkpointed block finds it in ``context.decisions``: the same experts, no second grouping, no second
exchange of counts, no second log entry.

Shape suffixes: T tokens, D model, K top-k, R received rows, E experts, e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.moe.balance import OwnRows, RouterBalance
from megatron_glue.moe.dispatcher import Dispatch, Dispatcher, RoutedTokens
from megatron_glue.moe.experts import ComputeExperts, GroupedExperts
from megatron_glue.moe.router import Router, Routing
from megatron_glue.ops.grouping import GroupingImplementation, group_tokens
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.types import ForwardContext, RoutingDecision, TokenGroups


@dataclass(frozen=True, eq=False)
class MoELayerConfig:
    """What the layer needs beside its parts.

    Attributes:
        layer_index: Global index of the layer.
        host_reader: Counts every read of a device value; the one-pass way on one rank makes none.
        one_pass: Group all pairs in one pass and compute experts by grouped products; else loop over experts.
        grouping_implementation: Of the one pass.
        overlap_shared_expert: Compute the shared expert while rows travel to the routed ones.
    """

    layer_index: int
    host_reader: HostReader
    one_pass: bool = True
    grouping_implementation: GroupingImplementation = "auto"
    overlap_shared_expert: bool = False


class MoELayer(nn.Module):
    """Routed experts, and a shared one if given.

    Args:
        router: Chooses experts.
        experts: This rank's experts.
        dispatcher: Brings rows to experts and back.
        shared_expert: Called ``shared_expert(x_TD, context)`` and added; ``None`` for none. Under sequence parallelism
            it gets this rank's rows with their padding, as it exchanges rows itself; else the valid tokens.
        balance: Keeps the router balanced.
        config: See :class:`MoELayerConfig`.
    """

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        dispatcher: Dispatcher,
        shared_expert: nn.Module | None,
        balance: RouterBalance,
        config: MoELayerConfig,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.shared_expert = shared_expert
        self.balance = balance
        self.config = config

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the layer on one micro-batch.

        Args:
            x_TD: [T, D] this rank's rows of the residual stream, padding at the tail.
            context: The micro-batch.

        Returns:
            [T, D]; zeros on padding.

        Raises:
            ValueError: If the rows are not those of the context.
        """
        return context.recompute("moe", self._run, x_TD)

    def _run(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        rows = OwnRows.of(context, x_TD.shape[0])
        num_pad = rows.num_rows - rows.num_valid
        valid_TD = x_TD[: rows.num_valid] if num_pad else x_TD
        saved = self._saved_decision(context)
        routing = self.router(valid_TD, None if saved is None else saved.expert_ids_TK)
        dispatch = self._begin_dispatch(
            RoutedTokens(
                valid_TD,
                routing.expert_ids_TK,
                routing.weights_TK,
                rows.num_rows,
                may_overflow=context.overflow_log is not None,
            ),
            saved,
        )
        if dispatch is not None and dispatch.num_overflowing is not None and not context.is_recompute:
            assert context.overflow_log is not None, "a dispatch overflows only where somebody looks after it"
            context.overflow_log.append(dispatch.num_overflowing)
        counts_E = dispatch.counts_E if dispatch else routing.counts_E
        counting = None if saved else self.balance.start_counts(routing, counts_E, rows, context)
        is_overlapped = self.config.overlap_shared_expert and not self.dispatcher.is_local
        # Before rows are sent, so that a GPU has work while the host waits for the splits; or beside the rows.
        shared_TD = None if is_overlapped else self._run_shared(x_TD, valid_TD, context)
        if dispatch is not None:
            dispatch.send()
        if is_overlapped:
            shared_TD = self._run_shared(x_TD, valid_TD, context)
        with context.region("moe_act"):
            out_TD = (
                self._run_experts(valid_TD, routing)
                if dispatch is None
                else dispatch.run(partial(self._split_experts, context))
            )
        if shared_TD is not None:
            out_TD = out_TD + shared_TD
        balance_counts = saved.balance_counts if saved else counting.wait() if counting else None
        out_TD = self.balance.finish(out_TD, routing, counts_E, balance_counts, rows, context)
        if saved is None and context.decisions is not None:
            metadata = None if dispatch is None else dispatch.metadata
            decision = RoutingDecision(routing.expert_ids_TK, metadata, balance_counts)
            context.decisions.put(self._decision_key, decision)
        return F.pad(out_TD, (0, 0, 0, num_pad)) if num_pad else out_TD

    @property
    def _decision_key(self) -> str:
        return f"moe.{self.config.layer_index}"

    def _saved_decision(self, context: ForwardContext) -> RoutingDecision | None:
        if not context.is_recompute or context.decisions is None:
            return None
        saved = context.decisions.get(self._decision_key)
        assert isinstance(saved, RoutingDecision), "a recompute follows a forward that saved its decision"
        return saved

    def _run_shared(self, x_TD: Tensor, valid_TD: Tensor, context: ForwardContext) -> Tensor | None:
        """The shared expert's output for the valid tokens."""
        if self.shared_expert is None:
            return None
        if context.residual_rows is None:
            return self.shared_expert(valid_TD, context)
        # Every rank must bring as many rows as the others.
        out_TD = self.shared_expert(x_TD, context)
        return out_TD[: valid_TD.shape[0]] if valid_TD is not x_TD else out_TD

    def _begin_dispatch(self, tokens: RoutedTokens, saved: RoutingDecision | None) -> Dispatch | None:
        """Group tokens by expert; the loop over masks on one rank neither groups nor sends."""
        if not self.config.one_pass and self.dispatcher.is_local:
            return None
        return self.dispatcher.begin(tokens, self._group_tokens, saved.dispatch if saved else None)

    def _group_tokens(self, expert_ids_TK: Tensor, num_experts: int, num_ranks: int) -> TokenGroups:
        return group_tokens(
            expert_ids_TK,
            num_experts,
            num_ranks=num_ranks,
            method="one-pass" if self.config.one_pass else "loop",
            implementation=self.config.grouping_implementation,
            host_reader=self.config.host_reader,
        )

    def _split_experts(self, context: ForwardContext, sizes: Sequence[int], dtype: torch.dtype) -> list[ComputeExperts]:
        if self.config.one_pass:
            rebuilt = partial(context.rebuilt, "moe_act") if context.rebuilds("moe_act") else None
            return self.experts.split(sizes, dtype, rebuilt)
        return self.experts.split_by_slice(sizes, dtype, self.config.host_reader)

    def _run_experts(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The loop over masks."""
        host_reader = self.config.host_reader
        return self.experts.forward_by_mask(x_TD, routing.expert_ids_TK, routing.weights_TK, host_reader)
