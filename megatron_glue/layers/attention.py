"""Self-attention over a packed micro-batch.

One product for q, k and v; optional norm per head; RoPE; the kernel that the registry chose, with metadata from the
cache; one product back. What a token may see comes from the metadata alone: positions restart with each document, and
that isolates nothing.

Weights keep their parts on own dims, so a split of the kv heads cuts all parts alike: ``qkv_weight`` is
[G, H / G + 2, C, D], per kv head its query heads, its key, its value.

Shape suffixes: T tokens, D model, H query heads, G kv heads, C head dim, P = H / G + 2 parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.backends.registry import Backends
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.dropout import site_seed
from megatron_glue.layers.initialisation import init_normal_, residual_std
from megatron_glue.layers.norm import build_norm
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.layers.rotary import RotaryConfig, rotary_rows
from megatron_glue.ops.rope import apply_rope, split_and_rotate
from megatron_glue.parallel.precision import local
from megatron_glue.types import ForwardContext, PackedSequence


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and settings of one attention layer.

    Attributes:
        hidden_size: D.
        num_heads: H.
        num_kv_heads: G, a divisor of H.
        head_dim: C.
        has_bias: Biases on both products.
        dropout: Probability of dropping an attention weight.
        window: Tokens that a query sees, itself included; 0 for all.
        layer_index: Global index of the layer.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool
    dropout: float
    window: int
    layer_index: int

    @classmethod
    def of_model(cls, model: ModelConfig, layer_index: int) -> AttentionShape:
        """Take the sizes from the model's configuration."""
        return cls(
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            has_bias=model.add_bias_linear,
            dropout=model.attention_dropout,
            window=model.window_of_layer(layer_index),
            layer_index=layer_index,
        )


class PackedAttention(nn.Module):
    """Causal self-attention inside each segment.

    Args:
        shape: Sizes and settings.
        backends: Kernels, resolved for the model's head width and attention dropout.
        metadata_cache: The model's; of the layout that ``backends.attention`` takes. Angles are shared through it too.
        rotary: RoPE; ``None`` for none.
        qk_norms: Norms over the head dim of queries and of keys; ``None`` for none.

    Raises:
        ConfigError: If heads do not divide.
    """

    def __init__(
        self,
        shape: AttentionShape,
        backends: Backends,
        metadata_cache: PackedMetadataCache,
        rotary: RotaryConfig | None,
        qk_norms: tuple[nn.Module, nn.Module] | None,
    ) -> None:
        super().__init__()
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                flag_of("num_query_groups"),
                shape.num_kv_heads,
                f"does not divide the {shape.num_heads} query heads",
                "choose a divisor of --num-attention-heads",
            )
        assert metadata_cache.layout == backends.attention_layout, "kernel and metadata are of one layout"
        self.shape = shape
        self._kernel = backends.attention
        self._metadata_cache = metadata_cache
        self._rotary = rotary
        num_parts = shape.num_heads // shape.num_kv_heads + 2
        self.qkv_weight = nn.Parameter(torch.empty(shape.num_kv_heads, num_parts, shape.head_dim, shape.hidden_size))
        self.out_weight = nn.Parameter(torch.empty(shape.hidden_size, shape.num_heads * shape.head_dim))
        self.qkv_bias = self.out_bias = None
        if shape.has_bias:
            self.qkv_bias = nn.Parameter(torch.zeros(shape.num_kv_heads, num_parts, shape.head_dim))
            self.out_bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.q_norm, self.k_norm = qk_norms or (None, None)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Attend.

        Args:
            x_TD: Normalised residual stream.
            context: The micro-batch.

        Returns:
            [T, D].
        """
        shape, sequence = self.shape, context.sequence
        metadata = self._metadata_cache.for_sequence(sequence, shape.window)
        out_THC = self._kernel(
            *self._project(x_TD, context),
            metadata,
            window=shape.window,
            scale=shape.head_dim**-0.5,
            dropout=self._dropout(context),
        )
        out_bias_D = None if self.out_bias is None else local(self.out_bias, x_TD.dtype)
        return F.linear(out_THC.flatten(1), local(self.out_weight, x_TD.dtype), out_bias_D)

    def _project(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, C], k and v [T, G, C], normalised and rotated."""
        weight_GPCD = local(self.qkv_weight, x_TD.dtype)
        bias = None if self.qkv_bias is None else local(self.qkv_bias, x_TD.dtype).flatten()
        qkv_TGPC = F.linear(x_TD, weight_GPCD.flatten(0, 2), bias).unflatten(1, weight_GPCD.shape[:3])
        angles = self._angles(context.sequence)
        if self.q_norm is None or self.k_norm is None:
            return split_and_rotate(qkv_TGPC, *angles)
        q_THC, k_TGC, v_TGC = split_and_rotate(qkv_TGPC)
        q_THC, k_TGC = self.q_norm(q_THC), self.k_norm(k_TGC)
        if angles:
            q_THC, k_TGC = apply_rope(q_THC, *angles), apply_rope(k_TGC, *angles)
        return q_THC, k_TGC, v_TGC

    def _angles(self, sequence: PackedSequence) -> tuple[Tensor, Tensor] | tuple[()]:
        """Return cosines and sines [T, R], the same for all layers of the micro-batch; nothing without RoPE."""
        rotary = self._rotary
        if rotary is None:
            return ()
        return self._metadata_cache.share(sequence, rotary, lambda: rotary_rows(rotary, sequence))

    def _dropout(self, context: ForwardContext) -> AttentionDropout | None:
        if self.shape.dropout == 0.0 or not self.training:
            return None
        return AttentionDropout(self.shape.dropout, site_seed(context, self.shape.layer_index, "attention.probability"))


def build_attention(
    model: ModelConfig, layer_index: int, backends: Backends, metadata_cache: PackedMetadataCache, seed: int
) -> PackedAttention:
    """Build and initialise the attention of one block.

    Args:
        model: Shape of the decoder.
        layer_index: Global index of the block.
        backends: Kernels.
        metadata_cache: The model's.
        seed: The run's seed.

    Returns:
        The layer, on the CPU in fp32.

    Raises:
        ConfigError: See :class:`PackedAttention` and :class:`RotaryConfig`.
    """
    qk_norms = None
    if model.qk_layernorm:
        qk_norms = (build_norm(model, backends, model.head_dim), build_norm(model, backends, model.head_dim))
    shape = AttentionShape.of_model(model, layer_index)
    attention = PackedAttention(shape, backends, metadata_cache, RotaryConfig.of_model(model), qk_norms)
    std, prefix = model.init_method_std, f"blocks.{layer_index}.attention"
    init_normal_(attention.qkv_weight, std, seed, f"{prefix}.qkv_weight")
    init_normal_(attention.out_weight, residual_std(std, model.num_layers), seed, f"{prefix}.out_weight")
    return attention
