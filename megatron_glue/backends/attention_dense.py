"""Packed attention with one boolean mask over the whole pack: the oracle of all other layouts.

Its cost grows with the square of the pack, whatever its documents; it is there to compare with.

Shape suffixes: T tokens, V valid tokens, H query heads, G kv heads, C head dim, X heads of either kind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.backends.attention import (
    AttentionDropout,
    attend_to_nothing,
    cut_padding,
    explicit_attention,
    restore_padding,
)
from megatron_glue.backends.attention_metadata import DenseMetadata


def dense_attention(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    metadata: DenseMetadata,
    *,
    window: int,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Attend under the mask. See :class:`~megatron_glue.backends.attention.AttentionKernel`."""
    num_valid = metadata.num_valid_tokens
    qkv = tuple(cut_padding(x_TXC, num_valid) for x_TXC in (q_THC, k_TGC, v_TGC))
    if num_valid == 0:
        return restore_padding(attend_to_nothing(*qkv), metadata.num_tokens)
    q_1HVC, k_1GVC, v_1GVC = (x_VXC.transpose(0, 1)[None] for x_VXC in qkv)
    if dropout is None:
        out_1HVC = F.scaled_dot_product_attention(
            q_1HVC,
            k_1GVC,
            v_1GVC,
            attn_mask=metadata.allowed_VV,
            scale=scale,
            enable_gqa=q_1HVC.shape[1] != k_1GVC.shape[1],
        )
    else:
        tokens_1V = torch.arange(num_valid, device=q_THC.device)[None]
        out_1HVC = explicit_attention((q_1HVC, k_1GVC, v_1GVC), metadata.allowed_VV, tokens_1V, scale, dropout)
    return restore_padding(out_1HVC[0].transpose(0, 1), metadata.num_tokens)
