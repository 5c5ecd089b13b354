"""Moving rows into expert order and back in Triton: one kernel per direction and pass.

``permute_rows`` reads each token's row once and writes its K copies. ``unpermute_rows`` reads a token's K rows, weighs
them and writes their sum. Their backward passes mirror them: the sum without weights, and one kernel that spreads a
token's gradient over its K rows and takes the K dot products for the router's weights beside it.

Each program serves one token and every sum is taken in order of k in fp32 (fp64 for fp64 rows), so results are the same
in every run. Rows past the last offset are never read if there are sentinels. Against ``ops/permute.py``, whose
contract this is, gradients of the weights are not rounded to the dtype of the rows on their way.

The backend ``triton`` of the role ``permutation``. It stands on both sides of the experts.

Row numbers are int64 before they are multiplied by a width: N * D passes 2^31 from 38,000 tokens with 8 choices and
D = 7168.

Shape suffixes: T tokens, D model, K top-k, N = T*K pairs, C columns of one tile.
"""

# Triton may be missing where types are checked, and its own types do not know that a launch takes plain numbers.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.ops.permute import check_pairs
from megatron_glue.types import TokenGroups

_MAX_TILE = 4096


@triton.jit
def _copy_to_rows(
    x_ptr,
    rows_ptr,
    out_ptr,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write one token's row to its K places."""
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside_C = columns_C < WIDTH
    x_C = tl.load(x_ptr + token * x_stride + columns_C, mask=is_inside_C)
    for k in range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k)
        tl.store(out_ptr + row * out_stride + columns_C, x_C, mask=is_inside_C)


@triton.jit
def _sum_rows(
    y_ptr,
    rows_ptr,
    weights_ptr,
    end_ptr,
    out_ptr,
    y_stride,
    out_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SENTINELS: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up one token's K rows, weighted or not; rows from ``end_ptr`` on count as zeros."""
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside_C = columns_C < WIDTH
    sum_C = tl.zeros([TILE], SUM_DTYPE)
    for k in range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k)
        num_read = WIDTH
        if HAS_SENTINELS:
            num_read = tl.where(row < tl.load(end_ptr), WIDTH, 0)
        is_read_C = columns_C < num_read
        y_C = tl.load(y_ptr + row * y_stride + columns_C, mask=is_read_C, other=0.0)
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + token * TOP_K + k).to(y_C.dtype)
            sum_C += weight.to(SUM_DTYPE) * y_C.to(SUM_DTYPE)
        else:
            sum_C += y_C.to(SUM_DTYPE)
    tl.store(out_ptr + token * out_stride + columns_C, sum_C.to(out_ptr.dtype.element_ty), mask=is_inside_C)


@triton.jit
def _spread_gradient(
    grad_ptr,
    y_ptr,
    rows_ptr,
    weights_ptr,
    end_ptr,
    grad_y_ptr,
    grad_weights_ptr,
    grad_stride,
    y_stride,
    grad_y_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NEEDS_ROWS: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr,
    HAS_SENTINELS: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Give one token's gradient to its K rows, and its dot products with them to its K weights."""
    token = tl.program_id(0).to(tl.int64)
    for k in range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k)
        weight = tl.load(weights_ptr + token * TOP_K + k).to(y_ptr.dtype.element_ty).to(SUM_DTYPE)
        num_read = WIDTH
        if HAS_SENTINELS:
            num_read = tl.where(row < tl.load(end_ptr), WIDTH, 0)
        products_C = tl.zeros([TILE], SUM_DTYPE)
        for start in range(0, WIDTH, TILE):
            columns_C = start + tl.arange(0, TILE)
            is_inside_C = columns_C < WIDTH
            is_read_C = columns_C < num_read
            grad_C = tl.load(grad_ptr + token * grad_stride + columns_C, mask=is_inside_C, other=0.0).to(SUM_DTYPE)
            if NEEDS_WEIGHTS:
                y_C = tl.load(y_ptr + row * y_stride + columns_C, mask=is_read_C, other=0.0).to(SUM_DTYPE)
                products_C += grad_C * y_C
            if NEEDS_ROWS:
                grad_y_C = tl.where(is_read_C, grad_C * weight, 0.0).to(grad_y_ptr.dtype.element_ty)
                tl.store(grad_y_ptr + row * grad_y_stride + columns_C, grad_y_C, mask=is_inside_C)
        if NEEDS_WEIGHTS:
            dot = tl.sum(products_C, 0).to(grad_weights_ptr.dtype.element_ty)
            tl.store(grad_weights_ptr + token * TOP_K + k, dot)


def permute_rows(x_TD: Tensor, groups: TokenGroups, *, has_sentinels: bool = True) -> Tensor:
    """Copy token rows into expert order; contract of :func:`megatron_glue.ops.permute.permute_rows`.

    Args:
        x_TD: [T, D] floating point.
        groups: Grouping of T * K pairs.
        has_sentinels: False if every pair is known to have an expert.

    Returns:
        [N, D]; differentiable, once.
    """
    check_pairs(x_TD.shape[0], groups)
    return _PermuteRows.apply(x_TD, groups, has_sentinels)


