"""The resume tool passes this code, and fails where the run after the stop is another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Outcome, run
from tools.resume_check import main

LAYOUTS = """
base: >-
  --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --global-batch-size 2 --heldout-fraction 0.2
  --lr 0.01 --min-lr 0.001 --lr-warmup-iters 1 --adam-eps 1e-5 --hidden-dropout 0.1
models: {moe: --num-experts 4 --moe-ffn-hidden-size 8 --moe-router-enable-expert-bias}
layouts:
  - {name: one, world_size: 1}
  - {name: two, world_size: 2, flags: --expert-model-parallel-size 2}
  - {name: another rate, world_size: 1, flags: --lr 0.02}
"""


def check(tmp_path: Path, *flags: str) -> tuple[Outcome, list[dict[str, Any]]]:
    (tmp_path / "layouts.yaml").write_text(LAYOUTS)
    command = ["tools/resume_check.py", "--layouts", "layouts.yaml", "--steps", "3", "--json", "r.json", *flags]
    outcome = run(command, tmp_path)
    return outcome, json.loads((tmp_path / "r.json").read_text())["cases"]


def test_f94_f98_stopped_runs_go_on_bit_for_bit(tmp_path: Path) -> None:
    outcome, cases = check(tmp_path, "--layout", "one")
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert [case["course"] for case in cases[:3]] == [
        "one: stop at 3, an epoch's end",
        "one: stops at 2 and 4",
        "one: back to 3",
    ]
    assert [case["saves"] for case in cases] == ["sync"] * 3 + ["async"] * 3
    for case in cases:
        assert case["status"] == "ok"
        assert case["must_be_bit_equal"]
        assert all(worst["largest"] == 0.0 for worst in case["differences"].values())


def test_a_change_of_layout_goes_on_to_rounding(tmp_path: Path) -> None:
    outcome, (case,) = check(tmp_path, "--before", "one", "--after", "two", "--saves", "async")
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert not case["must_be_bit_equal"]
    kinds = {"losses", "grad_norms", "weights", "exp_avg", "exp_avg_sq", "counters"}
    assert case["differences"].keys() == kinds
    assert 0.0 < case["differences"]["exp_avg_sq"]["largest"] < 1e-5


def test_another_run_after_the_stop_is_found_out(tmp_path: Path) -> None:
    outcome, (case,) = check(tmp_path, "--before", "one", "--after", "another rate", "--saves", "sync")
    assert outcome.code == 1
    assert case["status"] == "failed"
    assert "weights differ" in str(case["failures"])
    assert "1 failed" in outcome.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--layout", "ep 3"), "did you mean 'ep 2'?"),
        (("--before", "ep 2"), "--after"),
        (("--steps", "2"), "--steps"),
        (("--model", "none"), "--model"),
        (("--data-path", "x"), "--data-path"),
        (("--layouts", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_wrong_use_is_one_line(
    flags: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/resume_check.py", *flags])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/resume_check.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "python tools/resume_check.py --layout" in capsys.readouterr().out
