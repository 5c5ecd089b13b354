"""The ablation runs, agrees with itself on an honest model, and fails on a doctored one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import run, succeed
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


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    outcome = run(["tools/ablate.py", *TINY, "--steps", "0"], tmp_path)
    assert outcome.code == 2
    assert outcome.error_lines == ["error: --steps=0: too few rounds; use at least 1"]


class Doctored:
    """A measurement whose numbers a test chooses."""

    def __init__(self, loss: float = 1.0, norm: float = 1.0, builds: int = 4, reads: int = 0, **switches: bool) -> None:
        ablate = load_program("tools/ablate.py")
        session = SimpleNamespace(
            metrics=SimpleNamespace(losses=[2.0, loss], grad_norms=[2.0, norm]),
            built=SimpleNamespace(
                metadata_cache=SimpleNamespace(builds=builds), precision=SimpleNamespace(is_mixed=False)
            ),
            config=SimpleNamespace(
                model=SimpleNamespace(window_of_layer=lambda layer: 0, num_layers=3), recompute=True
            ),
            mesh=SimpleNamespace(ep_size=1),
            device=SimpleNamespace(type="cpu"),
            num_micro_batches=4,
            num_step_host_reads=reads,
        )
        self.check = ablate.check
        self.measurement = ablate.Measurement(ablate.Variant("doctored", **switches), session)


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
