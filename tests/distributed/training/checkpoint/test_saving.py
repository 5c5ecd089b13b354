"""Saves behind training on several ranks: own collectives, one publication, failures and losses seen by all."""

from __future__ import annotations

import errno
import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glue.proofs.local_jobs import wait_until
from megatron_glue.training.checkpoint import tensors as checkpoint_tensors
from megatron_glue.training.checkpoint.saving import RunSaver
from tests.distributed.training.checkpoint.test_store import CPU, Run, assert_equal
from tests.support.processes import run_distributed

SLOW_S = 0.7


def saver_of(run: Run) -> tuple[RunSaver, list[str]]:
    saver = RunSaver.in_background(run.store, CPU, timedelta(seconds=30))
    said: list[str] = []
    saver.say = said.append
    return saver, said


def slow_down(rank: int, slow_rank: int, seen: Path) -> threading.Event:
    """Make one rank's writer of slices slow: it waits for a file, and then some more.

    Returns:
        The event that tells that this rank's slices are written.
    """
    real, written = checkpoint_tensors.write_parts, threading.Event()

    def write(path: Path, parts: object) -> object:
        if rank == slow_rank:
            assert wait_until(seen.exists, 50)
            time.sleep(SLOW_S)
        result = real(path, parts)
        written.set()
        return result

    checkpoint_tensors.write_parts = write
    return written


def train_while_saving(rank: int, world_size: int, root: str, engine_name: str, ep_size: int) -> list[float]:
    """Training's collectives and the save's run at the same time, each on its own group."""
    seen = Path(root) / "seen"
    written = slow_down(rank, slow_rank=1, seen=seen)
    run = Run(root, engine_name, ep_size)
    saver, said = saver_of(run)
    run.train(2)
    expected = run.tensors()
    saver.save(2, run.state)
    run.train(2)
    for step in range(50):
        total = torch.tensor([float(rank + step)])
        dist.all_reduce(total)
        assert total.item() == world_size * step + sum(range(world_size))
    if rank == 0:
        assert written.wait(50)
        # F99: rank 0's slices are on the disk, rank 1 still writes.
        assert not (Path(root) / "step_00000002").exists()
        assert not (Path(root) / "latest").exists()
        seen.touch()
    saver.save(4, run.state)
    saver.finish()
    assert (saver.num_saved, saver.num_failed) == (2, 0)
    assert any(line.startswith("waited ") for line in said)
    continued = run.tensors()
    for step, tensors in ((2, expected), (4, continued)):
        run.scramble()
        run.store.load(Path(root) / f"step_0000000{step}", run.state())
        assert_equal(run.tensors(), tensors)
    saver.close()
    return [saver.stall_seconds]


@pytest.mark.parametrize(("world_size", "engine_name", "ep_size"), [(2, "ddp", 2), (2, "fsdp2", 1)])
def test_f99_nothing_is_published_before_every_rank_has_written(
    tmp_path: Path, world_size: int, engine_name: str, ep_size: int
) -> None:
    run_distributed(train_while_saving, world_size, str(tmp_path), engine_name, ep_size)


def fail_behind(rank: int, world_size: int, root: str, failing_rank: int) -> list[str]:
    run = Run(root, "ddp", 2)
    saver, said = saver_of(run)
    run.train(1)
    saver.save(1, run.state)
    saver.finish()
    real = checkpoint_tensors.write_parts

    def full(path: Path, _parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if rank == failing_rank:
        checkpoint_tensors.write_parts = full
    run.train(1)
    saver.save(2, run.state)
    run.train(1)
    saver.finish()
    checkpoint_tensors.write_parts = real
    dist.barrier()
    assert sorted(path.name for path in Path(root).iterdir()) == ["latest", "step_00000001"]
    saver.save(3, run.state)
    saver.finish()
    assert (saver.num_saved, saver.num_failed, saver.error) == (2, 1, None)
    return [line for line in said if line.startswith("warning")]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_of_one_rank_is_told_by_all_and_training_goes_on(tmp_path: Path, failing_rank: int) -> None:
    answers = run_distributed(fail_behind, 2, str(tmp_path), failing_rank)
    assert answers[0] == answers[1]
    (line,) = answers[0]
    assert f"step 2 was not saved, earlier checkpoints are untouched: {tmp_path}/step_00000002.incomplete" in line
    assert f"__{failing_rank}_0.distcp: No space left on device" in line


def share_writing(rank: int, world_size: int, root: str) -> list[int]:
    run = Run(root, "ddp", 1)
    saver, _ = saver_of(run)
    saver.save(0, run.state)
    saver.finish()
    return [saver.staged_bytes]


def test_ranks_stage_and_write_only_their_share_of_what_all_hold(tmp_path: Path) -> None:
    staged = run_distributed(share_writing, 2, str(tmp_path))
    tensors = json.loads((tmp_path / "step_00000000/index.json").read_bytes())["tensors"]
    shared = {name: entry for name, entry in tensors.items() if not name.startswith("rng.")}
    assert all(len(entry["slices"]) == 1 for entry in shared.values())
    sizes = {f"__{rank}_0.distcp": 0 for rank in range(2)}
    for entry in shared.values():
        sizes[entry["slices"][0]["file"]] += 4 * torch.Size(entry["shape"]).numel()
    assert abs(sizes["__0_0.distcp"] - sizes["__1_0.distcp"]) < 0.05 * sum(sizes.values())
    # Both hold everything; a buffer for all of it would be twice as large. Each tensor starts on 64 bytes.
    assert all(held[0] < 0.75 * (sum(sizes.values()) + 2 * 5056 + 64 * len(tensors)) + 4096 for held in staged)
