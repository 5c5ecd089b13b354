"""What a checkpoint says about the run that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cases import write_corpus
from tests.support.commands import succeed


def test_a_checkpoint_knows_where_its_configuration_came_from(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    (tmp_path / "a.yaml").write_text("model:\n  hidden_size: 32\n")
    command = ["pretrain_gpt.py", "--config", "a.yaml", "--num-layers", "1", "--train-iters", "1", "--save", "run"]
    command += ["--seq-length", "64", "--global-batch-size", "1", "--eval-iters", "1", "--sample-tokens", "0"]
    succeed([*command, "--data-path", corpus, "--device", "cpu"], tmp_path)
    facts = json.loads((tmp_path / "run/step_00000001/meta.json").read_bytes())
    assert facts["provenance"]["hidden_size"] == "file a.yaml"
    assert facts["provenance"]["num_layers"] == "command line"
    assert "num_attention_heads" not in facts["provenance"]
    assert len(facts["counters"]["losses"]) == 1
