"""Moving rows into expert order and back, by gathers only.

``permute_rows`` copies each token's row once per choice, in expert order; ``unpermute_rows`` adds each token's K
results up again, weighted. Neither their forward nor their backward scatters: every sum has a fixed order
(k = 0, 1, ...), so results are the same in every run, and no [T, K, D] intermediate exists (``embedding_bag`` gathers
and adds in one pass).

Pairs with a sentinel expert stand in the tail, past the last offset, where a grouped product leaves uninitialised
memory. With ``has_sentinels`` the tail is never read, in either direction; a dropless layer knows on the host that
there is no tail and saves that pass.

Stands on both sides of the experts of an MoE layer. It knows no expert, no weight and no other rank.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, R rows, Q replicas of a row, S = N*Q rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.types import ReplicatedGroups, TokenGroups


def permute_rows(x_TD: Tensor, groups: TokenGroups, *, has_sentinels: bool = True) -> Tensor:
    """Copy token rows into expert order.

    Args:
        x_TD: [T, D] floating point.
        groups: Grouping of T * K pairs.
        has_sentinels: False if every pair is known to have an expert.

    Returns:
        [N, D]; row i belongs to pair ``groups.order_N[i]``. Differentiable: the gradient of a token is the sum over its
        K rows, without those in the tail.
    """
    check_pairs(x_TD.shape[0], groups)
    return _PermuteRows.apply(x_TD, groups, has_sentinels)


def unpermute_rows(y_ND: Tensor, groups: TokenGroups, weights_TK: Tensor, *, has_sentinels: bool = True) -> Tensor:
    """Add up each token's K rows, weighted, in token order.

    Args:
        y_ND: [N, D] in expert order; the tail may hold anything, NaN included.
        groups: Grouping of T * K pairs.
        weights_TK: [T, K] floating point; used in the dtype of ``y_ND``.
        has_sentinels: False if every pair is known to have an expert.

    Returns:
        [T, D] in the dtype of ``y_ND``. Differentiable with respect to rows and weights; both gradients are zero for
        pairs in the tail.
    """
    check_pairs(weights_TK.shape[0], groups)
    return _UnpermuteRows.apply(y_ND, weights_TK, groups, has_sentinels)


def gather_rows(x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Apply a permutation of rows.

    Args:
        x_RD: [R, D].
        index_R: int64 permutation; row i of the result is row ``index_R[i]``.
        inverse_R: int64, its inverse, so that the backward is a gather too.

    Returns:
        [R, D].
    """
    return _GatherRows.apply(x_RD, index_R, inverse_R)


def sum_replicas(y_SD: Tensor, replicated: ReplicatedGroups) -> Tensor:
    """Add up the Q rows of each row of the grouping that was replicated, in order of q.

    Args:
        y_SD: [S, D] floating point, in the order of the replicas.
        replicated: Which rows belong together.

    Returns:
        [N, D] in the order of the original grouping, in the dtype of ``y_SD``. Each row's gradient is that of its sum.
    """
    return _SumReplicas.apply(y_SD, replicated)


def check_pairs(num_tokens: int, groups: TokenGroups) -> None:
    """Refuse a grouping of other tokens.

    Args:
        num_tokens: T of the rows or weights at hand.
        groups: Grouping of T * K pairs.

    Raises:
        ValueError: If the grouping has another number of pairs.
    """
    if num_tokens * groups.top_k != groups.num_pairs:
        raise ValueError(f"{num_tokens} tokens with {groups.top_k} choices each do not make {groups.num_pairs} pairs")


def _token_of_row(groups: TokenGroups) -> Tensor:
    return torch.div(groups.order_N, groups.top_k, rounding_mode="floor")


def _without_tail(rows_ND: Tensor, groups: TokenGroups) -> Tensor:
    """Zeros past the last offset; a select, because 0 * NaN would stay NaN."""
    rows_N = torch.arange(rows_ND.shape[0], device=rows_ND.device)
    return rows_ND.masked_fill((rows_N >= groups.offsets_E[-1])[:, None], 0.0)


