"""kill -9 between the stations of a save, where bytes are forced to the disk: there always is a whole checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.support.toy_run import Run

# In the order of a save: slices, the rank's note about them, facts, config, index, DCP's metadata, manifest, the
# unpublished folder, ``latest.tmp``, the root; after the folder's rename the root; after that of ``latest`` the root
# again. Then pruning.
NUM_SYNCS = 12
FIRST_SYNC_AFTER_RENAME = 11


def save_and_stop(root: Path, stop_at: int, writer: Connection) -> None:
    """Make step 2 from step 1 and stand still before the given sync; sync NUM_SYNCS + 1 stands for pruning."""
    torch.set_num_threads(1)
    run = Run(root, seed=3)
    run.iteration = run.store.load(root / "step_00000001", run.state()).step
    run.train(1)
    real_sync, calls = os.fsync, iter(range(1, 100))

    def stand_still(*_args: object) -> None:
        writer.send("here")
        time.sleep(60)

    def sync(handle: int) -> None:
        if next(calls) == stop_at:
            stand_still()
        real_sync(handle)

    os.fsync = sync
    if stop_at > NUM_SYNCS:
        shutil.rmtree = stand_still
    run.save()
    writer.send(f"saved with {next(calls) - 1} syncs")


def start(root: Path, stop_at: int) -> tuple[multiprocessing.process.BaseProcess, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=save_and_stop, args=(root, stop_at, writer), daemon=True)
    process.start()
    writer.close()
    assert reader.poll(50), "the child did not reach its stop"
    return process, reader.recv()


@pytest.mark.parametrize("stop_at", [1, 3, 8, 9, 10, 11, 12, NUM_SYNCS + 1])
def test_f99_kill_9_while_saving(tmp_path: Path, stop_at: int) -> None:
    run = Run(tmp_path)
    saved = {}
    for step in (0, 1):
        if step:
            run.train(1)
        run.save()
        saved[step] = run.tensors()
    process, word = start(tmp_path, stop_at)
    assert word == "here"
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    survivor = Run(tmp_path, seed=8)
    latest = survivor.store.find_latest()
    expected_step = 2 if stop_at >= FIRST_SYNC_AFTER_RENAME else 1
    assert latest == tmp_path / f"step_{expected_step:08d}"
    assert (tmp_path / "step_00000002").exists() == (stop_at >= FIRST_SYNC_AFTER_RENAME)
    survivor.iteration = survivor.store.load(latest, survivor.state()).step
    if expected_step == 1:
        assert all(torch.equal(tensor, saved[1][name]) for name, tensor in survivor.tensors().items())

    survivor.train(2)
    path = survivor.save()
    assert survivor.store.find_latest() == path
    assert not [entry for entry in tmp_path.iterdir() if "incomplete" in entry.name or entry.suffix == ".tmp"]


def test_the_list_of_syncs_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    run.save()
    process, word = start(tmp_path, stop_at=0)
    assert word == f"saved with {NUM_SYNCS} syncs"
    process.join()
