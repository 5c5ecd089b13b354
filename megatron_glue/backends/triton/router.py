"""A router in Triton: scores, choice, weights and statistics in one pass over the logits, and one pass back.

A program holds the logits of a few tokens, all experts of each, and chooses by K rounds of a maximum over int64 keys
that hold a score's bits above the column counted backwards (see ``ops/topk.py``): equal scores go to the lower expert
id, so the choice has one right answer without a sort. Counts and sums of probabilities are first taken per
program, then added up by a second, small kernel: atomics on floats would add in another order in every run.

Backward computes the scores again from the logits; forward leaves nothing behind but them and the choice.

The backend ``triton`` of the role ``router``. It stands inside the router of an MoE layer, behind the product that
makes the logits.

Shape suffixes: T tokens, E experts, K top-k, B programs, t tokens, X columns (E rounded up to a power of two) and C
choices (K likewise) of one tile, b programs of one tile.
"""

# Triton may be missing where types are checked, and its own types do not know that a launch takes plain numbers.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.router import RoutedTokens, RoutingRule, RoutingStatistics

# Of one tile: as many as the registers of one program hold besides the keys.
_MAX_TILE_ELEMENTS = 2048
_TILES_PER_PROGRAM = 4
_PARTS_PER_STEP = 32
_LOWEST_KEY = tl.constexpr(-(2**63))
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _scores_of(logits_tX, is_expert_X, IS_SOFTMAX: tl.constexpr):
    """Scores, probabilities and log-sum-exp; columns behind the last expert get zeros."""
    largest_t = tl.max(logits_tX, 1)
    powers_tX = tl.exp(logits_tX - largest_t[:, None])
    sum_t = tl.sum(powers_tX, 1)
    softmax_tX = powers_tX / sum_t[:, None]
    log_sum_exp_t = largest_t + tl.log(sum_t)
    if IS_SOFTMAX:
        scores_tX = softmax_tX
        probs_tX = softmax_tX
        score_sum_t = sum_t
    else:
        scores_tX = tl.where(is_expert_X[None, :], 1.0 / (1.0 + tl.exp(-logits_tX)), 0.0)
        score_sum_t = tl.sum(scores_tX, 1)
        probs_tX = scores_tX / score_sum_t[:, None]
    return scores_tX, probs_tX, softmax_tX, score_sum_t, log_sum_exp_t


