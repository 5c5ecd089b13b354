"""The contention tool runs on two ranks and its figures belong to their variants."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "copy_contention.py"


def test_copies_and_all_reduces_are_measured_where_there_are_any(tmp_path):
    sizes = ["--layers", "3", "--tokens", "256", "--dim", "32", "--steps", "1", "--mb-per-s", "1"]
    command = [sys.executable, str(TOOL), *sizes, "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    alone = figures["all-reduce alone"]
    assert (alone["copy_ms"], alone["reload_wait_ms"]) == (0.0, 0.0)
    assert alone["all_reduce_ms"] > 0.0
    assert figures["copies alone"]["all_reduce_ms"] == 0.0
    for name in ("both", "both, one copy at a time", "both, bounded rate"):
        assert figures[name]["copy_ms"] > 0.0
        assert figures[name]["all_reduce_ms"] > 0.0
    # Two of three inputs come back, 32 KiB each, at 1 MiB/s at most.
    assert figures["both, bounded rate"]["copy_ms"] >= 2 * 1e3 / 32 * 0.99
    assert list(tmp_path.iterdir()) == []


def test_a_senseless_request_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["copy_contention.py", "--ranks", "0"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(TOOL))["main"]()
    assert caught.value.code == 2
    assert "--ranks: use at least 1" in capsys.readouterr().err


def test_waiting_for_a_late_rank_is_no_all_reduce_and_overlaps_count_once():
    busy_ms = runpy.run_path(str(TOOL))["busy_ms"]
    assert busy_ms([[[0.0, 5.0]], [[4.0, 5.0]]]) == pytest.approx(1e3)
    assert busy_ms([[[0.0, 2.0], [1.0, 4.0], [6.0, 7.0]]]) == pytest.approx(5e3)
    assert busy_ms([[], []]) == 0.0
