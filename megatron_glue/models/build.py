"""Builds this rank's part of a model from configuration: kernels, metadata cache, activation manager, blocks, ends.

The result is a plain module on its device, with fp32 parameters whose initial values depend on the seed and on global
names only. In a pipeline it holds the stages of this rank, each a part of the decoder with an activation manager of its
own. Which techniques are applied, in which order, stands in ``parallelize.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from megatron_glue.activation.device_api import device_name
from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.offload_policy import OffloadBounds
from megatron_glue.activation.offload_tuner import OffloadTuner
from megatron_glue.activation.parts import PartManagers
from megatron_glue.activation.plan import ActivationPlan, OffloadShare
from megatron_glue.backends.attention_context import add_context_parallel
from megatron_glue.backends.registry import Backends, resolve
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan
from megatron_glue.layers.block import build_decoder_block
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.dropout import SeededDropout
from megatron_glue.layers.embedding import OutputHead, TokenEmbedding, build_output_head, build_token_embedding
from megatron_glue.layers.long_lived_cache import CacheLimits
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.layers.norm import build_norm
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.models.gpt import GPT, ModelParts, OutputConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.layer import MoELayer
from megatron_glue.moe.router import Router
from megatron_glue.ops.cross_entropy import LossChunks
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.collectives import maxima_over_ranks
from megatron_glue.parallel.context import context_exchange
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from megatron_glue.parallel.shard_spec import EMBEDDING_AXIS, ShardSpec, get_shard_spec, set_shard_spec


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """A model and the objects its layers share.

    Attributes:
        model: The decoder, or the parts of it that this rank of a pipeline holds.
        parts: The decoder, or these parts, in order of stages.
        plan: How its layers are cut into stages.
        activation: Recompute and offload of its blocks, part by part.
        metadata_cache: Attention metadata of its layers.
        backends: Its kernels.
        precision: Its compute dtype.
        routers: Routers of its MoE layers by global layer index, in order.
    """

    model: GPT | ModelParts
    parts: tuple[GPT, ...]
    plan: StagePlan
    activation: PartManagers
    metadata_cache: PackedMetadataCache
    backends: Backends
    precision: Precision
    routers: dict[int, Router]


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
    """Build this rank's part of a model on its device.

    Args:
        config: A validated configuration.
        vocab_size: Real entries of the vocabulary.
        place: Ranks, device and folder.

    Returns:
        The model, or what of it this rank holds, and what its layers share.

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
    backends = add_context_parallel(
        backends,
        context_exchange(place.mesh, config.parallel.cp_comm_type),
        has_window=config.model.window_size > 0,
    )
    cache = PackedMetadataCache(
        backends.attention_layout,
        config.accelerator.enable_metadata_cache,
        place.host_reader,
        backends.context_layout,
        CacheLimits(config.cache.cache_limit_mb * 2**20, config.cache.cache_tier),
    )
    plan = StagePlan.from_config(config)
    moe_execution = MoEExecution(
        backends.grouped_mm,
        place.host_reader,
        one_pass=config.accelerator.enable_grouped_index,
        grouping_implementation=backends.grouping,
        permutation=backends.permutation,
        router_kernel=backends.router,
        device=place.device,
        dtype=precision.compute_dtype,
    )
    layer_build = LayerBuild(backends, cache, config.training.seed, place.mesh)
    shared = _Shared(config, vocab_size, place, layer_build, precision, moe_execution)
    managers: list[ActivationManager] = []
    parts: list[GPT] = []
    stages = plan.stages_of(place.mesh.pp_rank)
    for stage in stages:
        num_blocks = len(plan.layers[stage])
        managers.append(build_activation_manager(config, place, num_parts=len(stages), num_blocks=num_blocks))
        parts.append(_build_part(shared, plan.layers[stage], managers[-1]).to(place.device))
    return BuiltModel(
        model=parts[0] if plan.num_stages == 1 else ModelParts(parts),
        parts=tuple(parts),
        plan=plan,
        activation=PartManagers(managers, _build_offload_tuner(config, place, num_parts=len(stages))),
        metadata_cache=cache,
        backends=backends,
        precision=precision,
        routers={
            module.config.layer_index: module.router
            for part in parts
            for module in part.modules()
            if isinstance(module, MoELayer)
        },
    )


@dataclass(frozen=True, eq=False)
class _Shared:
    """What all parts of one rank are built from."""

    config: RunConfig
    vocab_size: int
    place: BuildPlace
    build: LayerBuild
    precision: Precision
    moe_execution: MoEExecution


def _build_part(shared: _Shared, layers: range, activation: ActivationManager) -> GPT:
    """The blocks of some layers, and what stands before the first and behind the last layer of the model."""
    model, build = shared.config.model, shared.build
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    blocks: dict[int, nn.Module] = {}
    for position, layer_index in enumerate(layers):
        block = build_decoder_block(model, layer_index, _build_ffn(shared, layer_index), build)
        blocks[layer_index] = ManagedBlock(
            block, partial(activation.run_block, position=position, is_last=position == len(layers) - 1)
        )
    embedding = build_token_embedding(model, shared.vocab_size, build) if is_first else None
    output_head = build_output_head(model, shared.vocab_size, build, has_embedding=is_first) if is_last else None
    if not model.untie_embeddings_and_output_weights and is_first != is_last:
        _sum_with_other_end(embedding or output_head)
    return GPT(
        embedding=embedding,
        blocks=blocks,
        final_norm=build_norm(model, build, "final_norm") if is_last else None,
        output_head=output_head,
        dropout=SeededDropout(model.hidden_dropout, -1, "embedding"),
        output=OutputConfig(
            LossChunks(
                shared.vocab_size,
                loss_chunk_tokens(shared.config, shared.vocab_size, shared.place.device.type),
                build.backends.matmul,
            ),
            shared.precision.compute_dtype,
            build.tensor_parallel,
        ),
    )


