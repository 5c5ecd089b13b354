"""Folders as a run leaves them, written by hand, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_glue.config.loading import as_dict
from megatron_glue.training.checkpoint.files import MANIFEST_NAME, describe_files, step_folder, write_manifest
from megatron_glue.training.presets import MOE_DEFAULTS


def write_saved_step(root: Path, step: int, losses: list[float], **facts: Any) -> Path:
    """Write what a report reads of a checkpoint: facts and manifest, no tensor."""
    path = step_folder(root, step)
    path.mkdir(parents=True)
    content = {
        "version": "9.8.7",
        "torch": "2.99",
        "step": step,
        "layout": "2 ranks: dp 2",
        "counters": {"losses": losses, "grad_norms": [1.0] * len(losses), "num_tokens": 100 * len(losses)},
        "config": as_dict(MOE_DEFAULTS),
        "provenance": {"num_layers": "command line"},
    }
    (path / "meta.json").write_text(json.dumps(content | facts))
    write_manifest(path, describe_files([path / "meta.json"]))
    assert (path / MANIFEST_NAME).is_file()
    return path


def summary_of(losses: list[float], **more: Any) -> dict[str, Any]:
    """What a run of these losses writes at its end, without offload."""
    content = {
        "name": "pretrain_moe",
        "iterations": len(losses),
        "ranks": 2,
        "device": "cpu",
        "losses": losses,
        "grad_norms": [1.0] * len(losses),
        "heldout_loss": 2.5,
        "unigram_entropy": 3.0,
        "tokens_per_second": 500.0,
        "tokens": 100 * len(losses),
        "step_times_s": [0.2] * len(losses),
        "packing_efficiency": 0.99,
        "micro_batches": 4,
        "metadata_builds": 4,
        "metadata_reuses": 8,
        "metadata_built_ahead": 4,
        "cache": {},
        "host_reads": 0,
        "offloaded_bytes": 0,
        "expert_load": {"min": 0.0, "mean": 1.0, "max": 2.0},
        "expert_counts": [[10, 30, 0, 40], [20, 20, 20, 20]],
        "dropped_tokens": 0,
        "rerun_iterations": [],
        "skipped_updates": 0,
        "loss_spikes": 0,
        "peak_memory_bytes": 3 * 2**20,
        "failed_saves": 0,
        "checkpoint": None,
    }
    return content | more