@triton.jit
def _keys_of(scores_tX, columns_X, NUM_EXPERTS: tl.constexpr):
    """Different integers in the order of (score, column counted backwards)."""
    # -0.0 and 0.0 are equal and must tie.
    scores_tX = tl.where(scores_tX == 0.0, 0.0, scores_tX)
    bits_tX = scores_tX.to(tl.int32, bitcast=True)
    # Negative floats order backwards when read as integers: flip all their bits but the sign.
    bits_tX = bits_tX ^ ((bits_tX >> 31) & 0x7FFFFFFF)
    keys_tX = (bits_tX.to(tl.int64) << 32) | (NUM_EXPERTS - columns_X)[None, :].to(tl.int64)
    return tl.where((columns_X < NUM_EXPERTS)[None, :], keys_tX, _LOWEST_KEY)


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits_ptr,
    bias_ptr,
    given_ids_ptr,
    ids_ptr,
    weights_ptr,
    probs_ptr,
    log_sum_exp_ptr,
    count_parts_ptr,
    prob_parts_ptr,
    logits_stride,
    num_tokens,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Route the tokens of NUM_TILES tiles, and count and sum over them."""
    program = tl.program_id(0).to(tl.int64)
    columns_X = tl.arange(0, COLUMNS)
    choices_C = tl.arange(0, CHOICES)
    is_expert_X = columns_X < NUM_EXPERTS
    counts_X = tl.zeros([COLUMNS], tl.int32)
    prob_sums_X = tl.zeros([COLUMNS], tl.float32)
    for tile in range(NUM_TILES):
        tokens_t = (program * NUM_TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        is_token_t = tokens_t < num_tokens
        is_live_tX = is_token_t[:, None] & is_expert_X[None, :]
        logits_at_tX = tokens_t[:, None] * logits_stride + columns_X[None, :]
        logits_tX = tl.load(logits_ptr + logits_at_tX, mask=is_live_tX, other=0.0)
        logits_tX = tl.where(is_expert_X[None, :], logits_tX, float("-inf"))
        scores_tX, probs_tX, _softmax, _sum, log_sum_exp_t = _scores_of(logits_tX, is_expert_X, IS_SOFTMAX)
        if HAS_BIAS:
            bias_X = tl.load(bias_ptr + columns_X, mask=is_expert_X, other=0.0)
            keys_tX = _keys_of(scores_tX + bias_X[None, :], columns_X, NUM_EXPERTS)
        else:
            keys_tX = _keys_of(scores_tX, columns_X, NUM_EXPERTS)
        ids_tC = tl.zeros([TOKENS, CHOICES], tl.int64)
        weights_tC = tl.zeros([TOKENS, CHOICES], tl.float32)
        for k in range(TOP_K):
            if IS_GIVEN:
                id_t = tl.load(given_ids_ptr + tokens_t * TOP_K + k, mask=is_token_t, other=0)
                is_chosen_tX = columns_X[None, :] == id_t[:, None]
            else:
                best_t = tl.max(keys_tX, 1)
                id_t = NUM_EXPERTS - (best_t & 0x7FFFFFFF)
                is_chosen_tX = keys_tX == best_t[:, None]
                keys_tX = tl.where(is_chosen_tX, _LOWEST_KEY, keys_tX)
            weight_t = tl.sum(tl.where(is_chosen_tX, scores_tX, 0.0), 1)
            ids_tC = tl.where(choices_C[None, :] == k, id_t[:, None], ids_tC)
            weights_tC = tl.where(choices_C[None, :] == k, weight_t[:, None], weights_tC)
            counts_X += tl.sum((is_chosen_tX & is_live_tX).to(tl.int32), 0)
        if IS_NORMALISED:
            weights_tC = weights_tC / (tl.sum(weights_tC, 1) + _TINY)[:, None]
        prob_sums_X += tl.sum(tl.where(is_live_tX, probs_tX, 0.0), 0)
        choices_at_tC = tokens_t[:, None] * TOP_K + choices_C[None, :]
        is_choice_tC = is_token_t[:, None] & (choices_C < TOP_K)[None, :]
        tl.store(ids_ptr + choices_at_tC, ids_tC, mask=is_choice_tC)
        tl.store(weights_ptr + choices_at_tC, weights_tC * scale, mask=is_choice_tC)
        tl.store(probs_ptr + tokens_t[:, None] * NUM_EXPERTS + columns_X[None, :], probs_tX, mask=is_live_tX)
        tl.store(log_sum_exp_ptr + tokens_t, log_sum_exp_t, mask=is_token_t)
    tl.store(count_parts_ptr + program * NUM_EXPERTS + columns_X, counts_X, mask=is_expert_X)
    tl.store(prob_parts_ptr + program * NUM_EXPERTS + columns_X, prob_sums_X, mask=is_expert_X)


@triton.jit(do_not_specialize=["num_parts"])
def _add_parts(
    count_parts_ptr,
    prob_parts_ptr,
    counts_ptr,
    prob_sums_ptr,
    num_parts,
    num_experts,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up what all programs counted and summed, in a fixed order, for some columns."""
    columns_X = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    counts_bX = tl.zeros([PARTS, COLUMNS], tl.int64)
    prob_sums_bX = tl.zeros([PARTS, COLUMNS], tl.float32)
    start = tl.full([], 0, tl.int64)
    while start < num_parts:
        parts_b = start + tl.arange(0, PARTS)
        parts_at_bX = parts_b[:, None] * num_experts + columns_X[None, :]
        is_live_bX = (parts_b < num_parts)[:, None] & (columns_X < num_experts)[None, :]
        counts_bX += tl.load(count_parts_ptr + parts_at_bX, mask=is_live_bX, other=0)
        prob_sums_bX += tl.load(prob_parts_ptr + parts_at_bX, mask=is_live_bX, other=0.0)
        start += PARTS
    tl.store(counts_ptr + columns_X, tl.sum(counts_bX, 0), mask=columns_X < num_experts)
    tl.store(prob_sums_ptr + columns_X, tl.sum(prob_sums_bX, 0), mask=columns_X < num_experts)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward(
    logits_ptr,
    ids_ptr,
    grad_weights_ptr,
    grad_probs_ptr,
    grad_prob_sums_ptr,
    grad_log_sum_exp_ptr,
    grad_logits_ptr,
    logits_stride,
    num_tokens,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    HAS_GRAD_WEIGHTS: tl.constexpr,
    HAS_GRAD_PROBS: tl.constexpr,
    HAS_GRAD_PROB_SUMS: tl.constexpr,
    HAS_GRAD_LOG_SUM_EXP: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of the logits of one tile from those of weights, probabilities, their sums and the log-sum-exp."""
    tokens_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns_X = tl.arange(0, COLUMNS)
    is_token_t = tokens_t < num_tokens
    is_expert_X = columns_X < NUM_EXPERTS
    is_live_tX = is_token_t[:, None] & is_expert_X[None, :]
    logits_at_tX = tokens_t[:, None] * logits_stride + columns_X[None, :]
    logits_tX = tl.load(logits_ptr + logits_at_tX, mask=is_live_tX, other=0.0)
    logits_tX = tl.where(is_expert_X[None, :], logits_tX, float("-inf"))
    scores_tX, probs_tX, softmax_tX, score_sum_t, _lse = _scores_of(logits_tX, is_expert_X, IS_SOFTMAX)
    grad_scores_tX = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if HAS_GRAD_WEIGHTS:
        times_chosen_tX = tl.zeros([TOKENS, COLUMNS], tl.float32)
        chosen_sum_t = tl.zeros([TOKENS], tl.float32)
        dot_t = tl.zeros([TOKENS], tl.float32)
        for k in range(TOP_K):
            id_t = tl.load(ids_ptr + tokens_t * TOP_K + k, mask=is_token_t, other=0)
            grad_t = tl.load(grad_weights_ptr + tokens_t * TOP_K + k, mask=is_token_t, other=0.0) * scale
            is_chosen_tX = columns_X[None, :] == id_t[:, None]
            score_t = tl.sum(tl.where(is_chosen_tX, scores_tX, 0.0), 1)
            chosen_sum_t += score_t
            dot_t += grad_t * score_t
            times_chosen_tX += is_chosen_tX.to(tl.float32)
            grad_scores_tX += tl.where(is_chosen_tX, grad_t[:, None], 0.0)
        if IS_NORMALISED:
            divisor_t = chosen_sum_t + _TINY
            common_t = dot_t / divisor_t
            grad_scores_tX = (grad_scores_tX - times_chosen_tX * common_t[:, None]) / divisor_t[:, None]
    grad_probs_tX = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if HAS_GRAD_PROBS:
        probs_at_tX = tokens_t[:, None] * NUM_EXPERTS + columns_X[None, :]
        grad_probs_tX += tl.load(grad_probs_ptr + probs_at_tX, mask=is_live_tX, other=0.0)
    if HAS_GRAD_PROB_SUMS:
        grad_probs_tX += tl.load(grad_prob_sums_ptr + columns_X, mask=is_expert_X, other=0.0)[None, :]
    if IS_SOFTMAX:
        grad_probs_tX += grad_scores_tX
        mean_t = tl.sum(grad_probs_tX * probs_tX, 1)
        grad_logits_tX = probs_tX * (grad_probs_tX - mean_t[:, None])
    else:
        mean_t = tl.sum(grad_probs_tX * probs_tX, 1)
        grad_scores_tX += (grad_probs_tX - mean_t[:, None]) / score_sum_t[:, None]
        grad_logits_tX = grad_scores_tX * scores_tX * (1.0 - scores_tX)
    if HAS_GRAD_LOG_SUM_EXP:
        grad_t = tl.load(grad_log_sum_exp_ptr + tokens_t, mask=is_token_t, other=0.0)
        grad_logits_tX += grad_t[:, None] * softmax_tX
    tl.store(grad_logits_ptr + tokens_t[:, None] * NUM_EXPERTS + columns_X[None, :], grad_logits_tX, mask=is_live_tX)


def route(
    logits_TE: Tensor, rule: RoutingRule, expert_bias_E: Tensor | None, expert_ids_TK: Tensor | None
) -> RoutedTokens:
    """Route tokens; see :class:`megatron_glue.backends.router.RouterKernel`.

    Args:
        logits_TE: fp32; rows may stand anywhere.
        rule: What to do with them.
        expert_bias_E: fp32, for the choice only; ``None`` for none.
        expert_ids_TK: int64 choice to be kept; ``None`` to choose now.

    Returns:
        The routing; differentiable, once, with respect to the logits.

    Raises:
        ValueError: If there are fewer experts than choices.
    """
    if not 1 <= rule.top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k={rule.top_k}: must lie between 1 and the {logits_TE.shape[1]} experts")
    ids_TK, weights_TK, probs_TE, counts_E, prob_sums_E, log_sum_exp_T = _Route.apply(
        logits_TE, rule, expert_bias_E, expert_ids_TK
    )
    statistics = RoutingStatistics(counts_E, prob_sums_E, log_sum_exp_T)
    return RoutedTokens(ids_TK if expert_ids_TK is None else expert_ids_TK, weights_TK, probs_TE, statistics)


def _tile(num_experts: int) -> dict[str, int]:
    columns = triton.next_power_of_2(num_experts)
    return {"TOKENS": max(1, _MAX_TILE_ELEMENTS // columns), "COLUMNS": columns}


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, rule: RoutingRule, expert_bias_E: Tensor | None, expert_ids_TK: Tensor | None
    ) -> tuple[Tensor, ...]:
        if logits_TE.stride(1) != 1:
            logits_TE = logits_TE.contiguous()
        num_tokens, num_experts = logits_TE.shape
        tile = _tile(num_experts)
        num_programs = triton.cdiv(num_tokens, tile["TOKENS"] * _TILES_PER_PROGRAM)
        given_TK = None if expert_ids_TK is None else expert_ids_TK.contiguous()
        ids_TK = logits_TE.new_empty(num_tokens, rule.top_k, dtype=torch.int64)
        weights_TK = logits_TE.new_empty(num_tokens, rule.top_k)
        probs_TE = logits_TE.new_empty(num_tokens, num_experts)
        log_sum_exp_T = logits_TE.new_empty(num_tokens)
        count_parts_BE = logits_TE.new_empty(num_programs, num_experts, dtype=torch.int32)
        prob_parts_BE = logits_TE.new_empty(num_programs, num_experts)
        _route[(num_programs,)](
            logits_TE,
            logits_TE if expert_bias_E is None else expert_bias_E,
            ids_TK if given_TK is None else given_TK,
            ids_TK,
            weights_TK,
            probs_TE,
            log_sum_exp_T,
            count_parts_BE,
            prob_parts_BE,
            logits_TE.stride(0),
            num_tokens,
            rule.weight_scale,
            NUM_EXPERTS=num_experts,
            TOP_K=rule.top_k,
            IS_SOFTMAX=rule.score_function == "softmax",
            HAS_BIAS=expert_bias_E is not None,
            IS_GIVEN=given_TK is not None,
            IS_NORMALISED=rule.normalise_weights,
            NUM_TILES=_TILES_PER_PROGRAM,
            CHOICES=triton.next_power_of_2(rule.top_k),
            **tile,
        )
        counts_E = logits_TE.new_empty(num_experts, dtype=torch.int64)
        prob_sums_E = logits_TE.new_empty(num_experts)
        columns = 32
        _add_parts[(triton.cdiv(num_experts, columns),)](
            count_parts_BE,
            prob_parts_BE,
            counts_E,
            prob_sums_E,
            num_programs,
            num_experts,
            PARTS=_PARTS_PER_STEP,
            COLUMNS=columns,
        )
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_TK, counts_E)
        ctx.save_for_backward(logits_TE, ids_TK)
        return ids_TK, weights_TK, probs_TE, counts_E, prob_sums_E, log_sum_exp_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_TE, ids_TK = ctx.saved_tensors
        num_tokens, num_experts = logits_TE.shape
        _, grad_weights, grad_probs, _, grad_prob_sums, grad_log_sum_exp = grad_outputs
        grads = [grad_weights, grad_probs, grad_prob_sums, grad_log_sum_exp]
        grad_logits_TE = logits_TE.new_empty(num_tokens, num_experts)
        tile = _tile(num_experts)
        _route_backward[(triton.cdiv(num_tokens, tile["TOKENS"]),)](
            logits_TE,
            ids_TK,
            *(logits_TE if grad is None else grad.contiguous() for grad in grads),
            grad_logits_TE,
            logits_TE.stride(0),
            num_tokens,
            ctx.rule.weight_scale,
            NUM_EXPERTS=num_experts,
            TOP_K=ctx.rule.top_k,
            IS_SOFTMAX=ctx.rule.score_function == "softmax",
            IS_NORMALISED=ctx.rule.normalise_weights,
            HAS_GRAD_WEIGHTS=grad_weights is not None,
            HAS_GRAD_PROBS=grad_probs is not None,
            HAS_GRAD_PROB_SUMS=grad_prob_sums is not None,
            HAS_GRAD_LOG_SUM_EXP=grad_log_sum_exp is not None,
            **tile,
        )
        return grad_logits_TE, None, None, None
