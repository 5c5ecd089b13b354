"""Runs the project's commands as users do: as processes, with a timeout, in a folder of their own.

An entry point on one process starts *warm*: its script runs in a process forked from a server that has torch loaded,
which saves most of the start. Everything else starts as a user would type it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_glue.parallel import local_ranks
from tests.support.processes import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
ENTRY_POINTS = ("pretrain_gpt.py", "pretrain_moe.py")


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        """Lines on standard error, without torchrun's own and without library warnings."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def environment(**extra: str) -> dict[str, str]:
    """This environment with the checkout importable and one thread per process."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_GLUE_")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def start(arguments: list[str], cwd: Path, num_processes: int = 0, **extra: str) -> subprocess.Popen[str]:
    """Start ``python ...`` or, with a number of processes, ``torchrun --nproc-per-node N ...``."""
    launcher = [sys.executable]
    if num_processes:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [*launcher, str(ROOT / arguments[0]), *arguments[1:]]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(arguments: list[str], cwd: Path, num_processes: int = 0, *, is_cold: bool = False, **extra: str) -> Outcome:
    """Run a command to its end (see :func:`start`); an entry point on one process warm, unless it is to be cold."""
    if arguments[0] in ENTRY_POINTS and not num_processes and not is_cold:
        return _run_warm(arguments, cwd, extra)
    process = start(arguments, cwd, num_processes, **extra)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"{arguments} still ran after {TIMEOUT_S} s\n{stdout}\n{stderr}") from None
    return Outcome(process.returncode, stdout, stderr)


def _run_warm(arguments: list[str], cwd: Path, extra: dict[str, str]) -> Outcome:
    local_ranks.preload(PRELOADED)
    with tempfile.TemporaryDirectory() as logs:
        process = multiprocessing.get_context("forkserver").Process(
            target=_warm_main, args=(arguments, str(cwd), environment(**extra), logs)
        )
        process.start()
        process.join(TIMEOUT_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        stdout, stderr = ((Path(logs) / name).read_text() for name in ("out", "err"))
    assert code is not None, f"{arguments} still ran after {TIMEOUT_S} s\n{stdout}\n{stderr}"
    return Outcome(code, stdout, stderr)


def _warm_main(arguments: list[str], cwd: str, environ: dict[str, str], logs: str) -> None:
    """Become ``python <script> ...``."""
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(logs) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.argv = [str(ROOT / arguments[0]), *arguments[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def succeed(arguments: list[str], cwd: Path, num_processes: int = 0, *, is_cold: bool = False, **extra: str) -> Outcome:
    """Run a command that must exit with 0."""
    outcome = run(arguments, cwd, num_processes, is_cold=is_cold, **extra)
    assert outcome.code == 0, f"{arguments}: exit {outcome.code}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome


def summary(path: Path) -> dict[str, Any]:
    """Read a ``--summary-path`` file."""
    return json.loads(path.read_text())
