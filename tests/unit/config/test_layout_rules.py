"""Every rule about the layout: one broken configuration each, and neighbours that pass."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_glue.config.layout_rules import layout_warnings
from megatron_glue.config.loading import from_dict
from megatron_glue.config.validation import problems, validate

EXPERTS = {"num_experts": 8}
TP2 = {"tensor_model_parallel_size": 2}

BROKEN: list[tuple[str, dict[str, Any], int, str, str]] = [
    (
        "layers by pp",
        {"parallel": {"pipeline_model_parallel_size": 8}},
        8,
        "--pipeline-model-parallel-size",
        "--num-layers 4",
    ),
    (
        "zb with offloaded modules",
        {
            "parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb"},
            "activation": {"offload_modules": ("attn_core",)},
        },
        2,
        "--pipeline-schedule",
        "offloaded blocks allow one",
    ),
    (
        "zb recomputed",
        {
            "parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb"},
            "activation": {"recompute_granularity": "full"},
        },
        2,
        "--pipeline-schedule",
        "two passes",
    ),
    ("world by tp", {"parallel": TP2}, 3, "WORLD_SIZE", "no multiple"),
    ("sp alone", {"parallel": {"sequence_parallel": True}}, 1, "--sequence-parallel", "there is one"),
    ("heads by tp", {"parallel": {"tensor_model_parallel_size": 8}}, 8, "--tensor-model-parallel-size", "heads 4"),
    (
        "ffn by tp",
        {"parallel": TP2, "model": {"ffn_hidden_size": 33}},
        2,
        "--tensor-model-parallel-size",
        "--ffn-hidden-size 33",
    ),
    (
        "vocabulary by tp",
        {"parallel": TP2, "model": {"make_vocab_size_divisible_by": 125}},
        2,
        "--tensor-model-parallel-size",
        "--make-vocab-size-divisible-by",
    ),
    (
        "kv heads by tp",
        {
            "parallel": {"tensor_model_parallel_size": 4},
            "model": {"num_attention_heads": 12, "num_query_groups": 6, "hidden_size": 192},
        },
        4,
        "--tensor-model-parallel-size",
        "6 KV heads",
    ),
    ("experts without sp", {"parallel": TP2, "moe": EXPERTS}, 2, "--sequence-parallel", "different tokens"),
    (
        "rows by tp",
        {"parallel": {**TP2, "sequence_parallel": True}, "data": {"seq_length": 511}},
        2,
        "--seq-length",
        "tensor-parallel ranks",
    ),
    ("etp without experts", {"parallel": {"expert_tensor_parallel_size": 2}}, 2, "--expert-tensor-parallel-size", "no"),
    (
        "expert width by etp",
        {"parallel": {"expert_tensor_parallel_size": 2}, "moe": {**EXPERTS, "moe_ffn_hidden_size": 33}},
        2,
        "--expert-tensor-parallel-size",
        "33 channels",
    ),
    (
        "ep x etp by stage",
        {"parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, "moe": EXPERTS},
        2,
        "--expert-tensor-parallel-size",
        "2 data-parallel ranks",
    ),
    ("cp without alignment", {"parallel": {"context_parallel_size": 2}}, 2, "--segment-alignment", "multiple of 4"),
    ("alignment by length", {"data": {"segment_alignment": 7}}, 1, "--segment-alignment", "--seq-length 512"),
    (
        "alignment by piece",
        {"data": {"segment_alignment": 8, "max_segment_tokens": 100}},
        1,
        "--segment-alignment",
        "--max-segment-tokens 100",
    ),
    (
        "replicas under ddp",
        {"parallel": {"num_distributed_optimizer_instances": 2}},
        2,
        "--num-distributed-optimizer-instances",
        "fsdp2 only",
    ),
    (
        "replicas by dp",
        {"parallel": {"num_distributed_optimizer_instances": 3, "data_parallel_engine": "fsdp2"}},
        4,
        "--num-distributed-optimizer-instances",
        "4 data-parallel ranks",
    ),
    ("zero 2 under ddp", {"parallel": {"zero_stage": 2}}, 2, "--zero-stage", "ddp has 0 only"),
    (
        "zero 1 under fsdp2",
        {"parallel": {"zero_stage": 1, "data_parallel_engine": "fsdp2"}},
        2,
        "--zero-stage",
        "2 and 3",
    ),
    (
        "tp under deepspeed",
        {"parallel": {**TP2, "data_parallel_engine": "deepspeed"}},
        2,
        "--tensor-model-parallel-size",
        "not available with DeepSpeed",
    ),
    (
        "zero 3 experts",
        {"parallel": {"zero_stage": 3, "data_parallel_engine": "deepspeed"}, "moe": EXPERTS},
        2,
        "--zero-stage",
        "stage 0, 1 or 2",
    ),
    (
        "a library's optimizer under deepspeed",
        {"parallel": {"data_parallel_engine": "deepspeed"}, "backend": {"optimizer_backend": "apex"}},
        2,
        "--optimizer-backend",
        "DeepSpeed drives torch's optimizer only",
    ),
    ("file without deepspeed", {"parallel": {"deepspeed_config": "a.json"}}, 1, "--deepspeed-config", "is ddp"),
    (
        "overlap without shared expert",
        {"moe": {**EXPERTS, "moe_shared_expert_overlap": True}},
        1,
        "--moe-shared-expert-overlap",
        "no shared expert",
    ),
    (
        "more chunks than experts",
        {"moe": {**EXPERTS, "moe_overlap_chunks": 5}, "parallel": {"expert_model_parallel_size": 2}},
        2,
        "--moe-overlap-chunks",
        "a rank has 4 experts",
    ),
    (
        "chunks of an all-gather",
        {
            "moe": {**EXPERTS, "moe_overlap_chunks": 2, "moe_token_dispatcher_type": "allgather"},
            "parallel": {"expert_model_parallel_size": 2},
        },
        2,
        "--moe-overlap-chunks",
        "brings all tokens at once",
    ),
    (
        "fixed exchanges of an all-gather",
        {
            "moe": {**EXPERTS, "moe_static_capacity_factor": 1.5, "moe_token_dispatcher_type": "allgather"},
            "parallel": {"expert_model_parallel_size": 2},
        },
        2,
        "--moe-static-capacity-factor",
        "the dispatcher allgather has no exchange",
    ),
    (
        "fixed exchanges in chunks",
        {
            "moe": {**EXPERTS, "moe_static_capacity_factor": 1.5, "moe_overlap_chunks": 2},
            "parallel": {"expert_model_parallel_size": 2},
        },
        2,
        "--moe-static-capacity-factor",
        "--moe-overlap-chunks 2 cuts the exchange",
    ),
    (
        "fixed exchanges to parts of experts",
        {
            "moe": {**EXPERTS, "moe_static_capacity_factor": 1.5},
            "parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        },
        4,
        "--moe-static-capacity-factor",
        "sends each row to several ranks",
    ),
    (
        "fixed exchanges under DeepSpeed",
        {
            "moe": {**EXPERTS, "moe_static_capacity_factor": 1.5},
            "parallel": {"expert_model_parallel_size": 2, "data_parallel_engine": "deepspeed"},
        },
        2,
        "--moe-static-capacity-factor",
        "DeepSpeed decides by itself",
    ),
]

FINE: list[tuple[dict[str, Any], int]] = [
    # The dense width is nowhere used where all layers hold experts.
    (
        {
            "parallel": {**TP2, "sequence_parallel": True},
            "moe": {**EXPERTS, "moe_ffn_hidden_size": 32},
            "model": {"ffn_hidden_size": 33},
        },
        2,
    ),
    ({"parallel": {"tensor_model_parallel_size": 4}, "model": {"num_query_groups": 2}}, 4),
    (
        {
            "parallel": {**TP2, "sequence_parallel": True, "expert_model_parallel_size": 4, "context_parallel_size": 2},
            "moe": EXPERTS,
            "data": {"segment_alignment": 8},
        },
        4,
    ),
    ({"parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, "moe": EXPERTS}, 4),
    ({"parallel": {"zero_stage": 1, "data_parallel_engine": "deepspeed"}, "moe": EXPERTS}, 4),
    ({"parallel": {"zero_stage": 2, "data_parallel_engine": "fsdp2", "num_distributed_optimizer_instances": 2}}, 4),
]


@pytest.mark.parametrize(
    ("overrides", "world_size", "flag", "reason"), [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_every_rule_names_flag_and_reason(overrides: dict[str, Any], world_size: int, flag: str, reason: str) -> None:
    overrides = {**overrides, "training": {"global_batch_size": 12, **overrides.get("training", {})}}
    errors = list(problems(from_dict(overrides), world_size))
    assert errors, "nothing was found wrong"
    assert flag in str(errors[0])
    assert reason in str(errors[0])


@pytest.mark.parametrize(("overrides", "world_size"), FINE, ids=str)
def test_sensible_layouts_pass(overrides: dict[str, Any], world_size: int) -> None:
    validate(from_dict({**overrides, "training": {"global_batch_size": 16}}), world_size)


def test_settings_without_effect_are_warned_about() -> None:
    config = from_dict(
        {"parallel": {"num_layers_per_virtual_pipeline_stage": 1, "pipeline_schedule": "zb", "cp_comm_type": "p2p"}}
    )
    warnings = list(layout_warnings(config, 1))
    assert [warning.split(":")[0] for warning in warnings] == [
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-schedule",
        "--cp-comm-type",
    ]
