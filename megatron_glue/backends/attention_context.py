"""Packed attention over sequences that are split over context-parallel ranks.

Every rank has the queries of its own tokens and sees the keys and values of all ranks, step by step, through an
exchange of ``parallel/context.py``. It merges what each step adds, and keeps for backward only what is its own:
queries, keys, values, output and log-sum-exp. Backward runs the same exchange again.

A micro-batch that is not split, such as the prompt of a sample, goes to the kernel of one rank.

Shape suffixes: T tokens of this rank, V valid tokens of this rank, R rows that each rank hands to the others, H query
heads, G kv heads, C head dim, X heads of either kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.attention import (
    AttentionDropout,
    AttentionKernel,
    attend_to_nothing,
    cut_padding,
    restore_padding,
)
from megatron_glue.backends.attention_blocks import (
    BlockInput,
    add_rows_,
    block_backward,
    block_forward,
    merge_,
    take_rows,
)
from megatron_glue.backends.attention_context_metadata import Block, ContextMetadata, VarlenBlock
from megatron_glue.backends.registry import Backends
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.parallel.context import ContextExchange

_LAYOUTS = ("varlen", "segments")


def add_context_parallel(backends: Backends, exchange: ContextExchange | None, *, has_window: bool = False) -> Backends:
    """Let the attention kernel of a run work on split sequences too.

    Args:
        backends: The kernels of one rank.
        exchange: Among the ranks that split each sequence; ``None`` if there are none.
        has_window: Whether a layer has a sliding window.

    Returns:
        The kernels; the same if no sequence is split.

    Raises:
        ConfigError: If the attention kernel has no form for split sequences.
    """
    if exchange is None:
        return backends
    layout = backends.attention_layout
    if layout not in _LAYOUTS:
        raise ConfigError(
            flag_of("attention_backend"),
            layout,
            "has no form for sequences that are split over context-parallel ranks",
            f"use auto or one of {list(_LAYOUTS)}",
        )
    how = "ring" if exchange.is_ring else "gather"
    reason = "--cp-comm-type"
    if exchange.is_ring and has_window and layout == "varlen":
        reason += "; windows take products written out in a ring, allgather has a kernel for them"
    return replace(
        backends,
        attention=ContextAttention(backends.attention, exchange),
        context_layout=how,
        choices=(*backends.choices, ("context", how, reason)),
    )


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """The attention kernel of a rank that holds a part of each sequence.

    Attributes:
        plain: Kernel for micro-batches that are not split.
        exchange: Among the ranks that split the others.
    """

    plain: AttentionKernel
    exchange: ContextExchange

    def __call__(
        self,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        metadata: Any,
        *,
        window: int,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend. See :class:`~megatron_glue.backends.attention.AttentionKernel`."""
        if not isinstance(metadata, ContextMetadata):
            return self.plain(q_THC, k_TGC, v_TGC, metadata, window=window, scale=scale, dropout=dropout)
        q_VHC = cut_padding(q_THC, metadata.num_valid_tokens)
        k_RGC, v_RGC = (cut_padding(x_TGC, metadata.num_exchanged_rows) for x_TGC in (k_TGC, v_TGC))
        if metadata.num_exchanged_rows == 0:
            # No rank has a token, and all of them know: nobody waits for an exchange.
            out_VHC = attend_to_nothing(q_VHC, k_RGC, v_RGC)
        else:
            call = _Call(metadata, self.exchange, scale, dropout)
            out_VHC = _AttendThroughExchange.apply(q_VHC, k_RGC, v_RGC, call)
        return restore_padding(out_VHC, metadata.num_tokens)


@dataclass(frozen=True, eq=False)
class _Call:
    """What one call of the kernel has beside its tensors."""

    metadata: ContextMetadata
    exchange: ContextExchange
    scale: float
    dropout: AttentionDropout | None

    def block_input(self, q_VHC: Tensor, kv_N2GC: Tensor, step: int, block: Block | VarlenBlock) -> BlockInput:
        """Cut one block's rows out of this rank's queries and of the keys and values at hand."""
        dropout = None
        if self.dropout is not None:
            assert isinstance(block, Block), "the registry does not choose varlen for a model with attention dropout"
            query_tokens_B = take_rows(self.metadata.query_tokens_V, block.query_rows)
            key_tokens_N = take_rows(self.metadata.key_tokens[step], block.key_rows)
            pieces = (block.num_pieces, -1)
            dropout = (self.dropout, query_tokens_B.view(pieces), key_tokens_N.view(pieces))
        kv_N2GC = take_rows(kv_N2GC, block.key_rows)
        q_BHC = take_rows(q_VHC, block.query_rows)
        return BlockInput(q_BHC, kv_N2GC[:, 0], kv_N2GC[:, 1], block, self.scale, dropout)


class _AttendThroughExchange(torch.autograd.Function):
    """All steps as one node of the autograd graph; sums are kept in at least fp32."""

    @staticmethod
    def forward(ctx: Any, q_VHC: Tensor, k_RGC: Tensor, v_RGC: Tensor, call: _Call) -> Tensor:
        sum_dtype = torch.promote_types(q_VHC.dtype, torch.float32)
        is_merged = any(not block.is_new for blocks in call.metadata.steps for block in blocks)
        # Every query's first block overwrites what is here.
        out_VHC = torch.empty(q_VHC.shape, dtype=sum_dtype if is_merged else q_VHC.dtype, device=q_VHC.device)
        lse_VH = torch.empty(q_VHC.shape[:2], dtype=sum_dtype, device=q_VHC.device)

        def visit(step: int, kv_N2GC: Tensor) -> None:
            for block in call.metadata.steps[step]:
                part = block_forward(call.block_input(q_VHC, kv_N2GC, step, block))
                merge_((out_VHC, lse_VH), block.query_rows, part, is_new=block.is_new)

        call.exchange.visit_all(torch.stack((k_RGC, v_RGC), dim=1), visit)
        out_VHC = out_VHC.to(q_VHC.dtype)
        ctx.save_for_backward(q_VHC, k_RGC, v_RGC, out_VHC, lse_VH)
        ctx.call = call
        return out_VHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q_VHC, k_RGC, v_RGC, out_VHC, lse_VH = ctx.saved_tensors
        call: _Call = ctx.call
        (grad_VHC,) = grad_outputs
        grad_q_VHC = torch.zeros_like(q_VHC, dtype=lse_VH.dtype, memory_format=torch.contiguous_format)

        def gradient(step: int, kv_N2GC: Tensor) -> Tensor:
            grad_kv_N2GC = torch.zeros_like(kv_N2GC, dtype=lse_VH.dtype)
            for block in call.metadata.steps[step]:
                given = call.block_input(q_VHC, kv_N2GC, step, block)
                grad_BHC, out_BHC, lse_BH = (take_rows(x, block.query_rows) for x in (grad_VHC, out_VHC, lse_VH))
                grad_q_BHC, grad_k_NGC, grad_v_NGC = block_backward(grad_BHC, out_BHC, lse_BH, given)
                add_rows_(grad_q_VHC, block.query_rows, grad_q_BHC)
                add_rows_(grad_kv_N2GC, block.key_rows, torch.stack((grad_k_NGC, grad_v_NGC), dim=1))
            return grad_kv_N2GC

        grad_kv_R2GC = call.exchange.sum_gradients(torch.stack((k_RGC, v_RGC), dim=1), gradient)
        return grad_q_VHC.to(q_VHC.dtype), grad_kv_R2GC[:, 0], grad_kv_R2GC[:, 1], None
