"""Self-attention over a packed micro-batch.

One product for q, k and v; optional norm per head; RoPE; the kernel that the registry chose, with metadata from the
cache; one product back. What a token may see comes from the metadata alone: positions restart with each document, and
that isolates nothing.

Weights keep their parts on own dims, so a split of the kv heads cuts all parts alike: ``qkv_weight`` is
[G, H / G + 2, C, D], per kv head its query heads, its key, its value.

Tensor-parallel ranks each hold some of the heads. With fewer kv heads than ranks, several hold the same one, whole:
each computes its key and value and its own share of its query heads.

Shape suffixes: T tokens, D model, H query heads, G kv heads, C head dim, P = H / G + 2 parts. In the tensors of a rank
H and G are the heads it computes, and P is its own query heads per kv head + 2; x has the rows of the residual stream
that the rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_glue.backends.attention import AttentionDropout
from megatron_glue.backends.registry import Backends
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.dropout import site_seed
from megatron_glue.layers.initialisation import residual_std
from megatron_glue.layers.norm import build_head_norm
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.layers.rotary import RotaryConfig, rotary_rows
from megatron_glue.ops.rope import apply_rope, split_and_rotate
from megatron_glue.parallel.precision import local
from megatron_glue.parallel.shard_spec import tensor_split
from megatron_glue.parallel.tensor import TensorParallel, column_linear, row_linear
from megatron_glue.types import ForwardContext, PackedSequence

ANGLES = "rope_rows"


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and settings of one attention layer, over all ranks.

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
        tensor_parallel: Ranks that hold the other heads; ``None`` for none.

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
        tensor_parallel: TensorParallel | None = None,
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
        self._tensor_parallel = tensor_parallel
        num_ranks, num_copies = (tensor_parallel.size, tensor_parallel.kv_copies) if tensor_parallel else (1, 1)
        _check_split(shape, num_ranks, num_copies)
        self._kernel = backends.attention
        self._matmul = backends.matmul
        self._metadata_cache = metadata_cache
        metadata_cache.expect(shape.window)
        self._rotary = rotary
        if rotary is not None:
            metadata_cache.expect_rows(ANGLES, rotary, self._look_angles_up)
        self._num_heads = shape.num_heads // num_ranks
        num_kv_heads = shape.num_kv_heads * num_copies // num_ranks
        num_parts = shape.num_heads // shape.num_kv_heads + 2
        self.qkv_weight = nn.Parameter(torch.empty(num_kv_heads, num_parts, shape.head_dim, shape.hidden_size))
        self.out_weight = nn.Parameter(torch.empty(shape.hidden_size, self._num_heads * shape.head_dim))
        self.qkv_bias = self.out_bias = None
        if shape.has_bias:
            self.qkv_bias = nn.Parameter(torch.zeros(num_kv_heads, num_parts, shape.head_dim))
            self.out_bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.q_norm, self.k_norm = qk_norms or (None, None)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Attend.

        Args:
            x_TD: Normalised residual stream.
            context: The micro-batch.

        Returns:
            The rows of ``x_TD``.
        """
        projected = self._project(x_TD, context)
        out_bias_D = None if self.out_bias is None else local(self.out_bias, x_TD.dtype)
        out_weight = local(self.out_weight, x_TD.dtype)
        # The kernel's output is kept by the product behind it too, so both are one region.
        with context.region("attn_core", out_weight):
            out_THC = context.recompute("core_attn", self._attend, *projected)
            return row_linear(out_THC.flatten(1), out_weight, out_bias_D, self._tensor_parallel, self._matmul)

    def _attend(self, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, context: ForwardContext) -> Tensor:
        """Run the kernel: [T, H, C]."""
        shape = self.shape
        return self._kernel(
            q_THC,
            k_TGC,
            v_TGC,
            self._metadata_cache.for_sequence(context.sequence, shape.window),
            window=shape.window,
            scale=shape.head_dim**-0.5,
            dropout=self._dropout(context),
        )

    def _project(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, C], k and v [T, G, C], normalised and rotated."""
        weight_GPCD = self._own_parts(local(self.qkv_weight, x_TD.dtype))
        bias = None if self.qkv_bias is None else self._own_parts(local(self.qkv_bias, x_TD.dtype)).flatten()
        qkv = column_linear(x_TD, weight_GPCD.flatten(0, 2), bias, self._tensor_parallel, self._matmul)
        qkv_TGPC = qkv.unflatten(1, weight_GPCD.shape[:3])
        angles = self._angles(context.sequence)
        if self.q_norm is None or self.k_norm is None:
            return split_and_rotate(qkv_TGPC, *angles)
        q_THC, k_TGC, v_TGC = split_and_rotate(qkv_TGPC)
        q_THC, k_TGC = self.q_norm(q_THC), self.k_norm(k_TGC)
        if angles:
            q_THC, k_TGC = apply_rope(q_THC, *angles), apply_rope(k_TGC, *angles)
        return q_THC, k_TGC, v_TGC

    def _own_parts(self, parts_GP: Tensor) -> Tensor:
        """Of a kv head that several ranks hold: this rank's query heads, and the key and value. Else all."""
        tp = self._tensor_parallel
        if tp is None or tp.kv_copies == 1:
            return parts_GP
        first = tp.rank % tp.kv_copies * self._num_heads
        return torch.cat((parts_GP[:, first : first + self._num_heads], parts_GP[:, -2:]), dim=1)

    def _angles(self, sequence: PackedSequence) -> tuple[Tensor, Tensor] | tuple[()]:
        """Return cosines and sines [T, R], the same for all layers of the micro-batch; nothing without RoPE."""
        if self._rotary is None:
            return ()
        return self._metadata_cache.share(sequence, ANGLES, self._rotary, self._look_angles_up)

    def _look_angles_up(self, sequence: PackedSequence) -> tuple[Tensor, Tensor]:
        assert self._rotary is not None, "angles belong to RoPE"
        return rotary_rows(self._rotary, sequence, self._metadata_cache.manager.long_lived)

    def _dropout(self, context: ForwardContext) -> AttentionDropout | None:
        if self.shape.dropout == 0.0 or not self.training:
            return None
        seed = site_seed(context, self.shape.layer_index, "attention.probability")
        tp = self._tensor_parallel
        return AttentionDropout(self.shape.dropout, seed, first_head=tp.rank * self._num_heads if tp else 0)


