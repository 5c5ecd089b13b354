"""Saving and starting as users see it: files, lines, exit codes and losses."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from tests.support.cases import write_corpus
from tests.support.job import SMALL_FLAGS, RankEnd, run_job

FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "1", "--num-experts", "2", "--moe-router-enable-expert-bias", "--global-batch-size", "2"),
    *("--lr-warmup-iters", "2", "--log-interval", "2", "--keep-last", "3"),
]


def fail_saves(failing: tuple[int, ...], _rank: int) -> None:
    """Let the disk be full at the saves with these numbers, counted from 1."""
    real, numbers = checkpoint_tensors.write_parts, iter(range(1, 100))

    def write(path: Path, parts: Any) -> Any:
        if next(numbers) in failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, parts)

    checkpoint_tensors.write_parts = write


class Folder:
    """A place to run in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_corpus(path / "corpus.jsonl")

    def run(self, *flags: str, failing: tuple[int, ...] = ()) -> RankEnd:
        (end,) = run_job([*FLAGS, *flags], self.path, 1, functools.partial(fail_saves, failing))
        assert "Traceback" not in end.err
        return end

    def succeed(self, *flags: str, failing: tuple[int, ...] = ()) -> tuple[dict[str, Any], str]:
        end = self.run(*flags, failing=failing)
        assert end.code == 0, end
        return json.loads((self.path / "summary.json").read_text()), end.out

    def steps(self, root: str = "run") -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.path / root).glob("step_*"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Folder(tmp_path_factory.mktemp("straight")).succeed("--train-iters", "8")[0]


RUN = ("--save", "run", "--save-interval", "2")


def test_written_behind_training_or_not_a_resumed_run_is_the_same(folder: Folder, straight: dict[str, Any]) -> None:
    """F94 with both kinds of save in one run."""
    summary, out = folder.succeed(*RUN, "--train-iters", "8", "--async-save", "--exit-interval", "4")
    assert summary["losses"] == straight["losses"][:4]
    assert out.count("s in the background)") == summary["saves"] == 2
    assert summary["save_staging_bytes"] > 0
    folder.succeed(*RUN, "--train-iters", "8", "--exit-interval", "6")
    summary, _ = folder.succeed(*RUN, "--train-iters", "8", "--async-save")
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert summary[name] == straight[name], name
    assert folder.steps() == [4, 6, 8]
    assert summary["checkpoint"] == "run/step_00000008"


@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["foreground", "background"])
def test_a_failed_save_costs_the_checkpoint_and_not_the_run(
    folder: Folder, straight: dict[str, Any], more: tuple[str, ...]
) -> None:
    summary, out = folder.succeed(*RUN, "--train-iters", "8", *more, failing=(2, 3))
    assert (summary["saves"], summary["failed_saves"]) == (2, 2)
    assert summary["losses"] == straight["losses"]
    warnings = [line for line in out.splitlines() if line.startswith("warning: step ")]
    assert [line.split(" ")[2] for line in warnings] == ["4", "6"]
    assert all("No space left on device" in line and "MiB were free in run" in line for line in warnings)
    assert "failed saves" in out
    assert folder.steps() == [2, 8]


@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["foreground", "background"])
def test_a_failed_last_save_is_the_exit_code(folder: Folder, more: tuple[str, ...]) -> None:
    end = folder.run(*RUN, "--train-iters", "4", *more, failing=(2,))
    assert end.code == 1
    (line,) = end.error_lines
    assert line.startswith(
        "error: the last checkpoint of the run is missing: step 4 was not saved, earlier checkpoints"
    )
    assert folder.steps() == [2]
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["iterations"], summary["failed_saves"], summary["checkpoint"]) == (4, 1, "run/step_00000002")
    assert folder.succeed(*RUN, "--train-iters", "4")[0]["losses"] == summary["losses"]


