"""Versions of everything that computes, without importing it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_glue import __version__
from megatron_glue.config.loading import from_dict, resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.training.run_environment import (
    describe_software,
    driver_version,
    environment_record,
    git_revision,
    software,
    source_digest,
)
from megatron_glue.training.start_report import optimisations


def test_every_version_is_a_text() -> None:
    versions = software()
    assert versions["megatron_glue"] == __version__
    assert versions["torch"] == torch.__version__
    assert {"git revision", "source", "CUDA", "driver", "NCCL", "DeepSpeed", "Transformer Engine"} <= set(versions)
    assert all(isinstance(version, str) and version for version in versions.values())
    assert f"torch {torch.__version__}" in describe_software(versions)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC\n",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("something else", "unknown"),
        (None, "none"),
    ],
)
def test_the_drivers_version(tmp_path: Path, text: str | None, version: str) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_revision_of_a_checkout_and_of_no_other(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    assert git_revision(tmp_path) == "none"
    git("init", "-q")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    revision = git_revision(tmp_path)
    assert len(revision) == 12
    assert git_revision(tmp_path / "inside") == "none"
    (tmp_path / "inside/a.py").write_text("a = 2\n")
    assert git_revision(tmp_path) == f"{revision}+changes"


def test_the_digest_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = source_digest(tmp_path)
    (tmp_path / "a.txt").write_text("no source")
    assert source_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = source_digest(tmp_path)
    (tmp_path / "b.py").write_text("2")
    assert len({before, renamed, source_digest(tmp_path)}) == 3


def test_the_record_is_json_and_holds_the_configuration() -> None:
    resolved = resolve_config(["--num-layers", "3"], {"MEGATRON_GLUE_SEED": "5"}, RunConfig(), "pretrain.py")
    techniques = optimisations(resolved.config, resolved.provenance)
    record = json.loads(json.dumps(environment_record(resolved, techniques, {"ranks": 2})))
    assert record["ranks"] == 2
    assert record["software"] == dict(software())
    assert record["provenance"] == {"num_layers": "command line", "seed": "environment MEGATRON_GLUE_SEED"}
    assert from_dict(record["config"]) == resolved.config
    assert {"name", "on", "reason", "source"} == set(record["optimisations"][0])
