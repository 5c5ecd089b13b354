"""The ablation runs, agrees with itself on an honest model, and fails on a doctored one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_glue.proofs.ablation import Measurement, Variant, check
from tests.support.cases import write_corpus
from tests.support.commands import succeed
from tests.support.programs import load_program

TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--heldout-fraction", "0.2", "--device", "cpu"),
]


def test_ablation_agrees_and_counts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    command = [
        "tools/ablate.py",
        *TINY,
        "--data-path",
        str(corpus),
        "--steps",
        "3",
        "--warmup",
        "1",
        "--json",
        "a.json",
        *("--report", "report", "--layer-sweep", "1", "--gpu-hour-price", "2"),
    ]
    outcome = succeed(command, tmp_path)
    assert "losses and gradient norms agree" in outcome.stdout
    rows = {row["variant"]: row for row in json.loads((tmp_path / "a.json").read_text())["variants"]}
    num_batches = 4 * 4
    assert rows["none"]["metadata_builds"] == num_batches * 2 * 2, "every layer, and again in its recompute"
    assert rows["packed cache"]["metadata_builds"] == num_batches
    assert rows["all three"]["host_reads"] == 0
    for name in ("packed cache", "double buffer"):
        assert rows[name]["losses"] == rows["none"]["losses"], "bit for bit"
        assert rows[name]["grad_norms"] == rows["none"]["grad_norms"]
        assert rows[name]["heldout"] == rows["none"]["heldout"]
    assert [rounds for rounds, _ in rows["none"]["heldout"]] == [1, 2, 3, 4]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / row["median_step_ms"] * 1e3)
        assert row["utilisation"] > 0
    text = (tmp_path / "report/report.md").read_text()
    assert "cost per 1M tokens" in text
    assert "| 1 | 1.00x |" in text, "the sweep's row"
    assert (tmp_path / "report/report.png").read_bytes().startswith(b"\x89PNG")


def ablate_here(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the tool inside this process, which spares the start."""
    monkeypatch.setattr(sys, "argv", ["tools/ablate.py", *TINY, *words])
    return load_program("tools/ablate.py").main()


def test_the_gate_passes_the_same_run_and_fails_on_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, base = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "base.json"
    words = ["--data-path", str(corpus), "--steps", "2", "--warmup", "1"]
    assert ablate_here([*words, "--save-baseline", str(base)], monkeypatch) == 0
    baseline = json.loads(base.read_text())
    assert set(baseline["outputs"]) == {f"layer {n}, {when} training" for n in (0, 1) for when in ("before", "after")}
    # Another way to the same numbers, on a machine whose speed says nothing.
    gate = [*words, "--gate", str(base), "--gate-throughput", "1", "--gate-memory", "9", "--moe-grouping", "loop"]
    assert ablate_here(gate, monkeypatch) == 0, capsys.readouterr().out
    baseline["losses"][2] *= 1.001
    baseline["outputs"]["layer 1, before training"][5] += 0.1
    base.write_text(json.dumps(baseline))
    capsys.readouterr()
    assert ablate_here(gate, monkeypatch) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 2, failed
    assert "training loss, step 3" in failed[0]
    assert "layer 1, before training" in failed[1]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--steps", "0"], "--steps=0: too few rounds; use at least 1"),
        (["--layer-sweep", "2,x"], "--layer-sweep=2,x: is no list of numbers; give layers like 2,4,8"),
        (["--gate-loss", "-1"], "--gate-loss=-1.0: is not a number from 0 on; give 0 or more"),
    ],
)
def test_wrong_use_is_one_line(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate_here(flags, monkeypatch) == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


class Doctored:
    """A measurement whose numbers a test chooses."""

    def __init__(self, loss: float = 1.0, norm: float = 1.0, builds: int = 4, reads: int = 0, **switches: bool) -> None:
        session = SimpleNamespace(
            metrics=SimpleNamespace(losses=[2.0, loss], grad_norms=[2.0, norm]),
            built=SimpleNamespace(
                metadata_cache=SimpleNamespace(builds=builds), precision=SimpleNamespace(is_mixed=False)
            ),
            config=SimpleNamespace(
                model=SimpleNamespace(window_of_layer=lambda layer: 0, num_layers=3),
                recompute=True,
                num_recomputed_blocks=None,
            ),
            mesh=SimpleNamespace(ep_size=1),
            device=SimpleNamespace(type="cpu"),
            num_micro_batches=4,
            num_step_host_reads=reads,
        )
        self.check = check
        self.measurement = Measurement(Variant("doctored", **switches), session)


@pytest.mark.parametrize(
    ("doctored", "complaint"),
    [
        ({"loss": 1.0 + 1e-12, "cache": True}, "losses differ"),
        ({"norm": 1.0 + 1e-12, "cache": True}, "gradient norms differ"),
        ({"loss": 1.0 + 2e-6, "cache": True, "one_pass": True}, "losses differ"),
        ({"norm": 1.0 + 2e-5, "cache": True, "one_pass": True}, "gradient norms differ"),
        ({"loss": float("nan"), "cache": True}, "losses differ"),
        ({"builds": 5, "cache": True}, "5 metadata builds, expected 4 to 4"),
        ({"builds": 12}, "12 metadata builds, expected 24 to 24"),
        ({"reads": 1, "cache": True, "one_pass": True}, "1 device-to-host reads"),
    ],
)
def test_the_check_fails_on_what_is_wrong(doctored: dict[str, object], complaint: str) -> None:
    baseline = Doctored(builds=24)
    complaints = baseline.check([baseline.measurement, Doctored(**doctored).measurement])
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_the_check_passes_what_is_right() -> None:
    baseline = Doctored(builds=24)
    good = [Doctored(cache=True), Doctored(loss=1.0 + 5e-7, norm=1.0 + 5e-6, cache=True, one_pass=True)]
    assert baseline.check([baseline.measurement, *(each.measurement for each in good)]) == []
