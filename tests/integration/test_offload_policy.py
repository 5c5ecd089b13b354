"""``--offload-policy auto`` in real runs: decided once, saved, taken over on resume, overruled by flags."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cases import write_corpus
from tests.support.commands import succeed

COMMAND = [
    *("pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "64", "--global-batch-size", "2", "--eval-iters", "1", "--sample-tokens", "0", "--device", "cpu"),
    *("--offload-min-tensor-kb", "0", "--train-iters", "8"),
]
AUTO = ["--double-buffer-ckpt", "--offload-policy", "auto"]
DECIDED = "offload policy: "


def test_a_resumed_run_reuses_the_decision_and_flags_overrule_it(tmp_path: Path) -> None:
    command = [*COMMAND, "--data-path", str(write_corpus(tmp_path / "corpus.jsonl"))]
    run = [*command, *AUTO, "--save", "run", "--save-interval", "1", "--keep-last", "9"]
    first = succeed([*run, "--exit-interval", "5"], tmp_path)
    assert first.stderr.count("blocks leave") + first.stderr.count("off, all inputs stay") == 1
    facts = {
        step: json.loads((tmp_path / f"run/step_{step:08d}/meta.json").read_bytes())["decisions"]["offload"]
        for step in (3, 5)
    }
    assert facts[3] == {}
    plain = succeed([*command, "--summary-path", "plain.json"], tmp_path)
    assert DECIDED not in plain.stderr
    losses = json.loads((tmp_path / "plain.json").read_text())["losses"]

    resumed = succeed([*run, "--summary-path", "s.json"], tmp_path)
    assert "as when the run was saved" in resumed.stderr
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["offload_decision"] == facts[5]["decision"], "with the times that were measured then"
    assert "ms back" in summary["offload_decision"]["reason"]
    assert summary["losses"] == losses, "whatever is decided, and whenever"

    explicit = succeed([*command, *AUTO, "--offload-num-layers", "2", "--summary-path", "e.json"], tmp_path)
    assert "--offload-num-layers says how many" in explicit.stdout + explicit.stderr
    summary = json.loads((tmp_path / "e.json").read_text())
    assert summary["offload_decision"] is None
    assert summary["offloaded_bytes"] == 8 * 2 * 2 * 64 * 32 * 4
    assert summary["losses"] == losses
