"""The router: which experts each token goes to, and with which weights.

Logits, scores and weights are fp32 whatever the compute dtype: a choice between near-equal experts must not depend on
rounding, and the recompute of a layer must find the weights of its forward. The choice itself is an input on recompute.

It groups nothing and sends nothing. It stands first in an MoE layer, on the layer's valid tokens only.

Shape suffixes: T tokens, D model, E experts, K top-k, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.backends.router import RouterKernel, RoutingRule, RoutingStatistics
from megatron_glue.ops.grouping import count_ids
from megatron_glue.ops.topk import topk_lowest_index
from megatron_glue.parallel.precision import local


@dataclass(frozen=True)
class RouterConfig:
    """What the router does with its logits.

    Attributes:
        num_experts: E.
        top_k: Experts per token.
        score_function: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalise_weights: Divide the weights of a token by their sum.
        weight_scale: Factor on the weights, after normalisation.
        has_expert_bias: Keep a bias that enters the choice and nothing else.
    """

    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid"]
    normalise_weights: bool
    weight_scale: float
    has_expert_bias: bool


@dataclass(frozen=True, eq=False)
class Routing:
    """What the router says about one micro-batch.

    Attributes:
        expert_ids_TK: int64. Chosen experts, best first.
        weights_TK: fp32. Their weights.
        logits_TE: fp32.
        probs_TE: fp32. Scores as probabilities: each row sums to 1.
        statistics: What the kernel that routed found on its way; ``None`` to derive it when it is asked for.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor
    probs_TE: Tensor
    statistics: RoutingStatistics | None = None

    @property
    def counts_E(self) -> Tensor:
        """int64 pairs of each expert."""
        return self.statistics.counts_E if self.statistics else count_ids(self.expert_ids_TK, self.logits_TE.shape[1])

    @property
    def prob_sums_E(self) -> Tensor:
        """fp32 sum of each expert's probabilities over the tokens."""
        return self.statistics.prob_sums_E if self.statistics else self.probs_TE.sum(0)

    @property
    def log_sum_exp_T(self) -> Tensor:
        """fp32 log(sum(exp(logits))) of each token."""
        return self.statistics.log_sum_exp_T if self.statistics else torch.logsumexp(self.logits_TE, dim=-1)

    def detach(self) -> Routing:
        """The same values, from which no gradient flows; what is derived from them has no graph either."""
        statistics = self.statistics
        if statistics is not None:
            sums_E, log_sum_exp_T = statistics.prob_sums_E.detach(), statistics.log_sum_exp_T.detach()
            statistics = replace(statistics, prob_sums_E=sums_E, log_sum_exp_T=log_sum_exp_T)
        return Routing(
            self.expert_ids_TK, self.weights_TK.detach(), self.logits_TE.detach(), self.probs_TE.detach(), statistics
        )


class Router(nn.Module):
    """A linear map to logits, a score function and a top-k choice.

    Args:
        hidden_size: D.
        config: See :class:`RouterConfig`.
        kernel: Does all that follows the logits in one pass; ``None`` for operators of torch.
    """

    expert_bias_E: Tensor | None

    def __init__(self, hidden_size: int, config: RouterConfig, kernel: RouterKernel | None = None) -> None:
        super().__init__()
        self.config = config
        self._kernel = kernel
        self._rule = RoutingRule(config.top_k, config.score_function, config.normalise_weights, config.weight_scale)
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.has_expert_bias else None
        self.register_buffer("expert_bias_E", bias_E)
        self.register_load_state_dict_post_hook(_keep_bias_fp32)

    def forward(self, x_TD: Tensor, expert_ids_TK: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x_TD: [T, D], any floating dtype.
            expert_ids_TK: A choice made before, to be kept; ``None`` to choose now.

        Returns:
            The routing; weights, logits and probabilities are differentiable.
        """
        logits_TE = F.linear(x_TD.float(), local(self.weight, torch.float32))
        if self._kernel is not None:
            routed = self._kernel(logits_TE, self._rule, self.expert_bias_E, expert_ids_TK)
            return Routing(
                routed.expert_ids_TK, routed.weights_TK, logits_TE, routed.probs_TE, statistics=routed.statistics
            )
        if self.config.score_function == "softmax":
            scores_TE = probs_TE = torch.softmax(logits_TE, dim=-1)
        else:
            scores_TE = torch.sigmoid(logits_TE)
            probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        if expert_ids_TK is None:
            expert_ids_TK = self._choose(scores_TE.detach())
        # A differentiable gather: the router learns from the experts' outputs, not only from its auxiliary losses.
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        if self.config.normalise_weights:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + torch.finfo(torch.float32).tiny)
        if self.config.weight_scale != 1.0:
            weights_TK = weights_TK * self.config.weight_scale
        return Routing(expert_ids_TK, weights_TK, logits_TE, probs_TE)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        if self.expert_bias_E is not None:
            scores_TE = scores_TE + self.expert_bias_E
        return topk_lowest_index(scores_TE, self.config.top_k)[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move and cast as every module does, but leave the bias' fp32 digits alone."""
        before_E = self.expert_bias_E
        super()._apply(fn, recurse)
        if before_E is not None and self.expert_bias_E is not None and self.expert_bias_E.dtype != torch.float32:
            # From the values before the cast: casting back would return rounded ones.
            self.expert_bias_E = before_E.to(self.expert_bias_E.device)
        return self


def _keep_bias_fp32(router: Any, incompatible_keys: Any) -> None:
    """After ``load_state_dict(assign=True)`` of another dtype."""
    if router.expert_bias_E is not None:
        router.expert_bias_E = router.expert_bias_E.float()


@torch.no_grad()
def update_expert_biases(
    routers: Sequence[Router], counts_per_layer_E: Sequence[Tensor], rate: float, is_update: Tensor | None = None
) -> None:
    """Raise the bias of experts with fewer pairs than the mean, lower that of experts with more, by ``rate``.

    Auxiliary-loss-free balancing (Wang et al. 2024; DeepSeek-V3, 2024, section 2.1.2). Call it once per optimizer step.
    The step of a layer is mean-centred: a common shift changes no choice, and without it the biases stay near zero,
    where fp32 has digits left for the scores they are added to.

    Args:
        routers: Routers with a bias, one per MoE layer.
        counts_per_layer_E: For each of them, int64 pairs of each expert, summed over all micro-batches of the step and
            over all data-parallel ranks, so that every rank makes the same update.
        rate: Size of the step.
        is_update: bool device scalar: whether the optimizer updates in this step; ``None`` if it does. If it skips, so
            do the biases: behind activations that are not finite, counts say nothing.

    Raises:
        ValueError: If the lists differ in length or a router has no bias.
    """
    if len(routers) != len(counts_per_layer_E):
        raise ValueError(f"counts_per_layer_E: {len(counts_per_layer_E)} entries for {len(routers)} routers")
    for router, counts_E in zip(routers, counts_per_layer_E, strict=True):
        bias_E = router.expert_bias_E
        if bias_E is None:
            raise ValueError("routers: one of them has no expert bias; build it with has_expert_bias")
        # Integers, so that "equal to the mean" is exact.
        direction_E = (counts_E.sum() - counts_E * counts_E.shape[0]).sign().float()
        change_E = direction_E - direction_E.mean()
        bias_E.add_(change_E if is_update is None else change_E * is_update, alpha=rate)
