"""Stands in for ``transformer_engine.pytorch``."""

import itertools

import torch
from torch.nn import functional as F

from . import optimizers

__all__ = ["DotProductAttention", "optimizers"]


class DotProductAttention(torch.nn.Module):
    """Self-attention in the packed layout, document by document."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        assert (qkv_format, attn_mask_type, attention_dropout) == ("thd", "padding_causal", 0.0)
        self.num_heads, self.head_dim = num_attention_heads, kv_channels
        self.num_groups = num_gqa_groups or num_attention_heads
        self.window_size, self.scale = window_size, softmax_scale

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        num_splits=1,
    ):
        assert query_layer.shape[1:] == (self.num_heads, self.head_dim)
        assert key_layer.shape == value_layer.shape
        assert key_layer.shape[1:] == (self.num_groups, self.head_dim)
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        bounds = cu_seqlens_q.tolist()
        assert bounds == cu_seqlens_kv.tolist()
        assert bounds[-1] == query_layer.shape[0], "rows behind the last boundary are not written"
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        assert max_seqlen_q == max_seqlen_kv == max(lengths), "the library would read it from the device"
        left, right = self.window_size
        assert right == 0
        outs = []
        for q, k, v in zip(*(layer.split(lengths) for layer in (query_layer, key_layer, value_layer))):
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
            allowed = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs).flatten(1)
