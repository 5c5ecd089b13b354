"""Rules about how ranks share a model: which sizes divide what, and which techniques exclude each other.

A part of ``validation.py``. How the ranks are laid out in the end is ``parallel/mesh.py``'s business, which asks
:func:`world_problems` once more when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import ParallelConfig, RunConfig
from megatron_glue.config.stage_plan import layer_problems, schedule_problems

Rule = Callable[[RunConfig, int], Iterator[ConfigError]]


def _error(field: str, value: Any, reason: str, remedy: str) -> ConfigError:
    return ConfigError(flag_of(field), value, reason, remedy)


def world_problems(parallel: ParallelConfig, world_size: int) -> Iterator[ConfigError]:
    """Yield what is wrong with the sizes of the axes, beside each other and for a number of ranks.

    Args:
        parallel: The configured sizes.
        world_size: Number of ranks.
    """
    split = parallel.ranks_per_replica
    if world_size % split:
        axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        given = " x ".join(f"{flag_of(axis)} {getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1)
        yield ConfigError(
            "WORLD_SIZE", world_size, f"is no multiple of {given}", f"start {split} processes or a multiple of that"
        )
        return
    dp_size, stage_size = world_size // split, world_size // parallel.pipeline_model_parallel_size
    ep_size, etp_size = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    ranks = f"{stage_size} ranks of a pipeline stage" if split > 1 else f"{dp_size} data-parallel ranks"
    if stage_size % ep_size:
        yield _error(
            "expert_model_parallel_size",
            ep_size,
            f"does not divide the {ranks}",
            "use a divisor of their number, or start more processes",
        )
    elif stage_size % (ep_size * etp_size):
        yield _error(
            "expert_tensor_parallel_size",
            etp_size,
            f"with --expert-model-parallel-size {ep_size} does not divide the {ranks}",
            "use a divisor of their number, or start more processes",
        )
    replicas = parallel.num_distributed_optimizer_instances
    if replicas > 1 and parallel.data_parallel_engine != "fsdp2":
        yield _error(
            "num_distributed_optimizer_instances",
            replicas,
            "replicas of sharded weights exist under fsdp2 only",
            "give --data-parallel-engine fsdp2 or set it to 1",
        )
    elif dp_size % replicas:
        yield _error(
            "num_distributed_optimizer_instances",
            replicas,
            f"does not divide the {dp_size} data-parallel ranks",
            "use a divisor of their number",
        )


def _world(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    parallel, training = config.parallel, config.training
    yield from world_problems(parallel, world_size)
    split = parallel.ranks_per_replica
    if world_size % split:
        return
    dp_size = world_size // split
    unit = training.micro_batch_size * dp_size
    if training.global_batch_size % unit:
        rounded = unit * -(-training.global_batch_size // unit)
        yield _error(
            "global_batch_size",
            training.global_batch_size,
            f"is no multiple of --micro-batch-size {training.micro_batch_size} x {dp_size} data-parallel ranks",
            f"use e.g. {rounded}",
        )


def _tensor(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    parallel, model, moe = config.parallel, config.model, config.moe
    tp_size = parallel.tensor_model_parallel_size
    etp_size = parallel.expert_tensor_parallel_size
    if moe.num_experts and (moe.moe_ffn_hidden_size or model.ffn_width) % etp_size:
        width = moe.moe_ffn_hidden_size or model.ffn_width
        yield _error(
            "expert_tensor_parallel_size",
            etp_size,
            f"does not divide the {width} channels of an expert",
            "use a divisor of --moe-ffn-hidden-size",
        )
    if moe.num_experts == 0 and etp_size > 1:
        yield _error("expert_tensor_parallel_size", etp_size, "there are no experts to split", "set it to 1")
    if tp_size == 1:
        if parallel.sequence_parallel:
            yield _error(
                "sequence_parallel",
                "on",
                "tensor-parallel ranks split the tokens, and there is one",
                "give --tensor-model-parallel-size or turn this off",
            )
        return
    has_dense = not all(moe.is_moe_layer(index) for index in range(model.num_layers))
    split = (
        (model.num_attention_heads, "--num-attention-heads"),
        (model.ffn_width if has_dense else 0, "--ffn-hidden-size"),
        (model.make_vocab_size_divisible_by, "--make-vocab-size-divisible-by"),
        (moe.moe_shared_expert_intermediate_size, "--moe-shared-expert-intermediate-size"),
    )
    for size, what in split:
        if size % tp_size:
            yield _error(
                "tensor_model_parallel_size", tp_size, f"does not divide {what} {size}", "use a divisor, or change that"
            )
    if model.num_kv_heads % tp_size and tp_size % model.num_kv_heads:
        yield _error(
            "tensor_model_parallel_size",
            tp_size,
            f"and the {model.num_kv_heads} KV heads do not divide each other",
            "use a multiple or a divisor of --num-query-groups",
        )
    if moe.num_experts and not parallel.sequence_parallel:
        yield _error(
            "sequence_parallel",
            "off",
            "tensor-parallel ranks in front of experts must hold different tokens",
            "give --sequence-parallel",
        )
    rows = config.data.seq_length * config.training.micro_batch_size
    if parallel.sequence_parallel and rows % (parallel.context_parallel_size * tp_size):
        yield _error(
            "seq_length",
            config.data.seq_length,
            f"times --micro-batch-size does not split over {parallel.context_parallel_size} context-parallel x "
            f"{tp_size} tensor-parallel ranks",
            "use a multiple",
        )


def _dispatcher(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    moe, ep_size = config.moe, config.parallel.expert_model_parallel_size
    chunks, dispatcher = moe.moe_overlap_chunks, moe.moe_token_dispatcher_type
    if moe.num_experts == 0 or chunks == 1:
        return
    if dispatcher != "alltoall":
        yield _error(
            "moe_overlap_chunks",
            chunks,
            f"the dispatcher {dispatcher} brings all tokens at once",
            "give --moe-token-dispatcher-type alltoall or set it to 1",
        )
    elif moe.num_experts % ep_size == 0 and chunks > moe.num_experts // ep_size:
        yield _error(
            "moe_overlap_chunks",
            chunks,
            f"a rank has {moe.num_experts // ep_size} experts, and each chunk needs one",
            f"use at most {moe.num_experts // ep_size}",
        )


def _static_capacity(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    moe, parallel = config.moe, config.parallel
    factor, dispatcher = moe.moe_static_capacity_factor, moe.moe_token_dispatcher_type
    if moe.num_experts == 0 or factor is None:
        return
    obstacles = (
        (
            dispatcher != "alltoall",
            f"the dispatcher {dispatcher} has no exchange of a fixed number of rows",
            "give --moe-token-dispatcher-type alltoall, or drop it",
        ),
        (
            moe.moe_overlap_chunks > 1,
            f"--moe-overlap-chunks {moe.moe_overlap_chunks} cuts the exchange, and each piece would need its own room",
            "drop one of the two",
        ),
        (
            parallel.expert_tensor_parallel_size > 1,
            f"--expert-tensor-parallel-size {parallel.expert_tensor_parallel_size} sends each row to several ranks",
            "set that to 1, or drop it",
        ),
        (
            parallel.data_parallel_engine == "deepspeed",
            "DeepSpeed decides by itself whether an update is skipped",
            "use ddp or fsdp2, or drop it",
        ),
    )
    for is_met, reason, remedy in obstacles:
        if is_met:
            yield _error("moe_static_capacity_factor", factor, reason, remedy)


def _context(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    cp_size, data = config.parallel.context_parallel_size, config.data
    if data.seq_length % data.segment_alignment:
        yield _error(
            "segment_alignment",
            data.segment_alignment,
            f"does not divide --seq-length {data.seq_length}",
            "use a divisor, so that a full document fits into a pack",
        )
    if data.max_segment_tokens % data.segment_alignment:
        yield _error(
            "segment_alignment",
            data.segment_alignment,
            f"does not divide --max-segment-tokens {data.max_segment_tokens}",
            "use a divisor, so that the pieces of a document waste no places",
        )
    if cp_size == 1:
        return
    if data.segment_alignment % (2 * cp_size):
        yield _error(
            "segment_alignment",
            data.segment_alignment,
            f"{cp_size} context-parallel ranks cut every document into {2 * cp_size} pieces",
            f"use a multiple of {2 * cp_size}",
        )


def _pipeline(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    yield from layer_problems(config)
    yield from schedule_problems(config, world_size)


def _deepspeed(config: RunConfig, world_size: int) -> Iterator[ConfigError]:
    parallel = config.parallel
    if parallel.data_parallel_engine == "deepspeed":
        for field in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_tensor_parallel_size",
        ):
            if (size := getattr(parallel, field)) > 1:
                yield _error(field, size, "not available with DeepSpeed", "set it to 1, or use ddp or fsdp2")
        if parallel.zero_stage == 3 and config.moe.num_experts:
            yield _error("zero_stage", 3, "DeepSpeed cannot split experts at this stage", "use stage 0, 1 or 2")
        if (backend := config.backend.optimizer_backend) in ("te", "apex"):
            reason = "DeepSpeed drives torch's optimizer only"
            yield _error("optimizer_backend", backend, reason, "use auto, fused or foreach")
        return
    if parallel.deepspeed_config is not None:
        yield _error(
            "deepspeed_config",
            parallel.deepspeed_config,
            f"the data-parallel engine is {parallel.data_parallel_engine}",
            "give --deepspeed or drop it",
        )
    stage, engine = parallel.zero_stage, parallel.data_parallel_engine
    legal = {"ddp": (0,), "fsdp2": (2, 3)}[engine]
    if stage is not None and stage not in legal:
        yield _error(
            "zero_stage",
            stage,
            f"{engine} has {' and '.join(map(str, legal))} only",
            "give --data-parallel-engine fsdp2 for 2 or 3, or --deepspeed for any",
        )


LAYOUT_RULES: tuple[Rule, ...] = (_world, _tensor, _dispatcher, _static_capacity, _context, _pipeline, _deepspeed)
"""Rules about the layout, most basic first."""


def layout_warnings(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield settings of the layout that have no effect.

    Args:
        config: The configuration of a run.
        world_size: Number of ranks.
    """
    parallel, moe = config.parallel, config.moe
    if world_size == 1 and parallel.data_parallel_engine == "deepspeed":
        yield "--deepspeed: no effect on one process, which needs no engine; start several with torchrun"
    if moe.num_experts and parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size == 1:
        dispatcher = moe.moe_token_dispatcher_type
        for field, is_set in (
            ("moe_shared_expert_overlap", moe.moe_shared_expert_overlap),
            ("moe_overlap_chunks", moe.moe_overlap_chunks > 1),
            ("moe_token_dispatcher_type", dispatcher != "alltoall"),
            ("moe_static_capacity_factor", moe.moe_static_capacity_factor is not None),
        ):
            if is_set:
                yield f"{flag_of(field)}: no effect without --expert-model-parallel-size, no rows are exchanged"
    if parallel.pipeline_model_parallel_size == 1:
        for field in (
            "num_layers_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ):
            if getattr(parallel, field) is not None:
                yield f"{flag_of(field)}: no effect without --pipeline-model-parallel-size"
        if parallel.pipeline_schedule != "1f1b":
            yield "--pipeline-schedule: no effect without --pipeline-model-parallel-size"
    if parallel.context_parallel_size == 1 and parallel.cp_comm_type != "allgather":
        yield "--cp-comm-type: no effect without --context-parallel-size"
