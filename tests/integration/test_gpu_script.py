"""tools/bench/gpu.sh: what it says without a GPU, that its commands are right, and that no section stops another."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_glue.config.loading import resolve_config
from megatron_glue.config.validation import validate
from megatron_glue.training.presets import MOE_DEFAULTS
from tests.support.commands import ROOT, environment
from tests.support.programs import load_program

SECTIONS = ["tests", "sync_audit", "ablation_glue_bound", "ablation_fine_tuning", "timeline", "operators"]

FAKE_PYTHON = """#!/usr/bin/env bash
# Stands in for python on a machine with a GPU: the ablations fail, the others succeed and leave no figures.
case "$*" in
    *--probe*) echo '{"name": "a GPU", "date": "2026-11-30", "compute_capability": "9.0", "memory_gib": 80.0,
        "torch": "2", "cuda": "13", "python": "3.11"}' >"${!#}/device.json" ;;
    *gpu_report.py*) exec "$REAL_PYTHON" "$@" ;;
    *ablate.py*) echo 'it broke' >&2; exit 7 ;;
esac
"""


def gpu_script(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tools/bench/gpu.sh"), *words]
    extra = {"PYTHON": sys.executable} | extra
    return subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    """The words of each section's command, the interpreter left out."""
    outcome = gpu_script("--print-commands", "out folder", PYTHON="python")
    assert outcome.returncode == 0, outcome.stderr
    assert not Path("/out folder").exists()
    lines = [shlex.split(line) for line in outcome.stdout.splitlines()]
    assert all(words[0] == "python" for words in lines)
    return {section: words[1:] for section, words in zip(SECTIONS, lines, strict=True)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_runs_nothing(tmp_path: Path) -> None:
    outcome = gpu_script(str(tmp_path / "out"))
    assert outcome.returncode == 2
    assert outcome.stderr.count("\n") == 1
    assert outcome.stderr.startswith("error: --device=cuda: torch ")
    assert "sees no GPU here" in outcome.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the output folder is missing"),
        (["--minutes", "x", "a"], "--minutes needs a number"),
        (["--minutes"], "--minutes needs a number"),
        (["--fast", "a"], "--fast is unknown"),
        (["a", "b"], "more than one output folder"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], message: str) -> None:
    outcome = gpu_script(*words)
    assert outcome.returncode == 2
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr


def test_help_names_every_section() -> None:
    outcome = gpu_script("--help")
    assert outcome.returncode == 0
    assert all(f"\n    {section} " in outcome.stdout for section in SECTIONS)


def test_the_commands_of_training_tools_are_configurations(commands: dict[str, list[str]], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for section, tool in (
        ("ablation_glue_bound", "ablate"),
        ("ablation_fine_tuning", "ablate"),
        ("timeline", "timeline"),
    ):
        program = load_program(f"tools/{tool}.py")
        monkeypatch.setattr(sys, "argv", commands[section])
        _, rest = program.parse_arguments()
        config = resolve_config(rest, {}, program.DEFAULTS if tool == "timeline" else MOE_DEFAULTS, section).config
        assert (config.training.device, config.training.precision) == ("cuda", "bf16")
        validate(config, 1, "cuda")


def test_the_other_commands_are_understood(commands: dict[str, list[str]], monkeypatch) -> None:
    assert commands["tests"][:4] == ["-m", "pytest", "-m", "gpu and not multi_gpu"]
    monkeypatch.setattr(sys, "argv", commands["sync_audit"])
    assert load_program("tools/sync_audit.py").parse_arguments()[1] == ["--device", "cuda"]
    monkeypatch.setattr(sys, "argv", commands["operators"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    micro = load_program("tools/bench/micro.py")
    monkeypatch.setattr(micro, "check_writable_file", lambda *_: None)
    assert micro.parse_arguments().device == "cuda"


def test_a_section_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    out = tmp_path / "out"
    outcome = gpu_script(str(out), PYTHON=str(fake), REAL_PYTHON=sys.executable)
    assert outcome.returncode == 1, outcome.stderr
    rows = [line.split("\t") for line in (out / "sections.tsv").read_text().splitlines()]
    assert [row[0] for row in rows] == SECTIONS
    assert [row[1] for row in rows] == ["ok", "ok", "exit code 7", "exit code 7", "ok", "ok"]
    assert (out / "ablation_glue_bound.err").read_text() == "it broke\n"
    report = (out / "gpu.md").read_text()
    assert report.startswith("# a GPU, 2026-11-30\n")
    assert "| ablation_glue_bound | exit code 7 |" in report
    assert json.loads((out / "device.json").read_text())["name"] == "a GPU"
