"""What a start says and keeps; ranks that were started differently; everything off by one switch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import succeed, summary
from tests.support.job import SMALL_FLAGS, run_job

ALL_ON = ["--use-packed-cache", "--double-buffer-ckpt", "--moe-grouping", "one-pass"]
BASE = ["--moe-grouping", "loop"]
THREE = ("packed-metadata cache", "double-buffered reload", "one-pass MoE grouping")
SHORT = ["--num-layers", "2", "--train-iters", "2", "--save", "run"]


def start(folder: Path, *flags: str, **environ: Any) -> tuple[str, dict, dict]:
    """Train two steps; return what was said, ``env.json`` and the summary."""
    folder.mkdir()
    write_corpus(folder / "corpus.jsonl")
    outcome = succeed(["pretrain_moe.py", *SMALL_FLAGS, *SHORT, *flags], folder, **environ)
    return outcome.stdout, json.loads((folder / "run/env.json").read_text()), summary(folder / "summary.json")


def test_the_log_and_env_json_say_the_same(tmp_path: Path) -> None:
    said, record, _ = start(tmp_path / "on", *ALL_ON)
    for entry in record["optimisations"]:
        state = "on" if entry["on"] else "off"
        assert f"optimisation {entry['name']}: {state}, {entry['reason']} ({entry['source']})" in said
    assert f"torch {record['software']['torch']}" in said
    assert record["backends"]["attention"]["name"] in said
    assert record["provenance"]["enable_metadata_cache"] == "command line"
    assert record["ranks"] == 1
    assert record["resumed_from"] is None
    assert not list((tmp_path / "on/run").glob(".*.tmp")), "written aside and renamed"


@pytest.mark.parametrize("switch", ["variable", "flag"])
def test_one_switch_is_a_run_without_any_optimisation(switch: str, tmp_path: Path) -> None:
    _, record, off = start(
        tmp_path / "off",
        *ALL_ON,
        *(["--no-accelerator"] if switch == "flag" else []),
        **({"MEGATRON_GLUE_DISABLE": "1"} if switch == "variable" else {}),
    )
    _, _, plain = start(tmp_path / "plain", *BASE)
    states = {entry["name"]: entry for entry in record["optimisations"]}
    sources = {"variable": "environment MEGATRON_GLUE_DISABLE", "flag": "command line --no-accelerator"}
    for name in THREE:
        assert not states[name]["on"]
        assert states[name]["source"] == sources[switch]
    # The same work, count by count and bit by bit.
    for key in ("losses", "grad_norms", "metadata_builds", "metadata_reuses", "host_reads", "offloaded_bytes"):
        assert off[key] == plain[key], key
    assert off["metadata_reuses"] == off["reloads"] == 0


def _other_layers(rank: int) -> None:
    if rank == 1:
        os.environ["MEGATRON_GLUE_NUM_LAYERS"] = "3"


def _other_version(rank: int) -> None:
    if rank == 1:
        from megatron_glue.training import app

        versions = {**app.software(), "torch": "2.0.0"}
        app.software = lambda: versions  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("trap", "difference"),
    [
        (_other_layers, "--num-layers 3 instead of 4"),
        (_other_version, "torch 2.0.0 instead of 2."),
    ],
    ids=["setting", "version"],
)
def test_ranks_that_were_started_differently_all_refuse(trap, difference: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    for end in run_job([*SMALL_FLAGS, "--train-iters", "1", "--save", "run"], tmp_path, 2, trap):
        assert end.code == 1
        (line,) = end.error_lines
        assert "rank 1 on " in line
        assert difference in line
        assert "Traceback" not in end.err
    assert not (tmp_path / "run").exists()
