"""A rank that hangs ends the job: it is named on all ranks, stacks are in the run's folder, exit codes are 1."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_glue.training.checkpoint.files import latest_step
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, run_job
from tests.support.traps import at_step

FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "4", "--expert-model-parallel-size", "2", "--global-batch-size", "4"),
    *("--train-iters", "8", "--save-interval", "2", "--save", "run", "--watchdog-timeout-s", "4"),
]


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever() -> None:
    time.sleep(600)


def hang(act: Callable[[], None], victim: int, rank: int) -> None:
    if rank == victim:
        at_step(3, act)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl")
    return tmp_path


@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_ends_the_job_and_is_named(victim: int, folder: Path) -> None:
    """Rank 0 holds the store that ranks would agree over."""
    ends = run_job(FLAGS, folder, 2, functools.partial(hang, stop_self, victim))
    survivor = ends[1 - victim]
    assert (ends[victim].code, survivor.code) == (-9, 1), ends
    (line,) = survivor.error_lines
    assert f"rank {victim} " in line.split(": ")[2], line
    assert f"of rank {victim} is stopped" in line
    assert "in vote of iteration" in line or "forward and backward of iteration 3" in line
    stacks = folder / "run" / "hangs" / "iteration_00000003" / f"rank_{1 - victim:05d}.stacks.txt"
    assert "train_step" in stacks.read_text()
    assert str(stacks.relative_to(folder)) in line
    assert latest_step(folder / "run") == 2


def test_a_rank_that_waits_for_nobody_is_named_and_all_ranks_end(folder: Path) -> None:
    ends = run_job(FLAGS, folder, 2, functools.partial(hang, sleep_for_ever, 1))
    assert [end.code for end in ends] == [1, 1], ends
    for rank, end in enumerate(ends):
        (line,) = end.error_lines
        assert line.startswith(f"error: [rank {rank}] no progress for "), line
        assert ": rank 1 (" in line
        assert (folder / f"run/hangs/iteration_00000003/rank_{rank:05d}.stacks.txt").exists()
    assert "sleep_for_ever" in (folder / "run/hangs/iteration_00000003/rank_00001.stacks.txt").read_text()


def test_the_next_start_goes_on_from_the_last_checkpoint(folder: Path) -> None:
    run_job(FLAGS, folder, 2, functools.partial(hang, stop_self, 1))
    ends = run_job([*FLAGS, "--watchdog-timeout-s", "0"], folder, 2)
    assert [end.code for end in ends] == [0, 0], ends
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 8
