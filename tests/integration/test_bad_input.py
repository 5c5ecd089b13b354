"""What a user can get wrong ends in one line naming field, value and remedy, with exit code 2 or 1, on every rank."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import ROOT, run, succeed

TINY = ["--num-layers", "1", "--hidden-size", "32", "--train-iters", "1", "--seq-length", "64", "--sample-tokens", "0"]

USAGE = {
    "heads": (["--hidden-size", "65"], "--hidden-size"),
    "unknown flag": (["--num-layer", "2"], "--num-layers"),
    "type": (["--num-layers", "two"], "--num-layers"),
    "sequence": (["--seq-length", "1"], "--seq-length"),
    "top-k": (["--moe-router-topk", "9"], "--moe-router-topk"),
    "batch": (["--global-batch-size", "3", "--micro-batch-size", "2"], "--global-batch-size"),
    "expert parallel": (["--expert-model-parallel-size", "2"], "--expert-model-parallel-size"),
    "tensor parallel": (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size"),
    "double buffer": (["--double-buffer-ckpt", "--recompute-granularity", "none"], "--recompute-granularity"),
    "missing data": (["--data-path", "nowhere.jsonl"], "nowhere.jsonl"),
    "missing config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "cuda": (["--device", "cuda"], "--device"),
}


def assert_one_line(outcome: object, code: int, *parts: str) -> None:
    assert outcome.code == code, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert len(outcome.error_lines) == 1, outcome.stderr
    for part in parts:
        assert part in outcome.error_lines[0]


@pytest.mark.parametrize(("flags", "named"), USAGE.values(), ids=USAGE.keys())
def test_usage_errors(flags: list[str], named: str, tmp_path: Path) -> None:
    assert_one_line(run(["pretrain_moe.py", *TINY, *flags], tmp_path), 2, named)


def test_a_usage_error_of_a_command_as_typed(tmp_path: Path) -> None:
    outcome = run(["pretrain_moe.py", *TINY, "--hidden-size", "65"], tmp_path, is_cold=True)
    assert_one_line(outcome, 2, "--hidden-size")


def test_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n{"text": 3}\n'))
    assert_one_line(run(["pretrain_gpt.py", *TINY, "--data-path", str(path)], tmp_path), 2, "bad.jsonl.gz", "2")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert_one_line(run(["pretrain_gpt.py", *TINY, "--data-path", "empty.jsonl"], tmp_path), 2, "empty.jsonl")


def test_save_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    assert_one_line(run(["pretrain_gpt.py", *TINY, "--save", "taken"], tmp_path), 2, "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_summary_path_is_tried_before_training(tmp_path: Path) -> None:
    outcome = run(["pretrain_gpt.py", *TINY, "--summary-path", str(tmp_path)], tmp_path)
    assert_one_line(outcome, 2, "--summary-path", "is a folder")
    assert "iteration" not in outcome.stdout


def test_full_disk_ends_in_one_line_and_keeps_what_was_saved(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    command = ["pretrain_gpt.py", *TINY, "--data-path", corpus, "--save", "run"]
    succeed(command, tmp_path)
    before = sorted(path.name for path in (tmp_path / "run/step_00000001").iterdir())
    program = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "limited.py").write_text(program)
    more = [*command[1:], "--train-iters", "2"]
    outcome = run([str(tmp_path / "limited.py"), str(ROOT), str(ROOT / "pretrain_gpt.py"), *more], tmp_path)
    assert_one_line(outcome, 1, "step 2 was not saved", "earlier checkpoints are untouched", "MiB were free in run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["step_00000001"]
    assert sorted(path.name for path in (tmp_path / "run/step_00000001").iterdir()) == before


def test_all_ranks_end_with_one_line_when_one_rank_has_no_data(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0/corpus.jsonl").write_text(corpus.read_text())
    program = (
        "import os, runpy, sys\n"
        "sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]\n"
        "sys.argv += ['--data-path', f'rank{os.environ[\"RANK\"]}/corpus.jsonl']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "ranks.py").write_text(program)
    command = [str(tmp_path / "ranks.py"), str(ROOT), str(ROOT / "pretrain_gpt.py"), *TINY]
    outcome = run([*command, "--global-batch-size", "2"], tmp_path, num_processes=2)
    assert outcome.code != 0
    assert any("rank1/corpus.jsonl" in line and "[rank 1]" in line for line in outcome.error_lines)
    assert any("another rank failed" in line for line in outcome.error_lines)
    ours = outcome.stderr.split("torch.distributed.elastic", 1)[0]
    assert "megatron_glue/" not in ours, "no traceback from inside"
