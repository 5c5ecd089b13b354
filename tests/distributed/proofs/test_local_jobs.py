"""Local jobs are real: they train, say what they do, die by SIGKILL, and take each other along."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_glue.proofs.local_jobs import LocalJob, ProcessId, wait_until
from tests.support.cases import write_corpus
from tests.support.commands import ROOT, environment

SMALL = [
    *(
        "--num-layers",
        "1",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "64",
        "--device",
        "cpu",
    ),
    *("--global-batch-size", "2", "--heldout-fraction", "0.2", "--eval-iters", "1", "--eval-interval", "0"),
    *("--log-interval", "1", "--progress", "plain", "--sample-tokens", "0", "--lr-warmup-iters", "1"),
]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are followed through /proc")


def start(tmp_path: Path, world_size: int, num_steps: int, *flags: str) -> LocalJob:
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus)
    argv = [
        *SMALL,
        "--data-path",
        str(corpus),
        "--save",
        str(tmp_path / "run"),
        "--train-iters",
        str(num_steps),
        *flags,
    ]
    return LocalJob(argv, world_size, tmp_path / "log")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_trains_to_its_end(world_size: int, tmp_path: Path) -> None:
    job = start(tmp_path, world_size, 2)
    try:
        assert wait_until(lambda: job.exit_code is not None, 60), job.log()
        assert job.exit_code == 0, job.log()
        assert "iteration 2/2" in job.log()
        assert (tmp_path / "run/step_00000002").is_dir()
        assert job.wait(5) == []
    finally:
        job.end()


def test_a_wrong_flag_shows_in_exit_code_and_log(tmp_path: Path) -> None:
    job = start(tmp_path, 1, 2, "--num-layers", "0")
    try:
        assert wait_until(lambda: job.exit_code is not None, 60)
        assert job.exit_code == 2
        assert "error: --num-layers" in job.log()
    finally:
        job.end()


@pytest.mark.parametrize("victim", ["launcher", "first rank", "last rank"])
def test_the_death_of_one_process_ends_all(victim: str, tmp_path: Path) -> None:
    job = start(tmp_path, 2, 100_000)
    try:
        assert wait_until(lambda: "iteration      3/" in job.log() or job.exit_code is not None, 60), job.log()
        ranks = job.ranks()
        assert len(ranks) == 2, job.log()
        assert len(job.processes()) == 3
        {"launcher": job.launcher, "first rank": ranks[0], "last rank": ranks[-1]}[victim].kill()
        assert job.wait(30) == [], job.log()
        assert not any(process.is_alive for process in job.processes())
        assert job.exit_code == (-signal.SIGKILL if victim == "launcher" else 1)
    finally:
        job.end()


def hold_a_job(folder: str) -> None:
    """A tool that starts a job, notes its processes and waits."""
    job = start(Path(folder), 2, 100_000)
    wait_until(lambda: len(job.ranks()) == 2 and "iteration" in job.log(), 60)
    text = " ".join(f"{process.pid}:{process.start_ticks}" for process in job.processes())
    (Path(folder) / "noted").write_text(text)
    (Path(folder) / "noted").rename(Path(folder) / "processes")
    signal.pause()


def test_a_job_ends_with_the_tool_however_that_ends(tmp_path: Path) -> None:
    code = f"from tests.distributed.proofs import test_local_jobs as t; t.hold_a_job({str(tmp_path)!r})"
    tool = subprocess.Popen([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    try:
        assert wait_until((tmp_path / "processes").exists, 90)
    finally:
        tool.kill()
        tool.wait()
    noted = [entry.split(":") for entry in (tmp_path / "processes").read_text().split()]
    processes = [ProcessId(int(pid), int(ticks)) for pid, ticks in noted]
    assert len(processes) == 3
    assert wait_until(lambda: not any(process.is_alive for process in processes), 30)