def test_load_starts_from_another_folder_and_never_writes_there(folder: Folder, straight: dict[str, Any]) -> None:
    folder.succeed(*RUN, "--train-iters", "4")
    before = {path: path.stat().st_mtime_ns for path in (folder.path / "run").rglob("*")}
    summary, out = folder.succeed("--load", "run", "--save", "more", "--save-interval", "0", "--train-iters", "8")
    assert "new checkpoints go to more; run/step_00000004 (--load) stays as it is" in out
    assert summary["losses"][:4] == straight["losses"][:4]
    assert folder.steps("more") == [8]
    assert before == {path: path.stat().st_mtime_ns for path in (folder.path / "run").rglob("*")}
    # --save holds a checkpoint now: that one counts.
    assert (
        "resuming from more/step_00000008" in folder.succeed("--load", "run", "--save", "more", "--train-iters", "9")[1]
    )
    _, out = folder.succeed("--load", "run/step_00000002", "--save", "third", "--train-iters", "4")
    assert "resuming from run/step_00000002 at iteration 2" in out
    # Nothing is left to train: what was loaded is evaluated and saved.
    _, out = folder.succeed("--load", "run", "--save", "fourth", "--train-iters", "4")
    assert folder.steps("fourth") == [4]
    end = folder.run("--load", "nowhere", "--save", "fifth")
    assert (end.code, end.error_lines) == (
        2,
        ["error: --load=nowhere: is no folder; give a run's folder or one of its step_N folders"],
    )


def test_a_damaged_checkpoint_is_refused_or_passed_over(folder: Folder, straight: dict[str, Any]) -> None:
    folder.succeed(*RUN, "--train-iters", "8", "--exit-interval", "6")
    shard = folder.path / "run/step_00000006/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 16
    shard.write_bytes(data)
    end = folder.run(*RUN, "--train-iters", "8")
    assert end.code == 1
    (line,) = end.error_lines
    assert line == (
        "error: run/step_00000006/__0_0.distcp: damaged, its bytes differ from those that were saved; "
        "--load-fallback takes the newest good checkpoint before it"
    )
    summary, out = folder.succeed(*RUN, "--train-iters", "8", "--load-fallback")
    (note,) = [line for line in out.splitlines() if "falling back" in line]
    assert note.startswith("warning: run/step_00000006 cannot be read (run/step_00000006/__0_0.distcp: damaged")
    assert note.endswith("falling back to run/step_00000004")
    assert summary["losses"] == straight["losses"]
    assert folder.steps() == [4, 6, 8]
    assert folder.run(*RUN, "--train-iters", "8").code == 0


def test_f110_a_new_learning_rate_wins_and_is_told(folder: Folder) -> None:
    folder.succeed(*RUN, "--train-iters", "4", "--lr", "0.002")
    _, out = folder.succeed(*RUN, "--train-iters", "8", "--lr", "0.001", "--lr-decay-style", "constant")
    (line,) = [line for line in out.splitlines() if line.startswith("changed since")]
    assert line == (
        "changed since that checkpoint, the present values count: --lr 0.002 -> 0.001, "
        "--lr-decay-style cosine -> constant, --train-iters 4 -> 8"
    )
    rates = [
        line.split("lr ")[1].split(" ")[0]
        for line in out.splitlines()
        if line.startswith("iteration ") and "lr" in line
    ]
    assert set(rates) == {"1.000e-03"}


def test_the_saved_configuration_starts_the_same_run(folder: Folder, straight: dict[str, Any]) -> None:
    folder.succeed(*RUN, "--train-iters", "8", "--exit-interval", "4")
    (end,) = run_job(["--config", "run/step_00000004/config.yaml", "--exit-interval", "0"], folder.path, 1)
    assert end.code == 0, end
    assert "changed since" not in end.out
    assert json.loads((folder.path / "summary.json").read_text())["losses"] == straight["losses"]


def interrupt_while_writing(_rank: int) -> None:
    """Ctrl-C while a slow save is under way behind training."""
    real, saves = checkpoint_tensors.write_parts, iter(range(100))

    def write(path: Path, parts: Any) -> Any:
        if next(saves) == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.7)
        return real(path, parts)

    checkpoint_tensors.write_parts = write


def test_ctrl_c_finishes_the_save_in_flight(folder: Folder) -> None:
    flags = [*FLAGS, *RUN, "--train-iters", "1000", "--async-save"]
    (end,) = run_job(flags, folder.path, 1, interrupt_while_writing)
    assert end.code == 0, end
    assert "saved checkpoint run/step_00000002" in end.out
    assert ": SIGINT on rank 0" in end.out
    assert folder.steps()[0] == 2
    assert len(folder.steps()) == 2, "what was trained since is saved too"
