"""tools/preflight.py as typed: alone and under torchrun, fit and not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.commands import run

TOOL = ["tools/preflight.py", "--device", "cpu", "--file-mb", "1", "--message-mb", "1", "--min-shm-mb", "0"]


def test_two_ranks_are_judged_and_reported_once(tmp_path: Path) -> None:
    flags = ["--save", "run", "--json", "fit.json", "--double-buffer-ckpt", "--max-clock-skew-ms", "60000"]
    outcome = run([*TOOL, *flags, "--checkpoint-seconds", "1000000"], tmp_path, num_processes=2)
    assert outcome.code == 0, outcome.stderr
    record = json.loads((tmp_path / "fit.json").read_text())
    assert record["ok"] is True
    assert record["ranks"] == 2
    found = {check["name"]: check for check in record["checks"]}
    assert "MiB/s" in found["all-reduce"]["found"]
    assert "MiB/s" in found["offload read"]["found"]
    assert outcome.stdout.count("Preflight") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["fit.json"]


def test_what_is_missing_is_one_line_each_and_exit_code_1(tmp_path: Path) -> None:
    outcome = run([*TOOL, "--min-free-mb", "1e12", "--min-checkpoint-mb-per-s", "1e9"], tmp_path)
    assert outcome.code == 1
    assert "FAILED" in outcome.stdout
    assert [line.split(": ")[1] for line in outcome.error_lines] == [
        "checkpoint write",
        "checkpoint read",
        "free space",
    ]
    assert "Traceback" not in outcome.stderr


def test_wrong_flags_are_usage_errors(tmp_path: Path) -> None:
    for flags, part in ((["--file-mb", "0"], "--file-mb=0"), (["--num-layer", "3"], "--num-layers")):
        outcome = run([*TOOL, *flags], tmp_path)
        assert outcome.code == 2
        assert part in outcome.error_lines[0]
