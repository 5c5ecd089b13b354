"""Small blocks, kernels and packs that tests of layers and backends share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_glue.backends.attention_dense import dense_attention
from megatron_glue.backends.attention_flex import flex_attention
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS
from megatron_glue.backends.attention_segments import segments_attention
from megatron_glue.backends.attention_varlen import varlen_attention
from megatron_glue.backends.registry import resolve
from megatron_glue.config.sections import BackendConfig, ModelConfig
from megatron_glue.layers.block import DecoderBlock, build_decoder_block
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedSequence

KERNELS: dict[str, Any] = {
    "segments": segments_attention,
    "dense": dense_attention,
    "flex": flex_attention,
    "varlen": varlen_attention,
}

# Lengths of segments and padding: short ones that share a batch, long ones, single ones, one token, nothing at all.
PACKS: dict[str, tuple[list[int], int]] = {
    "mixed": ([5, 40, 38, 150, 1, 15, 16], 5),
    "many short": ([3, 4, 5, 3, 2, 1, 9, 7, 30, 31], 0),
    "one": ([37], 0),
    "two long": ([140, 131], 3),
    "one token": ([1], 0),
    "only padding": ([], 6),
    "nothing": ([], 0),
}


def pack(name: str) -> PackedSequence:
    """Return one of :data:`PACKS`."""
    lengths, num_pad_tokens = PACKS[name]
    return PackedSequence.from_lengths(lengths, num_pad_tokens)


def build_metadata(layout: str, sequence: PackedSequence, window: int = 0) -> Any:
    """Build metadata without a cache."""
    return METADATA_BUILDERS[layout](sequence.lengths, sequence.num_pad_tokens, sequence.device, window)


def random_qkv(
    num_tokens: int, num_heads: int = 4, num_groups: int = 2, head_dim: int = 8, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v leaves from a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((num_tokens, num_heads, head_dim), (num_tokens, num_groups, head_dim), (num_tokens, num_groups, head_dim))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


def small_model(**overrides: Any) -> ModelConfig:
    """A model of width 32."""
    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 256,
    }
    return ModelConfig(**(values | overrides))


def layer_build(
    model: ModelConfig | None = None,
    *,
    layout: str = "segments",
    enabled: bool = True,
    seed: int = 7,
    mesh: ParallelMesh | None = None,
) -> LayerBuild:
    """What layers share, with the kernels of one attention layout."""
    model = model or small_model()
    backends = resolve(
        BackendConfig.model_validate({"attention_backend": layout}),
        "cpu",
        torch.float32,
        head_dim=model.head_dim,
        attention_dropout=model.attention_dropout,
    )
    return LayerBuild(backends, PackedMetadataCache(layout, enabled, HostReader()), seed, mesh or ParallelMesh())


def build_blocks(model: ModelConfig, build: LayerBuild | None = None, **kinds: Any) -> tuple[nn.ModuleList, Any]:
    """Build all blocks of a dense model and the cache they share.

    Args:
        model: Shape of the blocks.
        build: What they share; ``None`` makes it from ``kinds``.
        **kinds: Arguments of :func:`layer_build`.
    """
    build = build or layer_build(model, **kinds)
    blocks: list[DecoderBlock] = [
        build_decoder_block(model, layer, build_feed_forward(model, f"blocks.{layer}.ffn", build), build)
        for layer in range(model.num_layers)
    ]
    return nn.ModuleList(blocks), build.metadata_cache


def run_blocks(blocks: nn.ModuleList, x_TD: Tensor, context: ForwardContext) -> Tensor:
    """Run blocks in order."""
    for block in blocks:
        x_TD = block(x_TD, context)
    return x_TD


def gradients(blocks: nn.ModuleList, sequence: PackedSequence, **context: Any) -> list[Tensor]:
    """Return output, input gradient and all parameter gradients of one pass over random input."""
    blocks.zero_grad()
    generator = torch.Generator().manual_seed(11)
    first: Any = blocks[0]
    width = first.attention.shape.hidden_size
    x_TD = torch.randn(sequence.num_tokens, width, generator=generator).requires_grad_()
    y_TD = run_blocks(blocks, x_TD, ForwardContext(sequence, **context))
    y_TD.backward(torch.randn(y_TD.shape, generator=generator))
    grads = [x_TD.grad, *(parameter.grad for parameter in blocks.parameters())]
    assert all(grad is not None for grad in grads)
    return [y_TD.detach(), *(grad.clone() for grad in grads if grad is not None)]
