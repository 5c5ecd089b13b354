"""Packed attention through ``torch.nn.attention.varlen``: one CUDA kernel over cumulative lengths.

Rows behind the last boundary would be uninitialised memory, in the output and in the gradients; padding is therefore
cut off before the kernel.

Shape suffixes: T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from megatron_glue.backends.attention import AttentionDropout, attend_to_nothing, cut_padding, restore_padding
from megatron_glue.backends.attention_metadata import VarlenMetadata


@functools.cache
def _kernel() -> tuple[Any, dict[str, Any]]:
    """The function and the arguments that only some torch versions have or need."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer versions refuse fewer kv heads than query heads without this switch; older ones have no switch.
    has_switch = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if has_switch else {}


def varlen_attention(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    metadata: VarlenMetadata,
    *,
    window: int,
    scale: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Attend inside each segment. See :class:`~megatron_glue.backends.attention.AttentionKernel`."""
    assert dropout is None, "the registry does not choose this kernel for a model with attention dropout"
    q_VHC, k_VGC, v_VGC = (cut_padding(x, metadata.num_valid_tokens) for x in (q_THC, k_TGC, v_TGC))
    if metadata.num_valid_tokens == 0:
        return restore_padding(attend_to_nothing(q_VHC, k_VGC, v_VGC), metadata.num_tokens)
    varlen_attn, extra = _kernel()
    out_VHC = varlen_attn(
        q_VHC,
        k_VGC,
        v_VGC,
        metadata.cu_seqlens,
        metadata.cu_seqlens,
        metadata.max_seqlen,
        metadata.max_seqlen,
        scale=scale,
        # The kernel counts the tokens to the left of the query, ours includes the query.
        window_size=(window - 1 if window else -1, 0),
        **extra,
    )
    return restore_padding(out_VHC, metadata.num_tokens)
