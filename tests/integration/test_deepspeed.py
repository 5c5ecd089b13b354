"""DeepSpeed as users start it: the command of the guide, a resume with another engine, and a missing library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import ROOT, run, succeed, summary
from tests.support.deepspeed_runs import needs_deepspeed

FLAGS = [
    *("pretrain_gpt.py", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--device", "cpu"),
    *("--seq-length", "64", "--data-path", "corpus.jsonl", "--heldout-fraction", "0.2", "--global-batch-size", "4"),
    *("--eval-iters", "1", "--sample-tokens", "0", "--save", "run", "--summary-path", "summary.json"),
]
EXAMPLE = str(ROOT / "examples" / "deepspeed_zero1.json")


def deepspeed_tests(function):
    for mark in needs_deepspeed:
        function = mark(function)
    return function


@deepspeed_tests
def test_the_example_trains_and_another_engine_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    engine = ["--deepspeed", "--zero-stage", "1", "--deepspeed-config", EXAMPLE]
    outcome = succeed([*FLAGS, *engine, "--train-iters", "2"], tmp_path, num_processes=2)
    assert "ZeRO stage 1, optimizer states cut over 2 ranks" in outcome.stdout
    assert "deprecated" not in outcome.stderr
    first = summary(tmp_path / "summary.json")["losses"]
    succeed([*FLAGS, "--data-parallel-engine", "fsdp2", "--train-iters", "3"], tmp_path, num_processes=2)
    losses = summary(tmp_path / "summary.json")["losses"]
    assert losses[:2] == first
    assert len(losses) == 3


@deepspeed_tests
def test_a_file_for_another_stage_is_one_line(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    engine = ["--deepspeed", "--zero-stage", "2", "--deepspeed-config", EXAMPLE]
    outcome = run([*FLAGS, *engine, "--train-iters", "2"], tmp_path, num_processes=2)
    assert outcome.code != 0
    assert any("zero_optimization.stage is 1, and --zero-stage makes it 2" in line for line in outcome.error_lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_missing_library_is_one_line_with_the_command(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    outcome = run([*FLAGS, "--deepspeed", "--train-iters", "2"], tmp_path, num_processes=2)
    assert outcome.code != 0
    assert any("pip install 'megatron_glue[deepspeed]'" in line for line in outcome.error_lines)
