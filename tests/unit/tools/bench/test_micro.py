"""The operator benchmark: every way agrees with its oracle, and a wrong one is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.programs import load_program

SMALL = [
    *("--tokens", "48", "--documents", "5", "--hidden", "16", "--heads", "2", "--layers", "2", "--experts", "4"),
    *("--top-k", "2", "--vocab", "64", "--chunk-tokens", "20", "--matrices", "2", "--repeats", "2"),
]


def test_all_ways_agree_with_their_oracles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    micro = load_program("tools/bench/micro.py")
    monkeypatch.setattr(sys, "argv", ["micro.py", *SMALL, "--json", str(tmp_path / "micro.json")])
    assert micro.main() == 0
    rows = json.loads((tmp_path / "micro.json").read_text())["rows"]
    assert list(dict.fromkeys(row["operator"] for row in rows)) == list(micro.CASES)
    assert all(row["difference"] < 1e-5 and row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    exact = [row for row in rows if row["operator"] in ("grouping", "metadata")]
    assert all(row["difference"] == 0 for row in exact)


def test_a_wrong_way_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    micro = load_program("tools/bench/micro.py")
    wrong = micro.Case("", {"ours": lambda: [torch.tensor([1.0, 2.1])]}, [torch.tensor([1.0, 2.0])])
    monkeypatch.setitem(micro.CASES, "grouping", lambda sizes, device: wrong)
    monkeypatch.setattr(sys, "argv", ["micro.py", "--only", "grouping"])
    assert micro.main() == 1
    assert "FAILED grouping, ours: differs by 5.0e-02" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([torch.tensor([1.0, 4.0])], 0.0),
        ([torch.tensor([1.0, 3.0])], 0.25),
        ([torch.tensor([float("nan"), 4.0])], float("inf")),
        ([torch.tensor([1.0])], float("inf")),
    ],
)
def test_largest_difference(found: list[torch.Tensor], difference: float) -> None:
    largest_difference = load_program("tools/bench/micro.py").largest_difference
    assert largest_difference(found, [torch.tensor([1.0, 4.0])]) == difference


def test_sizes_that_contradict_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["micro.py", "--experts", "2", "--top-k", "3"])
    assert load_program("tools/bench/micro.py").main() == 2
    assert capsys.readouterr().err == "error: --top-k=3: is more than --experts=2; lower it\n"
