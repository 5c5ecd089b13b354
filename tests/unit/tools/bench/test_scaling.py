"""The benchmark of what a step's cost depends on: its arithmetic, its conditions, and a small run of each part."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import load_program

scaling = load_program("tools/bench/scaling.py")
SIZES = [
    *("--grouping-tokens", "64", "128", "--grouping-experts", "8", "16", "--repeats", "2", "--threads", "1"),
    *("--moe-layers", "4:2:32", "--layer-tokens", "64", "--hidden", "16", "--layers", "1"),
    *("--row-tokens", "64", "128", "--documents", "5", "20", "--rounds", "1", "--warmup", "0"),
]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["scaling.py", *words])
    return scaling.main()


def sweep_of(figure: float, limit: float | None) -> scaling.Sweep:
    return scaling.Sweep("cost", "tokens", ("ms",), (1, 2), ((1.0,), (2.0,)), {"growth": figure}, {"growth": limit})


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_the_exponent_is_that_of_a_power_law(exponent: float) -> None:
    sizes = [8, 32, 512, 4096]
    assert scaling.fitted_exponent(sizes, [3.5 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_a_figure_above_its_limit_is_named() -> None:
    assert sweep_of(1.1, 1.1).judge() == []
    assert sweep_of(9.0, None).judge() == []
    assert sweep_of(1.2, 1.1).judge() == ["FAILED cost: growth is 1.200, allowed 1.100"]
    assert len(sweep_of(float("nan"), 1.1).judge()) == 1


def test_grouping_and_layer_are_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, page, picture = tmp_path / "s.json", tmp_path / "s.md", tmp_path / "s.png"
    files = ["--json", str(json_path), "--markdown", str(page)]
    is_drawn = find_spec("matplotlib") is not None
    files += ["--png", str(picture)] if is_drawn else []
    assert run(monkeypatch, "--only", "grouping", "layer", *SIZES, *files) == 0
    over_tokens, over_experts, layer = json.loads(json_path.read_text())["sweeps"]
    assert over_tokens["values"] == [64, 128]
    assert over_experts["values"] == [8, 16]
    assert all(number > 0 for sweep in (over_tokens, over_experts) for row in sweep["rows"] for number in row)
    assert over_experts["figures"]["max / min over experts"] >= 1.0
    ((layer_ms, torch_ms, own_ms, *ratios),) = layer["rows"]
    assert min(layer_ms, torch_ms, own_ms) > 0
    assert layer["figures"] == {"4 experts top-2 ffn 32": ratios[0]}
    assert "| 4 experts top-2 ffn 32 |" in page.read_text()
    assert "exponent in tokens: " in capsys.readouterr().out
    assert not is_drawn or picture.read_bytes().startswith(b"\x89PNG")


def test_steps_run_in_processes_and_a_condition_that_fails_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "TURN_TOKENS", 128)
    assert run(monkeypatch, "--only", "step", *SIZES, "--step-at-most", "0.5") == 1
    out = capsys.readouterr().out
    assert "training step, 1 layers hidden 16, documents of 5-20" in out
    assert "FAILED training step" in out


def test_a_layers_products_are_its_own_alone() -> None:
    gemm = load_program("tools/bench/peer_workers/gemm.py")
    spec = scaling.BenchSpec(num_experts=4, top_k=2, ffn_hidden_size=8, hidden_size=16, num_layers=1, row_tokens=32)
    assert gemm.feed_forward_products(spec) == [(1, 64, 16, 4), (4, 32, 16, 16), (4, 32, 8, 16)]
    assert gemm.products(spec)[-3:] == gemm.feed_forward_products(spec)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rounds", "0"), "--rounds=0"),
        (("--row-tokens", "64"), "--row-tokens=[64]"),
        (("--grouping-experts", "0", "8"), "--grouping-experts=0"),
        (("--documents", "9", "3"), "--documents=[9, 3]"),
        (("--json", "."), "--json=."),
    ],
)
def test_wrong_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert run(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {named}")


@pytest.mark.parametrize("word", ["8:2", "8:9:64", "8:0:64", "a:b:c"])
def test_a_layer_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--moe-layers", word)
    assert repr(word) in capsys.readouterr().err
