"""The role ``router``: what a kernel that turns logits into a choice is called with, and what it returns.

The router of a layer has operators of its own and needs no kernel; one that does all of it in one pass over the logits
can take their place. Where the logits come from, and whether a choice was made before, is the router's business.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class RoutingRule:
    """How logits become a choice and weights.

    Attributes:
        top_k: Experts per token.
        score_function: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalise_weights: Divide the weights of a token by their sum.
        weight_scale: Factor on the weights, after normalisation.
    """

    top_k: int
    score_function: Literal["softmax", "sigmoid"]
    normalise_weights: bool
    weight_scale: float


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """What the auxiliary losses need to know about the tokens of one rank.

    Attributes:
        counts_E: int64. Pairs of each expert.
        prob_sums_E: fp32. Sum of each expert's probabilities over the tokens; differentiable.
        log_sum_exp_T: fp32. log(sum(exp(logits))) of each token; differentiable.
    """

    counts_E: Tensor
    prob_sums_E: Tensor
    log_sum_exp_T: Tensor


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """A choice, its weights and its statistics.

    Attributes:
        expert_ids_TK: int64. Chosen experts, best first.
        weights_TK: fp32. Their weights; differentiable.
        probs_TE: fp32. Scores as probabilities, each row sums to 1; differentiable.
        statistics: Taken in the same pass.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor
    statistics: RoutingStatistics


class RouterKernel(Protocol):
    """Scores, choice, weights and statistics from logits."""

    def __call__(
        self, logits_TE: Tensor, rule: RoutingRule, expert_bias_E: Tensor | None, expert_ids_TK: Tensor | None
    ) -> RoutedTokens:
        """Route.

        Args:
            logits_TE: fp32.
            rule: What to do with them.
            expert_bias_E: fp32, added to the scores for the choice and for nothing else; ``None`` for none.
            expert_ids_TK: int64 choice made before, to be kept; ``None`` to choose now: value descending, equal values
                by lower index, as :func:`megatron_glue.ops.topk.topk_lowest_index`.

        Returns:
            The routing of these tokens.
        """
        ...
