"""Builds one MoE layer from configuration, with weights that depend on the seed and on global names only.

Expert e of a layer starts from the same numbers on whichever rank it lives, and is named and shaped as a part of the
whole stack, so neither the expert-parallel size nor a checkpoint's layout changes anything.

Called by the model builder, once per MoE layer. It reads no environment and creates no process group.

Shape suffixes: E experts, D model, F ffn, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from megatron_glue.backends.grouped_mm import GroupedMM
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ModelConfig, MoEConfig
from megatron_glue.layers.initialisation import init_expert_normal_, init_normal_, residual_std
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.moe.dispatcher import AllToAllDispatcher, LocalDispatcher
from megatron_glue.moe.experts import GroupedExperts
from megatron_glue.moe.layer import MoELayer, MoELayerConfig
from megatron_glue.moe.router import Router, RouterConfig
from megatron_glue.ops.grouping import GroupingImplementation
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.precision import keep_full_precision
from megatron_glue.parallel.shard_spec import EXPERT_AXIS, ShardSpec, set_shard_spec


@dataclass(frozen=True, eq=False)
class MoEPlacement:
    """Where a layer stands.

    Attributes:
        layer_index: Global index of the block, from 0.
        name: Global name of the layer's module, e.g. ``blocks.3.ffn``; parameters are named below it.
        seed: The run's seed.
        expert_group: Ranks that share the experts; ``None`` for one.
    """

    layer_index: int
    name: str
    seed: int
    expert_group: ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class MoEExecution:
    """How a layer computes.

    Attributes:
        grouped_mm: Product of rows in expert order with each expert's weight.
        host_reader: Counts reads of device values; one per model.
        one_pass: Group in one pass and compute by grouped products; else loop over experts.
        grouping_implementation: Of the one pass.
    """

    grouped_mm: GroupedMM
    host_reader: HostReader
    one_pass: bool = True
    grouping_implementation: GroupingImplementation = "auto"


def build_moe_layer(
    model: ModelConfig,
    moe: MoEConfig,
    placement: MoEPlacement,
    execution: MoEExecution,
) -> MoELayer:
    """Build and initialise one layer.

    Args:
        model: Hidden size, gating, initial spread.
        moe: Experts and router.
        placement: Where it stands.
        execution: How it computes.

    Returns:
        The layer, with its shared expert if one is configured, in fp32 on the CPU.

    Raises:
        ConfigError: If the ranks cannot share the experts evenly, or if biases are asked for.
    """
    group = placement.expert_group
    num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if moe.num_experts % num_ranks:
        raise ConfigError(
            flag_of("expert_model_parallel_size"),
            num_ranks,
            f"does not divide --num-experts {moe.num_experts}",
            "use a divisor of the number of experts",
        )
    if model.add_bias_linear:
        raise ConfigError(
            flag_of("add_bias_linear"), "on", "routed experts have no biases", "give --disable-bias-linear"
        )
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
    )
    experts = GroupedExperts(
        moe.num_experts // num_ranks,
        model.hidden_size,
        moe.moe_ffn_hidden_size or model.ffn_width,
        gated=model.swiglu,
        grouped_mm=execution.grouped_mm,
    )
    _initialise(router, experts, model, placement, rank)
    shared_size = moe.moe_shared_expert_intermediate_size
    shared_expert = (
        build_feed_forward(model, f"{placement.name}.shared_expert", placement.seed, ffn_size=shared_size)
        if shared_size
        else None
    )
    return MoELayer(
        router,
        experts,
        LocalDispatcher() if group is None else AllToAllDispatcher(group, execution.host_reader),
        shared_expert,
        MoELayerConfig(
            layer_index=placement.layer_index,
            one_pass=execution.one_pass,
            grouping_implementation=execution.grouping_implementation,
            aux_loss_coeff=moe.moe_aux_loss_coeff,
            z_loss_coeff=moe.moe_z_loss_coeff,
            balance_documents=moe.moe_aux_loss_scope == "sequence",
        ),
        execution.host_reader,
    )


def _initialise(
    router: Router, experts: GroupedExperts, model: ModelConfig, placement: MoEPlacement, rank: int
) -> None:
    """Fill weights and attach their specs; the projection into the residual stream starts smaller (GPT-2)."""
    router_name = f"{placement.name}.router.weight"
    init_normal_(router.weight, model.init_method_std, placement.seed, router_name)
    set_shard_spec(router.weight, ShardSpec(router_name, tuple(router.weight.shape)))
    keep_full_precision(router.weight)
    output_std = residual_std(model.init_method_std, model.num_layers)
    for local_name, param in experts.named_parameters():
        name = f"{placement.name}.experts.{local_name}"
        std = output_std if local_name == "down_weight" else model.init_method_std
        init_expert_normal_(param, std, placement.seed, name, rank * experts.num_local_experts)
        global_shape = (router.config.num_experts, *param.shape[1:])
        set_shard_spec(param, ShardSpec(name, global_shape, ((EXPERT_AXIS, 0),)))
