"""DeepEP's exchange of tokens between expert-parallel ranks, with autograd around it.

DeepEP sends each token once to each rank that holds one of its experts, over NVLink inside a node and RDMA between
nodes, and adds results up on the way back (DeepSeek-AI, "DeepEP", 2025). The first dispatch of a choice makes the host
wait for the number of tokens that arrive; a dispatch with the handle of an earlier one does not.

This file is the only one that imports the library. It groups nothing and computes nothing; ``moe/dispatcher_deepep.py``
does the rest.

Shape suffixes: T tokens, D model, K top-k, B brought tokens, E experts.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def why_not_deepep(device: torch.device, dtype: torch.dtype, num_replicas: int) -> str:
    """Say why DeepEP cannot serve here, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
        num_replicas: Ranks that hold a part of the same experts.
    """
    if device.type != "cuda":
        return f"its kernels run on CUDA, not on {device.type}"
    if dtype != torch.bfloat16:
        return f"it exchanges bf16, not {dtype}"
    if num_replicas > 1:
        return "it sends a token to one rank for each expert, and experts are split over ranks"
    try:
        importlib.import_module("deep_ep")
    except ImportError as error:
        return f"the library deep_ep cannot be imported: {error}"
    return ""


class DeepEPBuffers:
    """The library's communication buffer, made on first use and shared by all layers of a model."""

    def __init__(self) -> None:
        self._buffers: dict[ProcessGroup, Any] = {}

    def of(self, group: ProcessGroup, row_bytes: int) -> Any:
        """Return the buffer of a group; every rank of it must call this.

        Args:
            group: The ranks.
            row_bytes: Bytes of one row, the same in every call.

        Returns:
            A ``deep_ep.Buffer``.
        """
        if group not in self._buffers:
            library: Any = importlib.import_module("deep_ep")
            num_ranks = group.size()
            configs = (library.Buffer.get_dispatch_config(num_ranks), library.Buffer.get_combine_config(num_ranks))
            nvl_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs)
            rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs)
            self._buffers[group] = library.Buffer(group, nvl_bytes, rdma_bytes)
        return self._buffers[group]


@dataclass(frozen=True, eq=False)
class DeepEPLayout:
    """What is needed to repeat a dispatch and to bring its results back.

    Attributes:
        handle: The library's.
        weights_BK: fp32. Weights that came with the tokens.
    """

    handle: Any
    weights_BK: Tensor


@dataclass(frozen=True, eq=False)
class DispatchedTokens:
    """Tokens under way.

    Attributes:
        x_BD: Their rows.
        weights_BK: fp32. Weights of their choices; 0 for other ranks' experts.
        local_ids_BK: int64. Their choices as ids of this rank's experts, -1 for other ranks'; ``None`` for a dispatch
            that was repeated.
        layout: To repeat it.
        event: ``current_stream_wait()`` makes the present stream wait for the tokens.
    """

    x_BD: Tensor
    weights_BK: Tensor
    local_ids_BK: Tensor | None
    layout: DeepEPLayout
    event: Any


def dispatch(
    buffer: Any, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int
) -> DispatchedTokens:
    """Start to bring tokens to the ranks of their experts.

    Args:
        buffer: A ``deep_ep.Buffer``.
        x_TD: bf16 tokens.
        expert_ids_TK: int64 chosen experts.
        weights_TK: fp32 weights of these.
        num_experts: E.

    Returns:
        The tokens. Differentiable with respect to rows and weights.
    """
    ids_TK = expert_ids_TK.to(getattr(importlib.import_module("deep_ep"), "topk_idx_t", torch.int64))
    to_rank, to_rdma_rank, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids_TK, num_experts)
    x_BD, ids_BK, weights_BK, _, handle, event = buffer.dispatch(
        x_TD.detach(),
        topk_idx=ids_TK,
        topk_weights=weights_TK.detach(),
        num_tokens_per_rank=to_rank,
        num_tokens_per_rdma_rank=to_rdma_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=to_expert,
        async_finish=True,
    )
    layout = DeepEPLayout(handle, weights_BK)
    x_BD, weights_BK = _Dispatched.apply(x_TD, weights_TK, x_BD, buffer, layout)
    return DispatchedTokens(x_BD, weights_BK, ids_BK.to(torch.int64), layout, event)


def dispatch_again(buffer: Any, x_TD: Tensor, weights_TK: Tensor, layout: DeepEPLayout) -> DispatchedTokens:
    """Start the same exchange as before; the host waits for nothing, and weights keep their values.

    Args:
        buffer: A ``deep_ep.Buffer``.
        x_TD: bf16 tokens.
        weights_TK: fp32 weights, which get the gradient.
        layout: Of the first dispatch.

    Returns:
        The tokens. Differentiable with respect to rows and weights.
    """
    x_BD, _, _, _, _, event = buffer.dispatch(x_TD.detach(), handle=layout.handle, async_finish=True)
    x_BD, weights_BK = _Dispatched.apply(x_TD, weights_TK, x_BD, buffer, layout)
    return DispatchedTokens(x_BD, weights_BK, None, layout, event)


def combine(buffer: Any, partial_BD: Tensor, layout: DeepEPLayout) -> Tensor:
    """Add up what ranks computed for each token.

    Args:
        buffer: A ``deep_ep.Buffer``.
        partial_BD: bf16. This rank's part of each brought token's sum.
        layout: Of the dispatch.

    Returns:
        bf16 [T, D] of this rank's own tokens. Differentiable.
    """
    return _Combine.apply(partial_BD, buffer, layout)


class _Dispatched(torch.autograd.Function):
    """Ties tokens that are under way to those they were sent from; backward brings both gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, x_BD: Tensor, buffer: Any, layout: DeepEPLayout
    ) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.layout = buffer, layout
        return x_BD.view_as(x_BD), layout.weights_BK.view_as(layout.weights_BK)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x_BD, grad_weights_BK = grad_outputs
        grad_x_TD, grad_weights_TK, _ = ctx.buffer.combine(
            grad_x_BD.contiguous(), ctx.layout.handle, topk_weights=grad_weights_BK.float().contiguous()
        )
        return grad_x_TD, grad_weights_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BD: Tensor, buffer: Any, layout: DeepEPLayout) -> Tensor:
        ctx.buffer, ctx.layout = buffer, layout
        return buffer.combine(partial_BD.contiguous(), layout.handle)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(grad_outputs[0].contiguous(), handle=ctx.layout.handle)[0], None, None
