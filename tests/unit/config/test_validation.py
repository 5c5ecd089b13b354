"""Every rule between sections: one broken configuration each, and neighbours that pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import problems, validate

EXPERTS = {"num_experts": 8}

BROKEN: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("heads", {"model": {"hidden_size": 250}}, 1, "--num-attention-heads", "does not divide --hidden-size 250"),
    ("groups", {"model": {"num_query_groups": 3}}, 1, "--num-query-groups", "does not divide"),
    ("more groups than heads", {"model": {"num_query_groups": 8}}, 1, "--num-query-groups", "does not divide"),
    ("odd rope", {"model": {"kv_channels": 33}}, 1, "--rotary-percent", "rotates 33 of 33"),
    ("no rope left", {"model": {"rotary_percent": 0.01}}, 1, "--rotary-percent", "rotates 0 of 64"),
    (
        "odd sinusoid",
        {"model": {"hidden_size": 255, "num_attention_heads": 5, "position_embedding_type": "sinusoidal"}},
        1,
        "--hidden-size",
        "even",
    ),
    ("short table", {"model": {"max_position_embeddings": 256}}, 1, "--max-position-embeddings", "--seq-length 512"),
    ("moe pattern length", {"moe": {**EXPERTS, "moe_layer_freq": [0, 1]}}, 1, "--moe-layer-freq", "2 entries"),
    ("moe pattern entry", {"moe": {**EXPERTS, "moe_layer_freq": [0, 1, 2, 1]}}, 1, "--moe-layer-freq", "other than"),
    ("empty pattern", {"moe": {**EXPERTS, "moe_layer_freq": []}}, 1, "--moe-layer-freq", "0 entries"),
    (
        "window pattern",
        {"model": {"window_size": 8, "window_attn_skip_freq": [1]}},
        1,
        "--window-attn-skip-freq",
        "1 entries",
    ),
    (
        "ep without experts",
        {"parallel": {"expert_model_parallel_size": 2}},
        2,
        "--expert-model-parallel-size",
        "no exp",
    ),
    (
        "shared without experts",
        {"moe": {"moe_shared_expert_intermediate_size": 64}},
        1,
        "--moe-shared-expert-intermediate-size",
        "there are none",
    ),
    ("expert biases", {"model": {"add_bias_linear": True}, "moe": EXPERTS}, 1, "--add-bias-linear", "have no biases"),
    ("topk", {"moe": {"num_experts": 4, "moe_router_topk": 5}}, 1, "--moe-router-topk", "exceeds --num-experts 4"),
    (
        "experts by ep",
        {"moe": {"num_experts": 3}, "parallel": {"expert_model_parallel_size": 2}},
        2,
        "--expert-model-parallel-size",
        "--num-experts 3",
    ),
    (
        "world by ep",
        {"moe": EXPERTS, "parallel": {"expert_model_parallel_size": 2}, "training": {"global_batch_size": 3}},
        3,
        "--expert-model-parallel-size",
        "3 data-parallel ranks",
    ),
    ("world by tp", {"parallel": {"tensor_model_parallel_size": 2}}, 3, "WORLD_SIZE", "no multiple"),
    ("min lr", {"optimizer": {"lr": 1e-5}}, 1, "--min-lr", "exceeds the peak"),
    ("warmup", {"optimizer": {"lr_warmup_iters": 20, "lr_decay_iters": 10}}, 1, "--lr-warmup-iters", "decay-iters 10"),
    (
        "wsd",
        {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95}},
        1,
        "--lr-wsd-decay-iters",
        "90 iterations",
    ),
    ("name with a path", {"training": {"name": "a/../../b"}}, 1, "--name", "may not lead elsewhere"),
    (
        "double buffer without recompute",
        {"training": {"accelerator": {"enable_double_buffer": True}}, "activation": {"recompute_granularity": "none"}},
        1,
        "--double-buffer-ckpt",
        "recomputed",
    ),
    (
        "uniform chunks of several blocks",
        {"activation": {"recompute_granularity": "full", "recompute_num_layers": 2}},
        1,
        "--recompute-num-layers",
        "share one kept input",
    ),
    (
        "unknown module to offload",
        {"activation": {"offload_modules": ("attention",)}},
        1,
        "--offload-modules",
        "no module of that name",
    ),
    (
        "modules of recomputed blocks offloaded",
        {"activation": {"offload_modules": ("attn_core",), "recompute_granularity": "full"}},
        1,
        "--offload-modules",
        "every block is recomputed",
    ),
    (
        "unknown module to recompute",
        {"activation": {"recompute_granularity": "selective", "recompute_modules": ("attn_core",)}},
        1,
        "--recompute-modules",
        "no module of that name",
    ),
    (
        "no module to recompute",
        {"activation": {"recompute_granularity": "selective", "recompute_modules": ()}},
        1,
        "--recompute-modules",
        "nothing would be recomputed",
    ),
    (
        "module recomputed and offloaded",
        {"activation": {"recompute_granularity": "selective", "offload_modules": ("attn_core",)}},
        1,
        "--recompute-modules",
        "keeps off the device",
    ),
    (
        "block inputs offloaded under selective recompute",
        {"activation": {"recompute_granularity": "selective", "activation_offload": True}},
        1,
        "--activation-offload",
        "recomputed from them",
    ),
    (
        "policy for modules",
        {"activation": {"offload_modules": ("attn_core",), "offload_policy": "auto"}},
        1,
        "--offload-policy",
        "not about tensors of modules",
    ),
    (
        "block without a number",
        {"activation": {"recompute_granularity": "full", "recompute_method": "block"}},
        1,
        "--recompute-method",
        "none is given",
    ),
    (
        "offload without recompute",
        {"activation": {"recompute_granularity": "none", "activation_offload": True}},
        1,
        "--activation-offload",
        "recomputed",
    ),
]

PASSING: list[tuple[str, dict[str, Any], int]] = [
    ("heads of their own width", {"model": {"hidden_size": 250, "kv_channels": 64}}, 1),
    ("grouped queries", {"model": {"num_query_groups": 2}}, 1),
    ("odd heads without rope", {"model": {"kv_channels": 33, "position_embedding_type": "none"}}, 1),
    ("biases of a dense model", {"model": {"add_bias_linear": True}}, 1),
    ("half rope", {"model": {"rotary_percent": 0.5}}, 1),
    ("short table unused", {"model": {"max_position_embeddings": 512, "position_embedding_type": "none"}}, 1),
    ("topk of a dense model", {"moe": {"moe_router_topk": 2}}, 1),
    ("pattern", {"moe": {**EXPERTS, "moe_layer_freq": [0, 1, 0, 1]}}, 1),
    ("ep", {"moe": EXPERTS, "parallel": {"expert_model_parallel_size": 2}}, 2),
    ("constant lr below min", {"optimizer": {"lr": 1e-4, "lr_decay_style": "constant"}}, 1),
    ("name with dots", {"training": {"name": "a..b 2.0"}}, 1),
    ("short smoke run", {"training": {"train_iters": 3}}, 1),
]


@pytest.mark.parametrize(
    ("changes", "world_size", "field", "reason"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_broken_combination_is_named(changes: dict[str, Any], world_size: int, field: str, reason: str) -> None:
    errors = list(problems(from_dict(changes), world_size))
    matching = [error for error in errors if error.field == field and reason in error.reason]
    assert matching, [str(error) for error in errors]
    assert matching[0].remedy
    with pytest.raises(ConfigError):
        validate(from_dict(changes), world_size)


@pytest.mark.parametrize(("changes", "world_size"), [case[1:] for case in PASSING], ids=[case[0] for case in PASSING])
def test_sound_combination_passes(changes: dict[str, Any], world_size: int) -> None:
    validate(from_dict(changes), world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_defaults_pass_without_a_word(world_size: int) -> None:
    assert validate(RunConfig(), world_size) == []


@pytest.mark.parametrize(("global_batch", "suggestion"), [(3, "use e.g. 4"), (1, "use e.g. 2")])
def test_f92_batch_that_ranks_cannot_share_is_rejected(global_batch: int, suggestion: str) -> None:
    with pytest.raises(ConfigError, match="data-parallel ranks") as caught:
        validate(from_dict({"training": {"global_batch_size": global_batch}}), 2)
    assert caught.value.remedy == suggestion
    validate(from_dict({"training": {"global_batch_size": 4}}), 2)


def test_offload_folder_must_be_usable(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    changes = {"activation": {"activation_offload": True, "activation_offload_dir": str(blocked / "below")}}
    with pytest.raises(ConfigError, match="no folder") as caught:
        validate(from_dict(changes), 1)
    assert caught.value.field == "--activation-offload-dir"
    changes["activation"]["activation_offload_dir"] = str(tmp_path / "new" / "deep")
    validate(from_dict(changes), 1)


def test_offload_folder_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    changes = {"activation": {"activation_offload": True, "activation_offload_dir": str(tmp_path)}}
    with pytest.raises(ConfigError, match="not writable"):
        validate(from_dict(changes), 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"moe": {"moe_router_score_function": "sigmoid"}}, "--moe-router-score-function: no effect without"),
        ({"model": {"window_attn_skip_freq": 2}}, "--window-attn-skip-freq"),
        ({"training": {"train_iters": 3}}, "never reaches the peak"),
        ({"optimizer": {"lr_wsd_decay_iters": 5}}, "--lr-wsd-decay-iters"),
        ({"training": {"accelerator": {"buffer_size_mb": 5}}}, "--double-buffer-size-mb"),
        ({"cache": {"cache_tier": "host"}}, "--cache-tier=host: without --use-packed-cache"),
        ({"cache": {"cache_limit_mb": 0}}, "--cache-limit-mb=0: tables of positions take 0.1 MiB"),
        (
            {
                "model": {"position_embedding_type": "sinusoidal", "max_position_embeddings": 2**20},
                "cache": {"cache_limit_mb": 512},
            },
            "take 1024.0 MiB, so they are built again for every micro-batch; use at least 1024, with --cache-tier host",
        ),
        ({"activation": {"activation_offload_dir": "x"}}, "--activation-offload-dir"),
        ({"activation": {"recompute_method": "block", "recompute_num_layers": 2}}, "--recompute-num-layers"),
        ({"activation": {"activation_debug_poison": True}}, "--activation-debug-poison"),
        ({"activation": {"conservative_sync": True}}, "--conservative-sync"),
        ({"activation": {"offload_max_inflight": 1}}, "--offload-max-inflight"),
        ({"activation": {"recompute_modules": ("mlp",)}}, "--recompute-modules"),
        ({"activation": {"offload_policy": "auto"}}, "--offload-policy"),
        ({"activation": {"offload_num_layers": 1}}, "--offload-num-layers"),
        (
            {"activation": {"activation_offload": True, "offload_policy": "auto", "offload_num_layers": 1}},
            "--offload-policy=auto: not used",
        ),
        ({"activation": {"offload_max_mb_per_s": 5.0}}, "--offload-max-mb-per-s"),
        ({"training": {"precision": "bf16", "device": "cpu"}}, "--precision=bf16"),
        ({"parallel": {"data_parallel_engine": "deepspeed"}}, "--deepspeed: no effect on one process"),
        (
            {
                "moe": {
                    "num_experts": 4,
                    "moe_shared_expert_intermediate_size": 64,
                    "moe_shared_expert_overlap": True,
                }
            },
            "--moe-shared-expert-overlap: no effect without",
        ),
        ({"moe": {"num_experts": 4, "moe_overlap_chunks": 2}}, "--moe-overlap-chunks: no effect without --expert"),
        (
            {"moe": {"num_experts": 4, "moe_static_capacity_factor": 1.5}},
            "--moe-static-capacity-factor: no effect without --expert",
        ),
        (
            {"moe": {"num_experts": 4, "moe_token_dispatcher_type": "allgather"}},
            "--moe-token-dispatcher-type: no effect without --expert",
        ),
    ],
)
def test_settings_without_effect_are_warned_about(changes: dict[str, Any], text: str) -> None:
    warnings = validate(from_dict(changes), 1)
    assert len(warnings) == 1
    assert text in warnings[0]


def test_bf16_is_warned_about_on_the_device_that_was_found() -> None:
    config = from_dict({"training": {"precision": "bf16"}})
    assert validate(config, 1, "cpu")
    assert validate(config, 1, "cuda") == []
