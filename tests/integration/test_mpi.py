"""Real mpirun: the shipped script trains on two ranks, with the losses of torchrun, and hands a signal on to all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_glue.parallel.local_ranks import free_port
from megatron_glue.training.checkpoint.files import latest_step
from tests.support.cases import write_corpus
from tests.support.commands import ROOT, environment, succeed, summary
from tests.support.job import SMALL_FLAGS
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py here: pip install '.[mpi]'"),
]
FLAGS = [
    *SMALL_FLAGS,
    *("--num-layers", "2", "--num-experts", "4", "--expert-model-parallel-size", "2", "--global-batch-size", "4"),
    *("--progress", "plain", "--log-interval", "1", "--save-interval", "0", "--save", "run", "--train-iters"),
]


def _start(folder: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
    """Start ``scripts/mpi/train.sh`` on two ranks of this machine; it works in the checkout, so paths are absolute."""
    write_corpus(folder / "corpus.jsonl")
    names = ("corpus.jsonl", "run", "summary.json")
    words = tuple(str(folder / word) if word in names else word for word in words)
    environ = environment(
        NP="2",
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONUNBUFFERED="1",
        # As root, on a machine with one core, as in a container.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        **extra,
    )
    with (folder / "log").open("w") as log:
        command = [str(ROOT / "scripts/mpi/train.sh"), *words]
        return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, text=True)


def _end(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the end; the exit code must be 0. What was said, without the control bytes that mpirun may mix in."""
    try:
        code = process.wait(timeout=120)
    finally:
        process.kill()
    text = (folder / "log").read_text(errors="replace")
    assert code == 0, text
    return text


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchrun")
    write_corpus(folder / "corpus.jsonl")
    succeed(["pretrain_moe.py", *FLAGS, "4"], folder, 2)
    return summary(folder / "summary.json")


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "127.0.0.1"}], ids=["by mpi4py", "given"])
def test_losses_are_those_of_torchrun(address: dict[str, str], by_torchrun: dict[str, Any], tmp_path: Path) -> None:
    extra = {**address, "MASTER_PORT": str(free_port())} if address else {}
    log = _end(_start(tmp_path, "pretrain_moe.py", *FLAGS, "4", **extra), tmp_path)
    assert "2 ranks: dp 2, ep 2 x edp 1" in log
    result = summary(tmp_path / "summary.json")
    for name in ("losses", "grad_norms", "heldout_loss"):
        assert result[name] == by_torchrun[name], name


def test_mpirun_hands_a_signal_on_and_all_ranks_save(tmp_path: Path) -> None:
    process = _start(tmp_path, "pretrain_moe.py", *FLAGS, "100000")
    try:
        wait_for(lambda: process.poll() is not None or "iteration      2/" in (tmp_path / "log").read_text(), 60)
        process.send_signal(signal.SIGUSR1)
        log = _end(process, tmp_path)
    finally:
        process.kill()
    assert "SIGUSR1 on rank" in log
    step = latest_step(tmp_path / "run")
    assert step is not None
    assert f"stopping at iteration {step}" in log


def test_a_rank_that_fails_ends_mpirun_with_its_reason(tmp_path: Path) -> None:
    process = _start(tmp_path, "pretrain_moe.py", *FLAGS, "4", "--tensor-model-parallel-size", "3")
    assert process.wait(timeout=120) != 0
    text = (tmp_path / "log").read_text(errors="replace")
    assert "error: WORLD_SIZE=2: is no multiple of --tensor-model-parallel-size 3" in text
