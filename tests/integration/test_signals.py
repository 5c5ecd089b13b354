"""A signal to one rank: all save together and end with 0, and the next start goes on as if nothing was."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.training.checkpoint.files import latest_step
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, run_job
from tests.support.traps import at_step

FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "4", "--expert-model-parallel-size", "2", "--global-batch-size", "4"),
    *("--train-iters", "8", "--save-interval", "0", "--save", "run"),
]
SIGNALLED_STEP = 3
"""Counted from 1."""


def signal_self(number: int, victim: int, rank: int) -> None:
    if rank == victim:
        at_step(SIGNALLED_STEP, lambda: os.kill(os.getpid(), number))


def signal_self_twice(rank: int) -> None:
    """The second one comes in a step that does not end."""
    if rank != 1:
        return

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    at_step(SIGNALLED_STEP, hang)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("straight")
    write_corpus(folder / "corpus.jsonl")
    ends = run_job(FLAGS, folder, 2)
    assert [end.code for end in ends] == [0, 0], ends
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGINT, 1)])
def test_a_signal_to_one_rank_saves_on_all_and_the_next_start_goes_on(
    number: signal.Signals, victim: int, straight: dict[str, Any], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    ends = run_job(FLAGS, tmp_path, 2, functools.partial(signal_self, number, victim))
    assert [end.code for end in ends] == [0, 0], ends
    step = SIGNALLED_STEP + 1
    assert f"stopping at iteration {step}: {number.name} on rank {victim}" in ends[0].out
    assert f"{number.name} on rank {victim}" in ends[victim].err
    assert latest_step(tmp_path / "run") == step
    assert not (tmp_path / "summary.json").exists()

    ends = run_job(FLAGS, tmp_path, 2)
    assert [end.code for end in ends] == [0, 0], ends
    assert f"at iteration {step}" in ends[0].out
    resumed = json.loads((tmp_path / "summary.json").read_text())
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert resumed[name] == straight[name], name


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    ends = run_job(FLAGS, tmp_path, 2, signal_self_twice)
    assert [end.code for end in ends] == [1, 143], ends
    assert ends[1].error_lines == ["error: [rank 1] second signal (SIGTERM): ended at once, without a checkpoint"]
    assert latest_step(tmp_path / "run") is None
