"""Each optimisation is named with its state, its reason and its source."""

from __future__ import annotations

from megatron_glue.config.loading import resolve_config
from megatron_glue.training.presets import GPT_DEFAULTS, MOE_DEFAULTS
from megatron_glue.training.start_report import optimisations

ALL_ON = ["--use-packed-cache", "--double-buffer-ckpt", "--moe-grouping", "one-pass"]
THREE = ("packed-metadata cache", "double-buffered reload", "one-pass MoE grouping")


def said(argv: list[str], environ: dict[str, str] | None = None, defaults=MOE_DEFAULTS, **device: bool):
    resolved = resolve_config(argv, environ or {}, defaults, "pretrain.py")
    return {entry.name: entry for entry in optimisations(resolved.config, resolved.provenance, **device)}


def test_on_by_flag() -> None:
    found = said(ALL_ON)
    assert [(found[name].is_on, found[name].source) for name in THREE] == [(True, "command line")] * 3
    assert found["recompute"].source == found["activation offload"].source == "command line"
    assert found[THREE[0]].describe() == (
        "optimisation packed-metadata cache: on, metadata is built once per micro-batch for all layers (command line)"
    )


def test_disable_turns_all_three_off_and_is_named() -> None:
    found = said(ALL_ON, {"MEGATRON_GLUE_DISABLE": "1"})
    assert [(found[name].is_on, found[name].source) for name in THREE] == [
        (False, "environment MEGATRON_GLUE_DISABLE")
    ] * 3
    assert not found["recompute"].is_on
    assert not found["activation offload"].is_on
    assert said([*ALL_ON, "--no-accelerator"])[THREE[2]].source == "command line --no-accelerator"


def test_why_what_was_asked_for_does_not_work() -> None:
    assert said(ALL_ON, defaults=GPT_DEFAULTS)[THREE[2]].reason == "the model has no experts"
    shared = said(ALL_ON, is_memory_shared=True)[THREE[1]]
    assert not shared.is_on
    assert "shares the host's memory" in shared.reason


def test_techniques_beside_the_three() -> None:
    found = said(
        [
            *("--expert-model-parallel-size", "2", "--moe-overlap-chunks", "2", "--async-save"),
            *("--moe-shared-expert-intermediate-size", "8", "--moe-shared-expert-overlap"),
            *("--recompute-granularity", "selective", "--recompute-modules", "mlp", "moe"),
            *("--activation-offload", "--offload-modules", "attn_core"),
        ]
    )
    assert all(entry.is_on for name, entry in found.items() if name not in THREE)
    assert found["recompute"].reason.startswith("mlp, moe of each block")
    assert found["activation offload"].reason == "tensors of attn_core leave the device"
    assert "exchanges beside experts" not in said([])