def sum_choices(rows_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Add up each token's K rows; not differentiable.

    Args:
        rows_RD: Floating point.
        rows_TK: int64 [T, K]. Which rows are a token's.
        weights_TK: [T, K] in the dtype of the rows; ``None`` for ones.

    Returns:
        [T, D], accumulated in order of k.
    """
    if rows_TK.numel() == 0:
        return rows_RD.new_zeros(0, rows_RD.shape[1])
    return F.embedding_bag(rows_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)


def dot_choices(grad_TD: Tensor, rows_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """Multiply each token's row of a gradient with each of its K rows; not differentiable.

    The operator behind ``embedding_bag``'s own weight gradient: no [T, K, D] product is ever written.

    Args:
        grad_TD: Floating point.
        rows_RD: In the same dtype.
        rows_TK: int64 [T, K]. Which rows are a token's.

    Returns:
        [T, K] dot products.
    """
    num_tokens, top_k = rows_TK.shape
    if num_tokens == 0:
        return grad_TD.new_zeros(0, top_k)
    first_pair_T = torch.arange(0, num_tokens * top_k, top_k, device=grad_TD.device)
    token_N = torch.div(torch.arange(num_tokens * top_k, device=grad_TD.device), top_k, rounding_mode="floor")
    sum_mode, no_padding = 0, -1
    dots_N = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad_TD, rows_RD, rows_TK.reshape(-1), first_pair_T, token_N, sum_mode, no_padding
    )
    return dots_N.view(num_tokens, top_k)


def _rows_TK(groups: TokenGroups) -> Tensor:
    return groups.inverse_N.view(-1, groups.top_k)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: TokenGroups, has_sentinels: bool) -> Tensor:
        ctx.groups, ctx.has_sentinels = groups, has_sentinels
        return x_TD.index_select(0, _token_of_row(groups))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad_ND = grad_outputs[0].contiguous()
        if ctx.has_sentinels:
            grad_ND = _without_tail(grad_ND, ctx.groups)
        return sum_choices(grad_ND, _rows_TK(ctx.groups), None), None, None


class _UnpermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weights_TK: Tensor, groups: TokenGroups, has_sentinels: bool) -> Tensor:
        if has_sentinels:
            y_ND = _without_tail(y_ND, groups)
        ctx.groups, ctx.has_sentinels, ctx.weights_dtype = groups, has_sentinels, weights_TK.dtype
        weights_TK = weights_TK.to(y_ND.dtype)
        y_ND = y_ND.contiguous()
        ctx.save_for_backward(y_ND, weights_TK)
        return sum_choices(y_ND, _rows_TK(groups), weights_TK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_ND, weights_TK = ctx.saved_tensors
        groups = ctx.groups
        grad_TD = grad_outputs[0].contiguous()
        grad_weights_TK = grad_y_ND = None
        if ctx.needs_input_grad[1]:
            grad_weights_TK = dot_choices(grad_TD, y_ND, _rows_TK(groups)).to(ctx.weights_dtype)
        if ctx.needs_input_grad[0]:
            weights_N1 = weights_TK.reshape(-1, 1).index_select(0, groups.order_N)
            grad_y_ND = grad_TD.index_select(0, _token_of_row(groups)).mul_(weights_N1)
            if ctx.has_sentinels:
                grad_y_ND = _without_tail(grad_y_ND, groups)
        return grad_y_ND, grad_weights_TK, None, None


class _SumReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, replicated: ReplicatedGroups) -> Tensor:
        ctx.replicated = replicated
        if y_SD.shape[0] == 0:
            return y_SD.new_zeros(0, y_SD.shape[1])
        return F.embedding_bag(replicated.rows_NQ, y_SD, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0].index_select(0, ctx.replicated.source_S), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RD.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, inverse_R), None, None
