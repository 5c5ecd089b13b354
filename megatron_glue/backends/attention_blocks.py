"""Attention of one block of queries to one block of keys, in a form whose parts can be merged.

Softmax over keys that come in parts: each part yields its own output and the logarithm of its sum of exponentials, and
:func:`merge_` weighs what is there with what is new (Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv:1805.02867). Backward takes the final output and logarithm, with which the gradients of the parts simply
add up.

Three ways lead to the same values: the CPU's flash kernel, the CUDA kernel for cumulative lengths, and products written
out, which also drop probabilities and work everywhere.

Used by ``attention_context.py``; what sees what stands in the blocks of ``attention_context_metadata.py``.

Shape suffixes: B rows of the block's queries, N rows of its keys, H query heads, G kv heads, C head dim, n pieces of
the block, L queries and K keys of a piece, Q query heads per kv head, X heads of either kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.backends.attention import AttentionDropout, kept_probabilities
from megatron_glue.backends.attention_context_metadata import Block, Rows, VarlenBlock
from megatron_glue.backends.attention_segments import HAS_FLASH_CPU

# What ``torch.nn.attention.varlen`` calls: its own function has no way to pass a final log-sum-exp to backward.
VARLEN_FORWARD = torch.ops.aten._flash_attention_forward
VARLEN_BACKWARD = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, eq=False)
class BlockInput:
    """One block's queries, keys and values, and what applies to all blocks of a call.

    Attributes:
        q_BHC: Queries.
        k_NGC: Keys; query head h reads kv head h // (H / G).
        v_NGC: Values.
        block: How they are cut into pieces and what sees what.
        scale: Factor on the scores.
        dropout: What to drop, and int64 tokens [n, L] and [n, K] of the pieces' queries and keys; ``None`` for none.
    """

    q_BHC: Tensor
    k_NGC: Tensor
    v_NGC: Tensor
    block: Block | VarlenBlock
    scale: float
    dropout: tuple[AttentionDropout, Tensor, Tensor] | None


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Return rows of a tensor, without a copy where they are one stretch."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put_rows_(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Overwrite rows in place."""
    if isinstance(rows, slice):
        x[rows].copy_(values)
    else:
        x.index_copy_(0, rows, values.to(x.dtype))


def add_rows_(x: Tensor, rows: Rows, values: Tensor) -> None:
    """Add to rows in place; each row is named once."""
    if isinstance(rows, slice):
        x[rows].add_(values)
    else:
        x.index_add_(0, rows, values.to(x.dtype))


def merge_(total: tuple[Tensor, Tensor], rows: Rows, part: tuple[Tensor, Tensor], *, is_new: bool) -> None:
    """Merge the attention of queries to more keys into what they have, in place.

    Args:
        total: Output [V, H, C] and log-sum-exp [V, H] of all queries so far.
        rows: The queries of the part.
        part: Output [B, H, C] and log-sum-exp [B, H] over the new keys alone.
        is_new: Nothing is there yet for these queries.
    """
    (out_VHC, lse_VH), (out_BHC, lse_BH) = total, part
    if not is_new:
        old_BH = take_rows(lse_VH, rows)
        both_BH = torch.logaddexp(old_BH, lse_BH)
        old_BHC = take_rows(out_VHC, rows)
        out_BHC = old_BHC * (old_BH - both_BH).exp().unsqueeze(-1) + out_BHC * (lse_BH - both_BH).exp().unsqueeze(-1)
        lse_BH = both_BH
    put_rows_(out_VHC, rows, out_BHC)
    put_rows_(lse_VH, rows, lse_BH)


