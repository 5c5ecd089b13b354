"""Five kills of a run on two ranks: it comes to its end as if nobody had killed it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run
from tools.kill_check import main

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are followed through /proc")


@linux_only
def test_f99_a_run_that_is_killed_five_times_loses_nothing(tmp_path: Path) -> None:
    command = ["tools/kill_check.py", "--kills", "5", "--folder", "kills", "--json", "k.json"]
    outcome = run(command, tmp_path)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    report = json.loads((tmp_path / "k.json").read_text())
    assert report["failures"] == []
    assert len(report["rounds"]) == 5
    assert sum(row["kills"] for row in report["summary"]) == 5
    assert report["course"]["steps"] > 5
    assert report["course"]["largest_difference_of_losses"] == 0.0
    assert report["course"]["largest_difference_of_grad_norms"] == 0.0
    again = run([*command, "--seed", "1"], tmp_path)
    assert again.code == 2
    assert "--folder" in again.error_lines[0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--kills", "0"), "--kills"),
        (("--layout", "ep two"), "--layout"),
        (("--model", "none"), "--model"),
        (("--end-timeout-s", "-1"), "--end-timeout-s"),
    ],
)
def test_wrong_use_is_one_line(
    flags: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/kill_check.py", *flags])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/kill_check.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "python tools/kill_check.py --kills 20" in capsys.readouterr().out
