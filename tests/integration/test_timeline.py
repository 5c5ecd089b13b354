"""The timeline tool trains, draws, and writes a trace in which copies of two buffers run under compute."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "timeline.py"
SMALL = [
    *("--num-layers", "6", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "256"),
    *("--global-batch-size", "1", "--heldout-fraction", "0.2", "--device", "cpu", "--progress", "none"),
]


def bars(trace: dict, process: str, name: str) -> list[tuple[int, int, float, float]]:
    """(step, block, begin, end) of all bars of one kind, in order of steps and blocks."""
    (pid,) = [
        event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name" and event["args"]["name"] == process
    ]
    return sorted(
        (event["args"]["step"], event["args"]["block"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == pid and event["name"].startswith(name)
    )


def test_copies_run_ahead_of_their_blocks_with_two_buffers_only(tmp_path):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    picture = ["--output", str(tmp_path / "timeline.png")] if has_matplotlib else []
    command = [sys.executable, str(TOOL), *SMALL, "--steps", "1", "--warmup", "0", *picture]
    command += ["--json", str(tmp_path / "figures.json")]
    done = subprocess.run([*command, "--trace", str(tmp_path / "t.json")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "two buffers: " in done.stdout
    assert "the same losses bit for bit" in done.stdout
    assert figures["same_losses"]
    assert "two reload buffers" in figures["two buffers"]["chosen"]
    assert "MiB/s each way" in figures["two buffers"]["chosen"]
    trace = json.loads((tmp_path / "t.json").read_text())
    for process, ahead in (("one buffer", False), ("two buffers", True)):
        copies, blocks = bars(trace, process, "reload"), bars(trace, process, "backward")
        assert len(blocks) == len(bars(trace, process, "forward")) == 6
        assert [block for _, block, _, _ in copies] == [0, 1, 2, 3, 4], "the last block's input stays"
        # Backward walks down: the copy for block i begins before block i + 1 has ended, or after.
        assert any(copies[i][2] < blocks[i + 1][3] for i in range(5)) == ahead
    assert not picture or (tmp_path / "timeline.png").stat().st_size > 10_000


def test_a_senseless_request_is_one_line_and_help_shows_examples(monkeypatch, capsys):
    timeline = runpy.run_path(str(TOOL))
    for flag, value in (("--steps", "0"), ("--copy-share", "-1")):
        monkeypatch.setattr(sys, "argv", ["timeline.py", f"{flag}={value}"])
        assert timeline["main"]() == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {flag}=")
        assert error.count("\n") == 1
    for words, expected in (([], None), (["--json"], "-"), (["--json", "f.json"], "f.json")):
        monkeypatch.setattr(sys, "argv", ["timeline.py", *words, "--steps", "1"])
        assert timeline["parse_arguments"]()[0].json == expected
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        timeline["main"]()
    assert caught.value.code == 0
    assert "python tools/timeline.py --copy-share 0.3 --at-least 0.9" in capsys.readouterr().out
