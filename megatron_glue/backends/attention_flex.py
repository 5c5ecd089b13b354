"""Packed attention through FlexAttention and a block mask. On a CPU it has no backward: forward only.

Shape suffixes: T tokens, H query heads, G kv heads, C head dim, V valid tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_glue.backends.attention import AttentionDropout, attend_to_nothing, cut_padding, restore_padding
from megatron_glue.backends.attention_metadata import FlexMetadata


@functools.cache
def _kernel(device_type: str) -> Any:
    """FlexAttention, compiled where a kernel is generated for it; uncompiled it computes all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def flex_attention(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    metadata: FlexMetadata,
    *,
    window: int,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Attend under the block mask. See :class:`~megatron_glue.backends.attention.AttentionKernel`."""
    assert dropout is None, "the registry does not choose this kernel for a model with attention dropout"
    num_valid = metadata.num_valid_tokens
    q_VHC, k_VGC, v_VGC = (cut_padding(x, num_valid) for x in (q_THC, k_TGC, v_TGC))
    if num_valid == 0:
        return restore_padding(attend_to_nothing(q_VHC, k_VGC, v_VGC), metadata.num_tokens)
    out_1HVC = _kernel(q_THC.device.type)(
        *(x.transpose(0, 1)[None] for x in (q_VHC, k_VGC, v_VGC)),
        block_mask=metadata.block_mask,
        scale=scale,
        enable_gqa=q_THC.shape[1] != k_TGC.shape[1],
    )
    return restore_padding(out_1HVC[0].transpose(0, 1), metadata.num_tokens)