def unpermute_rows(y_ND: Tensor, groups: TokenGroups, weights_TK: Tensor, *, has_sentinels: bool = True) -> Tensor:
    """Add up each token's K rows, weighted; contract of :func:`megatron_glue.ops.permute.unpermute_rows`.

    Args:
        y_ND: [N, D] in expert order; the tail may hold anything, NaN included.
        groups: Grouping of T * K pairs.
        weights_TK: [T, K] floating point; used in the dtype of ``y_ND``.
        has_sentinels: False if every pair is known to have an expert.

    Returns:
        [T, D] in the dtype of ``y_ND``; differentiable, once, with respect to rows and weights.
    """
    check_pairs(weights_TK.shape[0], groups)
    return _UnpermuteRows.apply(y_ND, weights_TK, groups, has_sentinels)


def _with_dense_rows(x_RD: Tensor) -> Tensor:
    """Rows may stand anywhere, but the elements of one must be neighbours."""
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def _tile(width: int) -> dict[str, int]:
    """Columns of one tile, and the warps that share it."""
    columns = min(_MAX_TILE, triton.next_power_of_2(max(1, width)))
    return {"TILE": columns, "num_warps": min(8, max(1, columns // 512))}


def _sum_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _sum_choices(rows_ND: Tensor, groups: TokenGroups, weights_TK: Tensor | None, has_sentinels: bool) -> Tensor:
    """[T, D]: for each token the (weighted) sum of its K rows."""
    num_tokens, width = groups.num_pairs // groups.top_k, rows_ND.shape[1]
    out_TD = rows_ND.new_empty(num_tokens, width)
    tile = _tile(width)
    _sum_rows[(num_tokens, triton.cdiv(width, tile["TILE"]))](
        rows_ND,
        groups.inverse_N,
        groups.inverse_N if weights_TK is None else weights_TK,
        groups.offsets_E[-1:],
        out_TD,
        rows_ND.stride(0),
        out_TD.stride(0),
        WIDTH=width,
        TOP_K=groups.top_k,
        HAS_WEIGHTS=weights_TK is not None,
        HAS_SENTINELS=has_sentinels,
        SUM_DTYPE=_sum_dtype(rows_ND.dtype),
        **tile,
    )
    return out_TD


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: TokenGroups, has_sentinels: bool) -> Tensor:
        ctx.groups, ctx.has_sentinels = groups, has_sentinels
        x_TD = _with_dense_rows(x_TD)
        num_tokens, width = x_TD.shape
        out_ND = x_TD.new_empty(groups.num_pairs, width)
        tile = _tile(width)
        _copy_to_rows[(num_tokens, triton.cdiv(width, tile["TILE"]))](
            x_TD, groups.inverse_N, out_ND, x_TD.stride(0), out_ND.stride(0), WIDTH=width, TOP_K=groups.top_k, **tile
        )
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad_ND = _with_dense_rows(grad_outputs[0])
        return _sum_choices(grad_ND, ctx.groups, None, ctx.has_sentinels), None, None


class _UnpermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, weights_TK: Tensor, groups: TokenGroups, has_sentinels: bool) -> Tensor:
        y_ND, weights_TK = _with_dense_rows(y_ND), weights_TK.contiguous()
        ctx.groups, ctx.has_sentinels = groups, has_sentinels
        ctx.save_for_backward(y_ND, weights_TK)
        return _sum_choices(y_ND, groups, weights_TK, has_sentinels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_ND, weights_TK = ctx.saved_tensors
        needs_rows, needs_weights = ctx.needs_input_grad[:2]
        grad_TD = _with_dense_rows(grad_outputs[0])
        num_tokens, width = grad_TD.shape
        # A gradient that nobody needs has a place of no size, which the kernel does not touch.
        grad_y_ND = grad_TD.new_empty(ctx.groups.num_pairs if needs_rows else 0, width)
        grad_weights_TK = weights_TK.new_empty(num_tokens if needs_weights else 0, ctx.groups.top_k)
        _spread_gradient[(num_tokens,)](
            grad_TD,
            y_ND,
            ctx.groups.inverse_N,
            weights_TK,
            ctx.groups.offsets_E[-1:],
            grad_y_ND,
            grad_weights_TK,
            grad_TD.stride(0),
            y_ND.stride(0),
            grad_y_ND.stride(0),
            WIDTH=width,
            TOP_K=ctx.groups.top_k,
            NEEDS_ROWS=needs_rows,
            NEEDS_WEIGHTS=needs_weights,
            HAS_SENTINELS=ctx.has_sentinels,
            SUM_DTYPE=_sum_dtype(y_ND.dtype),
            **_tile(width),
        )
        return grad_y_ND if needs_rows else None, grad_weights_TK if needs_weights else None, None, None
