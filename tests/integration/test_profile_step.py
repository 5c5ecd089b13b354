"""The step profiler runs on a small model, before and after, and says what it found in all its forms."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from megatron_glue.config.errors import ConfigError
from tests.support.cases import write_corpus
from tests.support.programs import load_program

TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--heldout-fraction", "0.2", "--device", "cpu"),
]
ALL_ON = "--use-packed-cache --double-buffer-ckpt --moe-grouping one-pass"


def test_a_step_is_profiled_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = ["--moe-grouping", "loop", "--activation-offload", "--data-path", str(corpus)]
    command = ["tools/profile_step.py", *TINY, *flags, "--steps", "1", "--warmup", "1", "--out", str(tmp_path / "p")]
    monkeypatch.setattr(sys, "argv", [*command, f"--against={ALL_ON}"])
    assert load_program("tools/profile_step.py").main() == 0
    before = json.loads((tmp_path / "p/profile.json").read_text())
    after = json.loads((tmp_path / "p/after/profile.json").read_text())
    for result in (before, after):
        assert abs(sum(result["profile"]["shares"].values()) - 1.0) < 1e-6
        assert all(each["gain_ms"] is not None for each in result["expectations"])
    assert (before["host_reads_per_step"] > 0, after["host_reads_per_step"]) == (True, 0)
    assert [each["is_on"] for each in before["expectations"]] == [False, False, False]
    assert [each["is_on"] for each in after["expectations"]] == [True, True, True]
    assert {"attention", "moe", "experts"} <= set(before["phases_ms"])
    trace = json.loads(gzip.decompress((tmp_path / "p/trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"step", "attention", "optimizer"} <= names
    assert "## What each switch does" in (tmp_path / "p/profile.md").read_text()
    assert "| step, ms |" in (tmp_path / "p/comparison.md").read_text()
    for picture in ("p/profile.png", "p/after/profile.png", "p/comparison.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ConfigError, match="is no result of this tool"):
        load_program("tools/profile_step.py").read_result(str(other))
