"""Saves of a run in one process, in the foreground and behind it: what is written, told, counted and waited for."""

from __future__ import annotations

import errno
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_glue.training.checkpoint import files
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.saving import RunSaver
from tests.support.toy_run import CPU, Run

both_ways = pytest.mark.parametrize("behind", [False, True], ids=["foreground", "background"])


def saver_of(run: Run, behind: bool) -> tuple[RunSaver, list[str]]:
    saver = RunSaver.in_background(run.store, CPU, timedelta(minutes=1)) if behind else RunSaver(run.store)
    said: list[str] = []
    saver.say = said.append
    return saver, said


class Gate:
    """Holds the writer of slices back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.reached = threading.Event(), threading.Event()
        real = checkpoint_tensors.write_parts

        def write(*args: object) -> object:
            self.reached.set()
            assert self.is_open.wait(30)
            return real(*args)

        monkeypatch.setattr(checkpoint_tensors, "write_parts", write)


@both_ways
def test_saves_are_published_told_and_counted(tmp_path: Path, behind: bool) -> None:
    run = Run(tmp_path)
    saver, said = saver_of(run, behind)
    for _ in range(3):
        run.train(1)
        saver.save(run.iteration, run.state)
    saver.save(run.iteration, run.state)
    saver.finish()
    saver.close()
    assert (saver.num_saved, saver.num_failed, saver.error) == (3, 0, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]
    told = [line for line in said if line.startswith("saved checkpoint")]
    assert [line.split("step_")[1][:8] for line in told] == ["00000001", "00000002", "00000003"]
    assert all(line.endswith("s in the background)") == behind for line in told)
    assert saver.newest() == tmp_path / "step_00000003"
    assert saver.stall_seconds > 0


def test_what_is_written_is_what_was_at_the_moment_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments, generators, counters and data position, however long the write takes."""
    gate = Gate(monkeypatch)
    run = Run(tmp_path)
    saver, _ = saver_of(run, True)
    run.train(2)
    expected, generator = run.tensors(), torch.get_rng_state()
    saver.save(run.iteration, run.state)
    assert gate.reached.wait(30)
    run.train(3)
    assert not (tmp_path / "step_00000002").exists(), "nothing is published before the bytes are written"
    gate.is_open.set()
    saver.finish()
    resumed = Run(tmp_path, seed=9)
    loaded = resumed.store.load(tmp_path / "step_00000002", resumed.state())
    assert (loaded.step, loaded.counters, loaded.data_position) == (2, {"iteration": 2}, {"epoch": 1, "pack": 2})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.tensors().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_training_waits_for_the_copy_and_a_second_save_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    run = Run(tmp_path)
    saver, said = saver_of(run, True)
    start = time.perf_counter()
    saver.save(0, run.state)
    assert time.perf_counter() - start < 5, "the writer stands still, training does not"
    assert gate.reached.wait(30)
    saver.look()
    assert said == []
    run.train(1)
    threading.Timer(0.5, gate.is_open.set).start()
    saver.save(1, run.state)
    assert re.fullmatch(r"waited \d\.\d s for the checkpoint of step 0 before step 1 can be saved", said[0])
    assert said[1].startswith(f"saved checkpoint {tmp_path / 'step_00000000'}")
    assert saver.stall_seconds > 0.4
    saver.finish()
    assert saver.num_saved == 2
    assert saver.staged_bytes > 0
    saver.close()
    assert saver.staged_bytes == 0


@both_ways
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failed_save_is_told_counted_and_not_the_end(
    tmp_path: Path, behind: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    saver, said = saver_of(run, behind)
    saver.save(0, run.state)
    saver.finish()

    def fail(path: Path, _parts: object) -> None:
        raise OSError(code, "No", str(path))

    run.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_tensors, "write_parts", fail)
        saver.save(1, run.state)
        saver.finish()
        saver.save(1, run.state)
    assert (saver.num_saved, saver.num_failed) == (1, 1)
    assert isinstance(saver.error, CheckpointError)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "step 1 was not saved, earlier checkpoints are untouched" in warnings[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000000"]
    run.train(1)
    saver.save(2, run.state)
    saver.finish()
    assert (saver.num_saved, saver.num_failed, saver.error) == (2, 1, None)
    assert files.latest_step(tmp_path) == 2
    saver.close()


def test_a_background_that_lost_a_rank_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    def lose(*_args: object) -> None:
        raise RuntimeError("gloo: connection closed by peer")

    monkeypatch.setattr(run.store, "write", lose)
    saver, said = saver_of(run, True)
    saver.save(0, run.state)
    with pytest.raises(RuntimeError, match="connection closed"):
        saver.finish()
    saver.save(1, run.state)
    saver.close()
    assert said[-1] == "warning: a checkpoint was not completed: gloo: connection closed by peer"


def test_leaving_waits_for_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    run = Run(tmp_path)
    saver, said = saver_of(run, True)
    saver.save(0, run.state)
    threading.Timer(0.3, gate.is_open.set).start()
    saver.close()
    assert said[0] == "finishing the checkpoint of step 0 before leaving"
    assert files.latest_step(tmp_path) == 0
