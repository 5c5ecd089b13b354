"""The audit tool passes the project's models, and names the line of a read that somebody put into a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_glue.layers.mlp import FeedForward
from megatron_glue.ops.swiglu import _SwiGLU
from megatron_glue.training.optimizer import GuardedAdamW
from megatron_glue.types import ForwardContext
from tools.sync_audit import main, spans

THIS_FILE = "tests/integration/test_sync_audit.py"


def audit(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    target = folder / "reads.json"
    monkeypatch.setattr(sys, "argv", ["tools/sync_audit.py", "--json", str(target), *flags])
    code = main()
    return code, json.loads(target.read_text()) if target.exists() else {}


def planted(report: dict[str, Any]) -> list[dict[str, Any]]:
    (rank,) = report["models"][0]["ranks"]
    return [read for read in rank["reads"] if read["file"] == THIS_FILE]


def test_the_small_models_are_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu")
    assert code == 0, report["overruns"]
    assert [model["model"] for model in report["models"]] == ["moe", "dense"]
    for model in report["models"]:
        (rank,) = model["ranks"]
        assert rank["num_micro_batches"] == 4
        announced = sum(read["count"] for read in rank["reads"] if read["announced"])
        assert announced == rank["num_announced"]
        assert {read["function"] for read in rank["reads"] if read["announced"]} == {"RunMetrics.flush"}
    shown = capsys.readouterr().out
    assert "grouping in NumPy" in shown
    assert shown.endswith("within the budget\n")


def test_without_the_cache_the_reads_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--device", "cpu", "--model", "dense", "--no-accelerator")
    code, report = audit(monkeypatch, tmp_path, *flags)
    assert code == 1
    assert len(report["overruns"]) == 2, "one line per layer"
    assert all("megatron_glue/layers/packed_metadata.py" in line for line in report["overruns"])
    assert all("nonzero x4 (forward)" in line and "tolist x4 (forward)" in line for line in report["overruns"])
    assert capsys.readouterr().out.endswith("above the budget\n")


def test_a_planted_read_in_a_layer_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = FeedForward.forward

    def reading(layer: FeedForward, x_TD: Tensor, context: ForwardContext) -> Tensor:
        assert x_TD.abs().max().item() >= 0.0  # the planted read
        return forward(layer, x_TD, context)

    monkeypatch.setattr(FeedForward, "forward", reading)
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", "--model", "dense")
    assert code == 1
    reads = planted(report)
    assert {(read["layer"], read["phase"]) for read in reads} == {
        (layer, phase) for layer in (0, 1) for phase in ("forward", "recompute")
    }
    assert all(read["source"].endswith("# the planted read") and not read["announced"] for read in reads)
    assert all(read["module"] == f"blocks.{read['layer']}.ffn" and read["count"] == 4 for read in reads)
    shown = capsys.readouterr().out
    assert f"{THIS_FILE}:{reads[0]['line']} item x4 (forward)" in shown.replace("\n", "")
    assert "FAILED dense, rank 0: layer 0" in shown


def test_a_planted_read_in_backward_belongs_to_its_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backward = _SwiGLU.backward

    def reading(ctx: Any, *grads: Tensor) -> Any:
        grads[0].tolist()
        return backward(ctx, *grads)

    monkeypatch.setattr(_SwiGLU, "backward", staticmethod(reading))
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", "--model", "dense")
    assert code == 1
    assert {(read["layer"], read["phase"], read["kind"]) for read in planted(report)} == {
        (0, "backward", "tolist"),
        (1, "backward", "tolist"),
    }


def test_a_planted_read_in_the_update_is_outside_of_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = GuardedAdamW.step

    def reading(optimizer: GuardedAdamW, learning_rate: float, grad_norm: Tensor, *others: Any) -> None:
        if grad_norm.isfinite():
            step(optimizer, learning_rate, grad_norm, *others)

    monkeypatch.setattr(GuardedAdamW, "step", reading)
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", "--model", "dense")
    assert code == 1
    (read,) = planted(report)
    assert (read["layer"], read["kind"], read["count"]) == (-1, "item", 1)
    assert report["overruns"][0].startswith("dense, rank 0: outside of layers: 1 host reads, 0 allowed")


def test_ranks_are_started_for_a_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = audit(
        monkeypatch, tmp_path, "--device", "cpu", "--model", "moe", "--expert-model-parallel-size", "2"
    )
    assert code == 0
    (model,) = report["models"]
    assert [rank["rank"] for rank in model["ranks"]] == [0, 1]
    assert all(rank["has_exchange"] for rank in model["ranks"])


def test_exchanges_of_a_fixed_size_read_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--expert-model-parallel-size", "2", "--moe-static-capacity-factor", "2")
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", "--model", "moe", *flags)
    assert code == 0
    (model,) = report["models"]
    reads = [read for rank in model["ranks"] for read in rank["reads"]]
    assert reads
    assert not [read for read in reads if "dispatcher" in read["file"]]


def test_flags_that_make_both_models_alike_leave_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", "--num-experts", "0")
    assert code == 0
    assert [model["model"] for model in report["models"]] == ["dense"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("--config", "none.yaml"), "none.yaml"),
        (("--budget", "none.yaml"), "--budget=none.yaml"),
        (("--expert-model-parallel-size", "3"), "--expert-model-parallel-size=3"),
        (("--ranks", "0"), "--ranks=0"),
    ],
)
def test_wrong_use_is_one_line(
    flags: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, report = audit(monkeypatch, tmp_path, "--device", "cpu", *flags)
    assert (code, report) == (2, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_layers_are_shown_as_spans() -> None:
    assert spans({-1, 0, 1, 2, 5, 7, 8}) == "-, 0-2, 5, 7-8"
    assert spans({0}) == "0"