def block_forward(given: BlockInput) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys.

    Returns:
        Output [B, H, C] and log-sum-exp [B, H] over these keys.
    """
    if isinstance(given.block, VarlenBlock):
        return _varlen_forward(given, given.block)
    q_nHLC, k_nGKC, v_nGKC = (_split(x, given.block.num_pieces) for x in (given.q_BHC, given.k_NGC, given.v_NGC))
    if _is_flash(given):
        out_nHLC, lse_nHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_nHLC, k_nGKC, v_nGKC, 0.0, given.block.is_causal, attn_mask=_bias(given), scale=given.scale
        )
    else:
        out_nHLC, lse_nHL = _explicit_forward((q_nHLC, k_nGKC, v_nGKC), given)
    return _join(out_nHLC), _join(lse_nHL)


def block_backward(
    grad_BHC: Tensor, out_BHC: Tensor, lse_BH: Tensor, given: BlockInput
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate one block's part of the attention.

    Args:
        grad_BHC: Gradient of the queries' final output.
        out_BHC: Their final output, over all keys.
        lse_BH: Their final log-sum-exp.
        given: The block.

    Returns:
        This block's part of the gradient of its queries [B, H, C], keys and values [N, G, C].
    """
    if isinstance(given.block, VarlenBlock):
        return _varlen_backward((grad_BHC, out_BHC, lse_BH), given, given.block)
    q_nHLC, k_nGKC, v_nGKC, grad_nHLC, out_nHLC, lse_nHL = (
        _split(x, given.block.num_pieces) for x in (given.q_BHC, given.k_NGC, given.v_NGC, grad_BHC, out_BHC, lse_BH)
    )
    if _is_flash(given):
        bias = _bias(given)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_nHLC,
            q_nHLC,
            k_nGKC,
            v_nGKC,
            out_nHLC,
            lse_nHL,
            0.0,
            given.block.is_causal,
            attn_mask=bias,
            scale=given.scale,
        )
    else:
        grads = _explicit_backward((grad_nHLC, out_nHLC, lse_nHL), (q_nHLC, k_nGKC, v_nGKC), given)
    grad_q_nHLC, grad_k_nGKC, grad_v_nGKC = grads
    return _join(grad_q_nHLC), _join(grad_k_nGKC), _join(grad_v_nGKC)


def _is_flash(given: BlockInput) -> bool:
    return HAS_FLASH_CPU and given.dropout is None and given.q_BHC.device.type == "cpu"


def _bias(given: BlockInput) -> Tensor | None:
    """The flash kernel wants the mask in the dtype of the queries."""
    assert isinstance(given.block, Block)
    bias_LK = given.block.bias_LK
    return None if bias_LK is None else bias_LK.to(given.q_BHC.dtype)


def _split(x_BX: Tensor, num_pieces: int) -> Tensor:
    """View rows [B, X, ...] as pieces [n, X, L, ...]."""
    return x_BX.unflatten(0, (num_pieces, -1)).transpose(1, 2)


def _join(x_nXL: Tensor) -> Tensor:
    """Return pieces [n, X, L, ...] as rows [B, X, ...]."""
    return x_nXL.transpose(1, 2).flatten(0, 1)


def _varlen_forward(given: BlockInput, block: VarlenBlock) -> tuple[Tensor, Tensor]:
    out_BHC, lse_HB, *_ = VARLEN_FORWARD(
        given.q_BHC,
        given.k_NGC,
        given.v_NGC,
        block.cu_seqlens_q,
        block.cu_seqlens_k,
        block.max_seqlen_q,
        block.max_seqlen_k,
        0.0,
        _is_plain_causal(block),
        False,
        scale=given.scale,
        **_window_arguments(block),
    )
    return out_BHC, lse_HB.transpose(0, 1)


def _varlen_backward(
    of_output: tuple[Tensor, Tensor, Tensor], given: BlockInput, block: VarlenBlock
) -> tuple[Tensor, Tensor, Tensor]:
    grad_BHC, out_BHC, lse_BH = of_output
    # Without dropout the kernel reads neither.
    no_random_state, unused = grad_BHC.new_zeros(2, dtype=torch.uint64), grad_BHC.new_empty(0)
    grad_q_BHC, grad_k_NGC, grad_v_NGC = VARLEN_BACKWARD(
        grad_BHC.contiguous(),
        given.q_BHC,
        given.k_NGC,
        given.v_NGC,
        out_BHC.contiguous(),
        lse_BH.transpose(0, 1).contiguous(),
        block.cu_seqlens_q,
        block.cu_seqlens_k,
        block.max_seqlen_q,
        block.max_seqlen_k,
        0.0,
        _is_plain_causal(block),
        no_random_state,
        unused,
        scale=given.scale,
        **_window_arguments(block),
    )
    return grad_q_BHC, grad_k_NGC, grad_v_NGC


def _is_plain_causal(block: VarlenBlock) -> bool:
    """As ``varlen_attn`` does it: a window has its own arguments, which say causal too."""
    return block.is_causal and not block.window


def _window_arguments(block: VarlenBlock) -> dict[str, int]:
    """The kernel counts the keys to the left of the query, ours includes the query's own."""
    if not block.is_causal:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": block.window - 1 if block.window else -1, "window_size_right": 0}


