"""Packed attention as few calls of scaled dot-product attention, each over segments of one padded length.

No mask is needed: a causal query never sees the padding behind its segment. On a CPU this is much faster than a
mask over the pack, whose cost grows with the square of the pack instead of the squares of its documents, and faster
than one call per document, whose slices autograd adds up with zeros over the whole pack each.

``segments_attention`` is the kernel. On a CPU it calls the flash kernel and its backward directly; elsewhere, and with
dropout, the same pieces go through autograd.

Shape suffixes: T tokens, V valid tokens, R rows of the pieces, H query heads, G kv heads, C head dim, n segments of
one piece, L their padded length, X heads of either kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.attention import (
    AttentionDropout,
    attend_to_nothing,
    cut_padding,
    explicit_attention,
    restore_padding,
)
from megatron_glue.backends.attention_long import LongSegmentAttention
from megatron_glue.backends.attention_metadata import SegmentsMetadata

HAS_FLASH_CPU = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu") and hasattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"
)


@dataclass(frozen=True, eq=False)
class SegmentsAttention:
    """Attention inside each segment. See :class:`~megatron_glue.backends.attention.AttentionKernel`.

    Attributes:
        long_segments: What takes long segments where no window cuts them; ``None``: the kernel that takes all others.
    """

    long_segments: LongSegmentAttention | None

    def __call__(
        self,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        metadata: SegmentsMetadata,
        *,
        window: int,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend."""
        qkv = tuple(cut_padding(x_TXC, metadata.num_valid_tokens) for x_TXC in (q_THC, k_TGC, v_TGC))
        if metadata.num_valid_tokens == 0:
            out_VHC = attend_to_nothing(*qkv)
        elif dropout is None and HAS_FLASH_CPU and q_THC.device.type == "cpu":
            long_segments = self.long_segments if q_THC.dtype == torch.float32 else None
            out_VHC = _FlashOnCpu.apply(*qkv, metadata, window, scale, long_segments)
        else:
            out_VHC = _attend_through_autograd(qkv, metadata, window, scale, dropout)
        return restore_padding(out_VHC, metadata.num_tokens)


segments_attention = SegmentsAttention(None)
"""All segments through one kernel."""


def _as_pieces(rows_RXC: Tensor, metadata: SegmentsMetadata) -> list[Tensor]:
    """View rows as pieces, [n, X, L, C] each."""
    parts = rows_RXC.split([num_segments * length for num_segments, length in metadata.pieces])
    return [part.unflatten(0, piece).transpose(1, 2) for part, piece in zip(parts, metadata.pieces, strict=True)]


def _split_pieces(x_VXC: Tensor, metadata: SegmentsMetadata) -> list[Tensor]:
    """Return the pieces of a tensor of tokens, without a copy where no segment is padded."""
    rows_RXC = x_VXC if metadata.gather_R is None else x_VXC.index_select(0, metadata.gather_R)
    return _as_pieces(rows_RXC, metadata)


def _split_gradient(grad_VXC: Tensor, metadata: SegmentsMetadata) -> list[Tensor]:
    """Return the pieces of an output gradient, zero on padded rows.

    They then add nothing to the gradients of the keys and values they repeat.
    """
    if metadata.gather_R is None or metadata.row_of_token_V is None:
        return _as_pieces(grad_VXC, metadata)
    grad_RXC = grad_VXC.new_zeros(metadata.gather_R.shape[0], *grad_VXC.shape[1:])
    return _as_pieces(grad_RXC.index_copy_(0, metadata.row_of_token_V, grad_VXC), metadata)


def _join_pieces(pieces: list[Tensor], metadata: SegmentsMetadata) -> Tensor:
    """Return pieces [n, X, L, C] as a tensor of tokens [V, X, C], padded rows left out."""
    parts = [piece.transpose(1, 2).flatten(0, 1) for piece in pieces]
    rows_RXC = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows_RXC if metadata.row_of_token_V is None else rows_RXC.index_select(0, metadata.row_of_token_V)


