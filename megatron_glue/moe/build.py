"""Builds one MoE layer from configuration, with weights that depend on the seed and on global names only.

Expert e of a layer starts from the same numbers on whichever ranks it lives, and is named and shaped as a part of the
whole stack, so neither the number of ranks that share the experts, nor that of ranks that split each of them, nor a
checkpoint's layout changes anything.

Called by the model builder, once per MoE layer. It reads no environment and creates no process group.

Shape suffixes: E experts, D model, F ffn, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_glue.backends.deepep import DeepEPBuffers
from megatron_glue.backends.grouped_mm import GroupedMM
from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.backends.router import RouterKernel
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig, MoEConfig
from megatron_glue.layers.build import LayerBuild
from megatron_glue.layers.initialisation import init_expert_normal_, residual_std
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.moe.balance import RouterBalance
from megatron_glue.moe.dispatcher import Dispatcher
from megatron_glue.moe.dispatcher_registry import DispatcherNeeds, load_dispatcher
from megatron_glue.moe.experts import GroupedExperts
from megatron_glue.moe.layer import MoELayer, MoELayerConfig
from megatron_glue.moe.router import Router, RouterConfig
from megatron_glue.ops.grouping import GroupingImplementation
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import keep_full_precision
from megatron_glue.parallel.shard_spec import EXPERT_AXIS, ShardSpec, set_shard_spec


@dataclass(frozen=True)
class MoEPlacement:
    """Where a layer stands.

    Attributes:
        layer_index: Global index of the block, from 0.
        name: Global name of the layer's module, e.g. ``blocks.3.ffn``; parameters are named below it.
    """

    layer_index: int
    name: str


@dataclass(frozen=True, eq=False)
class MoEExecution:
    """How a layer computes.

    Attributes:
        grouped_mm: Product of rows in expert order with each expert's weight.
        host_reader: Counts reads of device values; one per model.
        one_pass: Group in one pass and compute by grouped products; else loop over experts.
        grouping_implementation: Of the one pass.
        permutation: Moves rows into expert order and back.
        router_kernel: Of the router; ``None`` for operators of torch.
        device: Where the model will be when it computes.
        dtype: In which it computes.
        deepep_buffers: Shared by the layers of a model.
    """

    grouped_mm: GroupedMM
    host_reader: HostReader
    one_pass: bool = True
    grouping_implementation: GroupingImplementation = "auto"
    permutation: RowPermutation = TORCH_PERMUTATION
    router_kernel: RouterKernel | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    deepep_buffers: DeepEPBuffers = field(default_factory=DeepEPBuffers)


def build_moe_layer(
    model: ModelConfig,
    moe: MoEConfig,
    placement: MoEPlacement,
    execution: MoEExecution,
    build: LayerBuild,
) -> MoELayer:
    """Build and initialise one layer.

    Args:
        model: Hidden size, gating, initial spread.
        moe: Experts and router.
        placement: Where it stands.
        execution: How it computes.
        build: Seed and ranks. Dispatch works over ``ep_etp_group``, the statistics of a micro-batch over
            ``tp_cp_group``.

    Returns:
        The layer, with its shared expert if one is configured, in fp32 on the CPU.

    Raises:
        ConfigError: If the ranks cannot share the experts evenly, the dispatcher cannot be had, or biases are asked
            for.
    """
    mesh = build.mesh
    ffn_size = moe.moe_ffn_hidden_size or model.ffn_width
    _check(model, moe, mesh, ffn_size)
    router = Router(
        model.hidden_size,
        RouterConfig(
            num_experts=moe.num_experts,
            top_k=moe.moe_router_topk,
            score_function=moe.moe_router_score_function,
            normalise_weights=moe.moe_router_norm_topk_prob,
            weight_scale=moe.moe_router_topk_scaling_factor,
            has_expert_bias=moe.moe_router_enable_expert_bias,
        ),
        execution.router_kernel,
    )
    experts = GroupedExperts(
        moe.num_experts // mesh.ep_size,
        model.hidden_size,
        ffn_size // mesh.etp_size,
        gated=model.swiglu,
        grouped_mm=execution.grouped_mm,
    )
    _initialise(router, experts, model, placement, build)
    shared_size = moe.moe_shared_expert_intermediate_size
    shared_expert = (
        build_feed_forward(model, f"{placement.name}.shared_expert", build, ffn_size=shared_size)
        if shared_size
        else None
    )
    return MoELayer(
        router,
        experts,
        _load_dispatcher(moe, execution, mesh),
        shared_expert,
        RouterBalance(
            layer_index=placement.layer_index,
            aux_loss_coeff=moe.moe_aux_loss_coeff,
            z_loss_coeff=moe.moe_z_loss_coeff,
            by_document=moe.moe_aux_loss_scope == "sequence",
            group=mesh.tp_cp_group,
        ),
        MoELayerConfig(
            layer_index=placement.layer_index,
            host_reader=execution.host_reader,
            one_pass=execution.one_pass,
            grouping_implementation=execution.grouping_implementation,
            overlap_shared_expert=moe.moe_shared_expert_overlap,
        ),
    )


def _load_dispatcher(moe: MoEConfig, execution: MoEExecution, mesh: ParallelMesh) -> Dispatcher:
    needs = DispatcherNeeds(
        group=mesh.ep_etp_group,
        num_experts=moe.num_experts,
        host_reader=execution.host_reader,
        device=execution.device,
        dtype=execution.dtype,
        num_replicas=mesh.etp_size,
        num_chunks=moe.moe_overlap_chunks,
        capacity_factor=moe.moe_static_capacity_factor,
        deepep_buffers=execution.deepep_buffers,
        permutation=execution.permutation,
    )
    return load_dispatcher(moe.moe_token_dispatcher_type, needs)


def _check(model: ModelConfig, moe: MoEConfig, mesh: ParallelMesh, ffn_size: int) -> None:
    """Refuse what no layer can be built from."""
    assert mesh.tp_size == 1 or mesh.sequence_parallel, "tensor-parallel ranks route different tokens"
    if moe.num_experts % mesh.ep_size:
        raise ConfigError(
            flag_of("expert_model_parallel_size"),
            mesh.ep_size,
            f"does not divide --num-experts {moe.num_experts}",
            "use a divisor of the number of experts",
        )
    if ffn_size % mesh.etp_size:
        raise ConfigError(
            flag_of("expert_tensor_parallel_size"),
            mesh.etp_size,
            f"does not divide the width of one expert, {ffn_size}",
            f"use a divisor of {flag_of('moe_ffn_hidden_size')}",
        )
    if model.add_bias_linear:
        raise ConfigError(
            flag_of("add_bias_linear"), "on", "routed experts have no biases", "give --disable-bias-linear"
        )


def _initialise(
    router: Router, experts: GroupedExperts, model: ModelConfig, placement: MoEPlacement, build: LayerBuild
) -> None:
    """Fill weights and attach their specs; the projection into the residual stream starts smaller (GPT-2)."""
    mesh, router_name = build.mesh, f"{placement.name}.router.weight"
    # Under sequence parallelism each rank routes its own rows: its gradient is one part of a sum.
    build.place(router.weight, router_name, partial_axes=build.stream_axes, std=model.init_method_std)
    keep_full_precision(router.weight)
    output_std = residual_std(model.init_method_std, model.num_layers)
    for local_name, param in experts.named_parameters():
        spec = expert_spec(f"{placement.name}.experts.{local_name}", param, mesh)
        std = output_std if local_name == "down_weight" else model.init_method_std
        init_expert_normal_(param, std, build.seed, spec, spec.local_slices(mesh.axis_sizes, mesh.axis_ranks))
        set_shard_spec(param, spec)


def expert_spec(name: str, param: Tensor, mesh: ParallelMesh) -> ShardSpec:
    """Describe a stack of expert weights.

    Args:
        name: Global name of the parameter, which ends as :class:`GroupedExperts` names it.
        param: This rank's part: gate and up [e, parts, F, D] or down [e, D, F], the width F split over etp.
        mesh: The ranks.

    Returns:
        Experts split over ep, widths over etp.
    """
    width_dim = 2
    shape = list(param.shape)
    shape[0] *= mesh.ep_size
    shape[width_dim] *= mesh.etp_size
    return ShardSpec(name, tuple(shape), ((EXPERT_AXIS, 0), ("etp", width_dim)))
