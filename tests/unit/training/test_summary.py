from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron_glue.training.summary import expert_load, peak_memory_bytes, print_summary, write_json

SUMMARY = {
    "name": "test",
    "iterations": 2,
    "ranks": 1,
    "losses": [5.5, 3.25],
    "heldout_loss": 2.5,
    "unigram_entropy": 3.2,
    "tokens_per_second": 1234.5,
    "packing_efficiency": 0.985,
    "micro_batches": 4,
    "metadata_builds": 4,
    "metadata_reuses": 28,
    "metadata_built_ahead": 3,
    "cache": {
        "attention_metadata": {"hits": 28, "misses": 4, "evictions": 0, "bytes": 0, "peak_bytes": 3 * 2**19},
        "rope_tables": {"hits": 3, "misses": 1, "evictions": 2, "bytes": 0, "peak_bytes": 2**20},
    },
    "host_reads": 0,
    "offloaded_bytes": 2**21,
    "reload_wait_ms": 1.5,
    "overlap_efficiency": 0.91,
    "expert_load": {"min": 0.5, "mean": 1.0, "max": 1.75},
    "dropped_tokens": 0,
    "skipped_updates": 0,
    "loss_spikes": 0,
    "rerun_iterations": [],
    "peak_memory_bytes": 2**30,
    "checkpoint": "runs/x",
    "failed_saves": 0,
}


def shown(summary: dict[str, object]) -> str:
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=160))
    return stream.getvalue()


def test_table_shows_what_users_compare() -> None:
    text = shown(SUMMARY)
    for part in ("5.5000 -> 3.2500", "2.5000 (3.2000)", "1,234", "98.50%", "1.0 builds", "28 reuses", "2.0 MiB"):
        assert part in text
    assert "attention metadata 28 / 4 / 0, 1.5 MiB, rope tables 3 / 1 / 2, 1.0 MiB" in text
    assert "overlap 91%" in text
    assert "0.50 / 1.00 / 1.75" in text
    assert "1,024.0 MiB" in text


def test_steps_that_were_run_again_are_counted() -> None:
    assert "run again" not in shown(SUMMARY)
    assert re.search(r"run again for rows without room\W+2\b", shown({**SUMMARY, "rerun_iterations": [3, 8]}))


def test_dense_model_without_offload() -> None:
    text = shown({**SUMMARY, "expert_load": None, "overlap_efficiency": None, "checkpoint": None})
    assert "expert load" not in text
    assert "not measured" in text
    without = shown({**SUMMARY, "offloaded_bytes": 0})
    assert "offloaded" not in without
    assert "reloads" not in without


def test_a_run_without_steps_is_no_crash() -> None:
    assert "no step was run" in shown({**SUMMARY, "losses": [], "micro_batches": 0, "metadata_builds": 0})


def test_expert_load_is_relative_to_an_even_share() -> None:
    assert expert_load([[1, 3], [2, 2]]) == {"min": 0.5, "mean": 1.0, "max": 1.5}
    assert expert_load([]) is None
    assert expert_load([[0, 0]]) is None


def test_json_is_written_aside(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "summary.json"
    write_json(target, {"a": 0.1})
    write_json(target, {"a": 0.2})
    assert json.loads(target.read_text()) == {"a": 0.2}
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 0.2}
    assert list(target.parent.iterdir()) == [target]


def test_a_device_is_written_into_and_a_link_is_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", {"a": 1})
    assert json.loads(os.read(reader, 1000)) == {"a": 1}
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json(tmp_path / "link", {"a": 2})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 2}


def test_peak_memory_is_in_bytes() -> None:
    assert peak_memory_bytes(torch.device("cpu")) > 50 * 2**20