def _explicit_forward(qkv: tuple[Tensor, Tensor, Tensor], given: BlockInput) -> tuple[Tensor, Tensor]:
    q_nHLC, k_nGKC, v_nGKC = qkv
    scores_nHLK = _scores(q_nHLC, k_nGKC, given)
    lse_nHL = torch.logsumexp(scores_nHLK, dim=-1)
    factors_nHLK = _dropout_factors(scores_nHLK, given)
    probs_nHLK = (scores_nHLK - lse_nHL.unsqueeze(-1)).exp() * factors_nHLK
    out_nGQLC = _by_kv_head(probs_nHLK.to(v_nGKC.dtype), v_nGKC) @ v_nGKC.unsqueeze(2)
    return out_nGQLC.flatten(1, 2), lse_nHL


def _explicit_backward(
    of_output: tuple[Tensor, Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor], given: BlockInput
) -> tuple[Tensor, Tensor, Tensor]:
    (grad_nHLC, out_nHLC, lse_nHL), (q_nHLC, k_nGKC, v_nGKC) = of_output, qkv
    probs_nHLK = (_scores(q_nHLC, k_nGKC, given) - lse_nHL.unsqueeze(-1)).exp()
    factors_nHLK = _dropout_factors(probs_nHLK, given)
    grad_nGQLC, q_nGQLC = _by_kv_head(grad_nHLC, k_nGKC), _by_kv_head(q_nHLC, k_nGKC)
    used_nGQLK = _by_kv_head((probs_nHLK * factors_nHLK).to(grad_nHLC.dtype), k_nGKC)
    grad_v_nGKC = (used_nGQLK.transpose(-1, -2) @ grad_nGQLC).sum(dim=2)
    grad_probs_nHLK = (grad_nGQLC @ v_nGKC.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * factors_nHLK
    # Sum over ALL keys of probability times its gradient: no block alone knows it, the final output does.
    sum_nHL1 = (grad_nHLC.to(probs_nHLK.dtype) * out_nHLC).sum(dim=-1, keepdim=True)
    grad_scores_nHLK = probs_nHLK * (grad_probs_nHLK - sum_nHL1) * given.scale
    grad_scores_nGQLK = _by_kv_head(grad_scores_nHLK.to(q_nHLC.dtype), k_nGKC)
    grad_q_nHLC = (grad_scores_nGQLK @ k_nGKC.unsqueeze(2)).flatten(1, 2)
    grad_k_nGKC = (grad_scores_nGQLK.transpose(-1, -2) @ q_nGQLC).sum(dim=2)
    return grad_q_nHLC, grad_k_nGKC, grad_v_nGKC


def _by_kv_head(x_nHL: Tensor, k_nGKC: Tensor) -> Tensor:
    """View query heads [n, H, ...] by the kv head that they read, [n, G, Q, ...]."""
    num_groups = k_nGKC.shape[1]
    return x_nHL.unflatten(1, (num_groups, x_nHL.shape[1] // num_groups))


def _scores(q_nHLC: Tensor, k_nGKC: Tensor, given: BlockInput) -> Tensor:
    """Return the scores [n, H, L, K] in at least fp32, -inf where a query does not see a key."""
    assert isinstance(given.block, Block)
    scores_nHLK = (_by_kv_head(q_nHLC, k_nGKC) @ k_nGKC.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    scores_nHLK = scores_nHLK.to(torch.promote_types(scores_nHLK.dtype, torch.float32)) * given.scale
    if given.block.bias_LK is not None:
        scores_nHLK = scores_nHLK + given.block.bias_LK
    if given.block.is_causal:
        hidden_LK = torch.ones(scores_nHLK.shape[-2:], dtype=torch.bool, device=scores_nHLK.device).triu_(1)
        scores_nHLK = scores_nHLK.masked_fill(hidden_LK, float("-inf"))
    return scores_nHLK


def _dropout_factors(probs_nHLK: Tensor, given: BlockInput) -> Tensor | float:
    """Return what probabilities are multiplied by: 0 where they are dropped, else so that their mean stays."""
    if given.dropout is None:
        return 1.0
    dropout, query_tokens_nL, key_tokens_nK = given.dropout
    keep_nHLK = kept_probabilities(dropout, probs_nHLK.shape[1], query_tokens_nL, key_tokens_nK)
    return keep_nHLK.to(probs_nHLK.dtype) * (1.0 / (1.0 - dropout.probability))
