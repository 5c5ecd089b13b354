"""The parity tool passes layouts that are right, fails one that is not, and goes on after one that hangs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_glue.config.loading import resolve_config
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.validation import validate
from megatron_glue.proofs.layouts import read_layouts
from tests.support.commands import Outcome, run
from tools.parity import DEFAULT_LAYOUTS, SWITCH_FLAGS, main

BASE = """
base: >-
  --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --global-batch-size 2 --heldout-fraction 0.2
  --lr 0.01 --min-lr 0.001 --lr-warmup-iters 1 --train-iters 4 --adam-eps 1e-6 --num-experts 4 --moe-ffn-hidden-size 8
"""


def parity(tmp_path: Path, layouts: str, *flags: str) -> Outcome:
    (tmp_path / "layouts.yaml").write_text(BASE + layouts)
    return run(["tools/parity.py", "--layouts", "layouts.yaml", "--json", "parity.json", *flags], tmp_path)


def test_right_layouts_pass_and_a_wrong_one_fails(tmp_path: Path) -> None:
    outcome = parity(
        tmp_path,
        """
layouts:
  - {name: one process, world_size: 1}
  - {name: experts on two ranks, world_size: 2, flags: --expert-model-parallel-size 2, optimisations: on}
  - {name: another seed, world_size: 1, flags: --seed 5, optimisations: off}
  - {name: refused, world_size: 2, flags: --expert-model-parallel-size 3, optimisations: off}
  - {name: elsewhere, world_size: 2, requires: no_such_module, optimisations: off}
""",
    )
    assert outcome.code == 1, outcome.stderr
    report = json.loads((tmp_path / "parity.json").read_text())
    rows = {(row["layout"], row["optimisations"]): row for row in report["rows"]}
    assert {key: row["status"] for key, row in rows.items()} == {
        ("one process", "off"): "ok",
        ("one process", "on"): "ok",
        ("experts on two ranks", "on"): "ok",
        ("another seed", "off"): "failed",
        ("refused", "off"): "failed",
        ("elsewhere", "off"): "skipped",
    }
    assert report["counts"] == {"ok": 3, "failed": 2, "skipped": 1}
    assert rows["one process", "off"]["largest_difference"] == 0.0
    assert 0.0 <= rows["experts on two ranks", "on"]["largest_difference"] <= report["tolerance"] == 1e-5
    assert rows["another seed", "off"]["largest_difference"] > 1e-2
    assert any("gradient of" in line for line in rows["another seed", "off"]["failures"])
    assert "--expert-model-parallel-size=3" in rows["refused", "off"]["failures"][0]
    assert "no_such_module is not installed" in outcome.stdout
    assert "3 ok, 2 failed, 1 skipped" in outcome.stdout


def test_a_row_that_hangs_is_ended_and_the_rest_go_on(tmp_path: Path) -> None:
    layouts = "layouts: [{name: a, world_size: 2}, {name: b, world_size: 1}]"
    outcome = parity(tmp_path, layouts, "--timeout-s", "0.01", "--optimisations", "off")
    assert outcome.code == 1
    rows = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert all("no answer within" in row["failures"][0] for row in rows)


def main_in_process(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tools/parity.py", *flags])
    return main()


@pytest.mark.parametrize(
    ("layouts", "flags", "named"),
    [
        ("layouts: [", (), "layouts.yaml"),
        ("layouts: [{name: a, world_size: many}]", (), "layouts[0].world_size"),
        ("layouts: [{name: a, world_size: 1}]", ("--hidden-size", "15"), "--num-attention-heads"),
        ("layouts: [{name: a, world_size: 1}]", ("--only", "z"), "--only"),
        ("layouts: [{name: a, world_size: 1}]", ("--timeout-s", "0"), "--timeout-s"),
    ],
)
def test_wrong_use_is_one_line(
    layouts: str,
    flags: tuple[str, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "layouts.yaml").write_text(BASE + layouts)
    result = tmp_path / "parity.json"
    command = ["--layouts", str(tmp_path / "layouts.yaml"), "--json", str(result), *flags]
    assert main_in_process(monkeypatch, *command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not result.exists()


def test_every_row_of_the_list_can_run(tmp_path: Path) -> None:
    """A row that validation refuses would be found out only by the run of the whole list."""
    layouts = read_layouts(DEFAULT_LAYOUTS)
    for layout in layouts.layouts:
        for model in layout.models:
            for switches in SWITCH_FLAGS if layout.optimisations == "both" else (layout.optimisations,):
                words = [*layouts.flags_of(model), *SWITCH_FLAGS[switches], *layout.flags]
                words += ["--data-path", str(tmp_path), "--device", "cpu", "--precision", "fp32"]
                validate(resolve_config(words, {}, RunConfig(), layout.name).config, layout.world_size)


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main_in_process(monkeypatch, "--help")
    assert "python tools/parity.py --quick" in capsys.readouterr().out


def test_the_list_of_layouts_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_in_process(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 24
    assert "tp 2 sp: 2 ranks, --tensor-model-parallel-size 2 --sequence-parallel" in lines
