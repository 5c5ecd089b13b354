"""The shipped batch scripts under a real Slurm of two nodes: training, stopping in time, preemption, cancelling.

Every run is compared with one that ran through without Slurm: same losses, same gradient norms, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.training.checkpoint.files import latest_step
from tests.support.cases import write_corpus
from tests.support.commands import ROOT, environment
from tests.support.job import SMALL_FLAGS, run_job
from tests.support.slurm_cluster import SlurmCluster, missing_for_slurm

OBSTACLE = missing_for_slurm()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no Slurm can be started: {OBSTACLE}"),
]
WORLD_SIZE = 2
FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "4", "--expert-model-parallel-size", "2", "--progress", "plain"),
    *("--micro-batch-size", "2", "--save-interval", "0", "--log-interval", "1"),
]
SHORT = ["--train-iters", "6", "--global-batch-size", "4"]
# Steps that take a while, and enough of them to be signalled in.
LONG = ["--train-iters", "24", "--global-batch-size", "16"]


@dataclass(frozen=True)
class Job:
    """A submitted training.

    Attributes:
        cluster: Where it runs.
        number: Its job number.
        folder: Where it works: corpus, log, ``run`` with checkpoints, ``summary.json``.
    """

    cluster: SlurmCluster
    number: str
    folder: Path

    @property
    def log(self) -> str:
        """What the batch script and the ranks said."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, field: str = "JobState") -> str:
        """A field of what the controller knows of the job."""
        return self.cluster.job(self.number)[field]

    def wait_for_line(self, text: str, count: int = 1) -> None:
        """Wait until the log has a text this many times."""
        self.cluster.wait(lambda: self.log.count(text) >= count, f"{text!r} did not come:\n{self.log}")

    def complete(self) -> dict[str, Any]:
        """Wait for the end, which must be a good one; the summary."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.cluster.wait_for_state(self.number, *ends)
        assert self.state() == "COMPLETED", self.log
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    started = SlurmCluster(num_nodes=2)
    yield started
    started.close()


def _submit(
    cluster: SlurmCluster, folder: Path, flags: list[str], launch: str, *options: str, canary: Path | None = None
) -> Job:
    """Submit a training; with a checkout as ``canary`` as users do who give a share of their jobs another version."""
    through = ["scripts/canary.sh", "moe-run-12"] if canary else []
    releases = {"STABLE": str(canary), "CANARY": str(canary), "PERCENT": "100"} if canary else {"REPO": str(ROOT)}
    write_corpus(folder / "corpus.jsonl")
    paths = ["--data-path", str(folder / "corpus.jsonl"), "--summary-path", str(folder / "summary.json")]
    number = cluster.client(
        *(*through, "sbatch", "--parsable", "--gpus-per-node=0", f"--output={folder / 'log'}", "--nodes=2", *options),
        *("scripts/slurm/pretrain_moe.sbatch", *FLAGS, *flags, *paths, "--save", str(folder / "run")),
        **environment(
            **releases,
            NPROC="1",
            LAUNCH=launch,
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            PYTHONUNBUFFERED="1",
        ),
    )
    return Job(cluster, number.strip(), folder)


def _straight(folder: Path, flags: list[str]) -> dict[str, Any]:
    write_corpus(folder / "corpus.jsonl")
    ends = run_job([*FLAGS, *flags, "--save", "run"], folder, WORLD_SIZE)
    assert [end.code for end in ends] == [0] * WORLD_SIZE, ends
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _straight(tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _straight(tmp_path_factory.mktemp("long"), LONG)


def _assert_same(summary: dict[str, Any], straight: dict[str, Any]) -> None:
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert summary[name] == straight[name], name


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_the_batch_script_trains_on_two_nodes(
    launch: str, cluster: SlurmCluster, short: dict[str, Any], tmp_path: Path
) -> None:
    job = _submit(cluster, tmp_path, SHORT, launch)
    _assert_same(job.complete(), short)
    assert "2 ranks: dp 2, ep 2 x edp 1" in job.log
    assert job.state("NumNodes") == "2"


def test_a_canary_trains_in_its_own_checkout(cluster: SlurmCluster, short: dict[str, Any], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    for path in ROOT.glob("[!.]*"):
        (canary / path.name).symlink_to(path)
    (canary / ".venv").symlink_to(sys.prefix)
    job = _submit(cluster, tmp_path, SHORT, "torchrun", canary=canary)
    _assert_same(job.complete(), short)
    assert job.state("WorkDir") == str(canary)


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_before_the_time_limit_all_ranks_save_and_the_next_start_goes_on(
    launch: str, cluster: SlurmCluster, long: dict[str, Any], tmp_path: Path
) -> None:
    """What --signal=B:USR1@300 does: USR1 to the batch shell alone."""
    job = _submit(cluster, tmp_path, LONG, launch)
    job.wait_for_line("iteration  2/24")
    cluster.client("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_line("back into the queue")
    stopped_at = int(re.findall(r"stopping at iteration (\d+): SIGUSR1 on rank", job.log)[-1])
    assert latest_step(tmp_path / "run") == stopped_at < 24
    assert "error" not in job.log

    cluster.start_requeued(job.number)
    _assert_same(job.complete(), long)
    assert f"step_{stopped_at:08} at iteration {stopped_at}" in job.log
    assert job.state("Restarts") == "1"


def test_a_preempted_job_saves_and_goes_on_later(cluster: SlurmCluster, long: dict[str, Any], tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, LONG, "torchrun")
    job.wait_for_line("iteration  2/24")
    urgent = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    other = cluster.client("sbatch", *urgent).strip()
    job.wait_for_line("stopping at iteration")
    cluster.wait_for_state(other, "COMPLETED")
    (stopped_at,) = map(int, re.findall(r"stopping at iteration (\d+): SIGTERM on rank", job.log))
    assert latest_step(tmp_path / "run") == stopped_at < 24

    cluster.start_requeued(job.number)
    _assert_same(job.complete(), long)
    assert f"step_{stopped_at:08} at iteration {stopped_at}" in job.log


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_scancel_ends_everything(launch: str, cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, LONG, launch)
    job.wait_for_line("iteration  2/24")
    assert len([line for line in cluster.processes("pretrain_moe.py") if "torchrun" not in line]) >= WORLD_SIZE
    cluster.client("scancel", job.number)
    cluster.wait_for_state(job.number, "CANCELLED")
    cluster.wait(lambda: not cluster.processes("pretrain_moe.py"), "processes of a cancelled job are left")
    assert "back into the queue" not in job.log


def test_a_rank_that_fails_ends_the_job_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, [*SHORT, "--tensor-model-parallel-size", "3"], "srun")
    cluster.wait_for_state(job.number, "FAILED")
    assert job.state("ExitCode") == "2:0"
    assert "error: WORLD_SIZE=2: is no multiple of --tensor-model-parallel-size 3" in job.log
    assert not cluster.processes("pretrain_moe.py")
