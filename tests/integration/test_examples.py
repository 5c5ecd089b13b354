"""Every preset trains: two iterations from the command line that its header shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ROOT, succeed, summary

PRESETS = sorted((ROOT / "examples").glob("*.yaml"))


def test_there_are_presets() -> None:
    assert PRESETS


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_trains(preset: Path, tmp_path: Path) -> None:
    command = ["pretrain_moe.py", "--config", str(preset), "--train-iters", "2", "--eval-iters", "1"]
    succeed([*command, "--sample-tokens", "0", "--device", "cpu", "--summary-path", "s.json"], tmp_path)
    result = summary(tmp_path / "s.json")
    assert len(result["losses"]) == 2
    assert result["metadata_builds"] == result["micro_batches"]
    assert result["host_reads"] == 0