def loss_chunk_tokens(config: RunConfig, vocab_size: int, device_type: str) -> int:
    """Tokens whose logits exist at once; unset: as many as fit the cache of a CPU, or a small part of a GPU's memory.

    It follows from the whole vocabulary, so that all layouts add the same chunks.

    Args:
        config: A validated configuration.
        vocab_size: Real entries of the vocabulary.
        device_type: ``cpu`` or ``cuda``.
    """
    wanted = config.backend.cross_entropy_chunk_tokens
    if wanted is not None:
        return wanted
    logits_bytes = 8 * 2**20 if device_type == "cpu" else 512 * 2**20
    return max(64, logits_bytes // (4 * vocab_size) // 64 * 64)


def _sum_with_other_end(layer: TokenEmbedding | OutputHead | None) -> None:
    """Mark the tied weight that the first and the last stage both hold: its gradient is the sum of theirs."""
    assert layer is not None, "one of the two ends is here"
    spec = get_shard_spec(layer.weight) or ShardSpec("embedding.weight", tuple(layer.weight.shape))
    set_shard_spec(layer.weight, replace(spec, partial_axes=(*spec.partial_axes, EMBEDDING_AXIS)))


def build_activation_manager(
    config: RunConfig, place: BuildPlace, *, num_parts: int = 1, num_blocks: int = 1
) -> ActivationManager:
    """Turn the activation section into a manager.

    Args:
        config: A validated configuration.
        place: Device and folder.
        num_parts: Parts of the model on this rank, each with a manager of its own; they share the room for buffers.
        num_blocks: Blocks of its part.

    Returns:
        The manager; with everything off it calls blocks as they are.

    Raises:
        ConfigError: If the folder of the disk tier cannot be used.
    """
    plan = ActivationPlan(
        recompute=config.recompute,
        num_recomputed=config.num_recomputed_blocks,
        recompute_modules=config.recomputed_modules,
        offload=config.offload,
        offload_share=_offload_share(config, num_blocks),
        offload_modules=frozenset(config.activation.offload_modules),
        least_offload_bytes=config.activation.offload_min_tensor_kb << 10,
        double_buffer=config.accelerator.enable_double_buffer,
        offload_dir=place.offload_dir if config.offload else None,
        buffer_size_bytes=config.accelerator.buffer_size_mb * 2**20 // num_parts,
        poison=config.activation.activation_debug_poison,
        max_inflight=config.activation.offload_max_inflight,
        max_bytes_per_s=config.activation.offload_max_mb_per_s * 2**20,
        conservative_sync=config.activation.conservative_sync,
        integrated_memory={"auto": None, "yes": True, "no": False}[config.activation.activation_integrated_memory],
    )
    if config.offload and plan.max_bytes_per_s and place.device.type == "cuda":
        raise ConfigError(
            "--offload-max-mb-per-s",
            config.activation.offload_max_mb_per_s,
            "the copies of a GPU run at the speed of the bus",
            "drop it, and use --offload-max-inflight 1 where they slow collectives down",
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


def _offload_share(config: RunConfig, num_blocks: int) -> OffloadShare | None:
    """The share that a user named, of those blocks of a part that are recomputed."""
    num_leaving, num_recomputed = config.activation.offload_num_layers, config.num_recomputed_blocks
    num_blocks = num_blocks if num_recomputed is None else min(num_blocks, num_recomputed)
    return None if num_leaving is None or num_leaving >= num_blocks else OffloadShare(num_leaving, num_blocks)


def _build_offload_tuner(config: RunConfig, place: BuildPlace, num_parts: int) -> OffloadTuner | None:
    """Where nobody said how many inputs leave, and measuring is asked for."""
    activation, accelerator, mesh = config.activation, config.accelerator, place.mesh
    is_measured = activation.offload_policy == "auto" and activation.offload_num_layers is None
    if not (is_measured and config.offload and config.recompute):
        return None
    bounds = OffloadBounds(
        double_buffer=accelerator.enable_double_buffer,
        buffer_bytes=accelerator.buffer_size_mb * 2**20 // num_parts,
        least_input_bytes=activation.offload_min_tensor_kb << 10,
    )
    model, tokens = config.model, config.training.micro_batch_size * config.data.seq_length
    circumstances = (
        f"{device_name(place.device)}, {mesh.describe()}, {model.num_layers} layers of hidden {model.hidden_size}, "
        f"{tokens} tokens, {accelerator.buffer_size_mb} MiB of buffers, {activation.offload_max_inflight} copies at a "
        f"time, {activation.offload_max_mb_per_s:g} MiB/s"
    )
    merge = partial(maxima_over_ranks, group=mesh.world_group)
    return OffloadTuner(bounds, circumstances, merge, announces=mesh.rank == 0)


def _with_position_table(config: RunConfig) -> RunConfig:
    """Position tables reach as far as a pack does, unless they are to reach further."""
    if config.model.max_position_embeddings is not None:
        return config
    model = config.model.model_copy(update={"max_position_embeddings": config.data.seq_length})
    return config.model_copy(update={"model": model})


def _build_ffn(shared: _Shared, layer_index: int) -> nn.Module:
    """The dense or mixture-of-experts feed-forward of one block."""
    config, build = shared.config, shared.build
    name = f"blocks.{layer_index}.ffn"
    if not config.moe.is_moe_layer(layer_index):
        return build_feed_forward(config.model, name, build)
    placement = MoEPlacement(layer_index, name)
    return build_moe_layer(config.model, config.moe, placement, shared.moe_execution, build)