def _bias_of_length(metadata: SegmentsMetadata, window: int, length: int, dtype: torch.dtype) -> Tensor | None:
    if metadata.window_bias_LL is None or length <= window:
        return None
    return metadata.window_bias_LL[:length, :length].to(dtype)


def _attend_through_autograd(
    qkv: tuple[Tensor, ...], metadata: SegmentsMetadata, window: int, scale: float, dropout: AttentionDropout | None
) -> Tensor:
    tokens_V1 = torch.arange(metadata.num_valid_tokens, device=qkv[0].device)[:, None, None]
    outs = []
    for q_nHLC, k_nGLC, v_nGLC, tokens_n1L1 in zip(
        *(_split_pieces(x, metadata) for x in (*qkv, tokens_V1)), strict=True
    ):
        length = q_nHLC.shape[2]
        if dropout is None:
            bias_LL = _bias_of_length(metadata, window, length, q_nHLC.dtype)
            out_nHLC = F.scaled_dot_product_attention(
                q_nHLC,
                k_nGLC,
                v_nGLC,
                attn_mask=bias_LL,
                is_causal=bias_LL is None,
                scale=scale,
                enable_gqa=q_nHLC.shape[1] != k_nGLC.shape[1],
            )
        else:
            rows_L = torch.arange(length, device=q_nHLC.device)
            distance_LL = rows_L[:, None] - rows_L
            allowed_LL = (distance_LL >= 0) & (distance_LL < (window or length))
            tokens_nL = tokens_n1L1[:, 0, :, 0]
            out_nHLC = explicit_attention((q_nHLC, k_nGLC, v_nGLC), allowed_LL, tokens_nL, scale, dropout)
        outs.append(out_nHLC)
    return _join_pieces(outs, metadata)


class _FlashOnCpu(torch.autograd.Function):
    """All pieces as one node of the autograd graph: each gradient is written once, and kv heads are not repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        q_VHC: Tensor,
        k_VGC: Tensor,
        v_VGC: Tensor,
        metadata: SegmentsMetadata,
        window: int,
        scale: float,
        long_segments: LongSegmentAttention | None,
    ) -> Tensor:
        outs, lses = [], []
        for q, k, v in zip(*(_split_pieces(x, metadata) for x in (q_VHC, k_VGC, v_VGC)), strict=True):
            bias = _bias_of_length(metadata, window, q.shape[2], q.dtype)
            if long_segments is not None and bias is None and long_segments.takes(q):
                q_LHC, k_LGC, v_LGC = (x[0].transpose(0, 1) for x in (q, k, v))
                out_LHC, lse = long_segments.forward(q_LHC, k_LGC, v_LGC, scale)
                outs.append(out_LHC.transpose(0, 1)[None])
                lses.append(lse)
                continue
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale
            )
            outs.append(out)
            lses.append(lse)
        out_VHC = _join_pieces(outs, metadata)
        ctx.save_for_backward(q_VHC, k_VGC, v_VGC, out_VHC, *lses)
        ctx.layout, ctx.window, ctx.scale, ctx.long_segments = metadata, window, scale, long_segments
        return out_VHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        metadata: SegmentsMetadata = ctx.layout
        q_VHC, k_VGC, v_VGC, out_VHC, *lses = ctx.saved_tensors
        saved = (q_VHC, k_VGC, v_VGC, out_VHC)
        grads = []
        split = (_split_gradient(grad_outputs[0], metadata), *(_split_pieces(x, metadata) for x in saved))
        for grad, q, k, v, out, lse in zip(*split, lses, strict=True):
            bias = _bias_of_length(metadata, ctx.window, q.shape[2], q.dtype)
            if ctx.long_segments is not None and bias is None and ctx.long_segments.takes(q):
                rows = [x[0].transpose(0, 1) for x in (grad, q, k, v, out)]
                of_rows = ctx.long_segments.backward(rows[0], (rows[1], rows[2], rows[3]), rows[4], lse, ctx.scale)
                grads.append(tuple(x.transpose(0, 1)[None] for x in of_rows))
                continue
            grads.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, q, k, v, out, lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
                )
            )
        joined = [_join_pieces(list(pieces), metadata) for pieces in zip(*grads, strict=True)]
        return *joined, None, None, None, None