def _check_split(shape: AttentionShape, num_ranks: int, num_copies: int) -> None:
    """Refuse heads that tensor-parallel ranks cannot share evenly."""
    flag = flag_of("tensor_model_parallel_size")
    if shape.num_heads % num_ranks:
        raise ConfigError(
            flag,
            num_ranks,
            f"does not divide the {shape.num_heads} query heads",
            "use a divisor of --num-attention-heads",
        )
    if shape.num_kv_heads * num_copies % num_ranks:
        raise ConfigError(
            flag,
            num_ranks,
            f"neither divides the {shape.num_kv_heads} KV heads nor is a multiple of their number",
            "use a divisor or a multiple of --num-query-groups",
        )


def build_attention(model: ModelConfig, layer_index: int, build: LayerBuild) -> PackedAttention:
    """Build and initialise the attention of one block.

    Args:
        model: Shape of the decoder.
        layer_index: Global index of the block.
        build: What layers share.

    Returns:
        This rank's part of the layer, on the CPU in fp32.

    Raises:
        ConfigError: See :class:`PackedAttention` and :class:`RotaryConfig`.
    """
    prefix = f"blocks.{layer_index}.attention"
    qk_norms = None
    if model.qk_layernorm:
        qk_norms = (
            build_head_norm(model, build, f"{prefix}.q_norm"),
            build_head_norm(model, build, f"{prefix}.k_norm"),
        )
    attention = PackedAttention(
        AttentionShape.of_model(model, layer_index),
        build.backends,
        build.metadata_cache,
        RotaryConfig.of_model(model),
        qk_norms,
        build.tensor_parallel,
    )
    std, by_kv_head = model.init_method_std, (("tp", 0),)
    # Ranks with the same kv head each know the gradient of their own queries, and a part of the key's and value's.
    copies = ("kv_copy",) if build.mesh.kv_copies > 1 else ()
    build.place(attention.qkv_weight, f"{prefix}.qkv_weight", by_kv_head, copies, std)
    residual = residual_std(std, model.num_layers)
    build.place(attention.out_weight, f"{prefix}.out_weight", tensor_split(1), std=residual)
    if attention.qkv_bias is not None and attention.out_bias is not None:
        build.place(attention.qkv_bias, f"{prefix}.qkv_bias", by_kv_head, copies)
        build.place(attention.out_bias, f"{prefix}.out_bias", partial_axes=build.stream_axes)
    return attention
