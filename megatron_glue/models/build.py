"""Builds a whole model from configuration: kernels, metadata cache, activation manager, blocks, embedding, head.

The result is a plain module on its device, with fp32 parameters whose initial values depend on the seed and on global
names only. Which techniques are applied, in which order, stands in ``parallelize.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.backends.registry import Backends, resolve
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import RunConfig
from megatron_glue.layers.block import build_decoder_block
from megatron_glue.layers.dropout import SeededDropout
from megatron_glue.layers.embedding import build_output_head, build_token_embedding
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.layers.norm import build_norm
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.models.gpt import GPT, OutputConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.layer import MoELayer
from megatron_glue.moe.router import Router
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """A model and the objects its layers share.

    Attributes:
        model: The decoder.
        activation: Recompute and offload of its blocks.
        metadata_cache: Attention metadata of its layers.
        backends: Its kernels.
        precision: Its compute dtype.
        routers: Routers of its MoE layers, in order of layers.
    """

    model: GPT
    activation: ActivationManager
    metadata_cache: PackedMetadataCache
    backends: Backends
    precision: Precision
    routers: list[Router]


@dataclass(frozen=True, eq=False)
class BuildPlace:
    """Where a model is built.

    Attributes:
        mesh: Its ranks.
        device: Where this rank computes.
        host_reader: Counts reads of device values by all its parts.
        offload_dir: Folder of the activation disk tier; unused where there is an accelerator.
    """

    mesh: ParallelMesh
    device: torch.device
    host_reader: HostReader
    offload_dir: Path | None = None


def build_model(config: RunConfig, vocab_size: int, place: BuildPlace) -> BuiltModel:
    """Build a model on its device.

    Args:
        config: A validated configuration.
        vocab_size: Real entries of the vocabulary.
        place: Ranks, device and folder.

    Returns:
        The model and what its layers share.

    Raises:
        ConfigError: If the kernels, the folder or the configuration cannot be used.
    """
    config = _with_position_table(config)
    precision = Precision.from_name(config.training.precision, place.device.type)
    backends = resolve(
        config.backend,
        place.device,
        precision.compute_dtype,
        head_dim=config.model.head_dim,
        attention_dropout=config.model.attention_dropout,
        host_reader=place.host_reader,
    )
    cache = PackedMetadataCache(backends.attention_layout, config.accelerator.enable_metadata_cache, place.host_reader)
    activation = build_activation_manager(config, place)
    blocks: dict[int, nn.Module] = {}
    for layer_index in range(config.model.num_layers):
        ffn = _build_ffn(config, layer_index, backends, place)
        block = build_decoder_block(config.model, layer_index, ffn, backends, cache, config.training.seed)
        blocks[layer_index] = ManagedBlock(block, activation.run_block)
    model = GPT(
        embedding=build_token_embedding(config.model, vocab_size, config.training.seed),
        blocks=blocks,
        final_norm=build_norm(config.model, backends),
        output_head=build_output_head(config.model, vocab_size, config.training.seed),
        dropout=SeededDropout(config.model.hidden_dropout, -1, "embedding"),
        output=OutputConfig(vocab_size, config.backend.cross_entropy_chunk_tokens, precision.compute_dtype),
    ).to(place.device)
    routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    return BuiltModel(model, activation, cache, backends, precision, routers)


def build_activation_manager(config: RunConfig, place: BuildPlace) -> ActivationManager:
    """Turn the activation section into a manager.

    Args:
        config: A validated configuration.
        place: Device and folder.

    Returns:
        The manager; with everything off it calls blocks as they are.

    Raises:
        ConfigError: If the folder of the disk tier cannot be used.
    """
    plan = ActivationPlan(
        recompute=config.recompute,
        offload=config.offload,
        double_buffer=config.accelerator.enable_double_buffer,
        offload_dir=place.offload_dir if config.offload else None,
        buffer_size_bytes=config.accelerator.buffer_size_mb * 2**20,
        poison=config.activation.activation_debug_poison,
        integrated_memory={"auto": None, "yes": True, "no": False}[config.activation.activation_integrated_memory],
    )
    try:
        return ActivationManager(plan, place.device)
    except OSError as error:
        raise ConfigError(
            "--activation-offload-dir",
            place.offload_dir,
            f"activations cannot be offloaded there: {error.strerror or error}",
            "give a folder on a local disk with room",
        ) from error


def _with_position_table(config: RunConfig) -> RunConfig:
    """Position tables reach as far as a pack does, unless they are to reach further."""
    if config.model.max_position_embeddings is not None:
        return config
    model = config.model.model_copy(update={"max_position_embeddings": config.data.seq_length})
    return config.model_copy(update={"model": model})


def _build_ffn(config: RunConfig, layer_index: int, backends: Backends, place: BuildPlace) -> nn.Module:
    """The dense or mixture-of-experts feed-forward of one block."""
    model, moe, seed = config.model, config.moe, config.training.seed
    name = f"blocks.{layer_index}.ffn"
    if not moe.is_moe_layer(layer_index):
        return build_feed_forward(model, name, seed)
    execution = MoEExecution(
        backends.grouped_mm, place.host_reader, config.accelerator.enable_grouped_index, backends.grouping
    )
    return build_moe_layer(model, moe, MoEPlacement(layer_index, name, seed, place.mesh.ep_group), execution)
