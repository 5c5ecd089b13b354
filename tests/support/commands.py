"""Runs the project's commands as users do: as processes, with a timeout, in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


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


def run(arguments: list[str], cwd: Path, num_processes: int = 0, **extra: str) -> Outcome:
    """Run a command to its end (see :func:`start`)."""
    process = start(arguments, cwd, num_processes, **extra)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"{arguments} still ran after {TIMEOUT_S} s\n{stdout}\n{stderr}") from None
    return Outcome(process.returncode, stdout, stderr)


def succeed(arguments: list[str], cwd: Path, num_processes: int = 0, **extra: str) -> Outcome:
    """Run a command that must exit with 0."""
    outcome = run(arguments, cwd, num_processes, **extra)
    assert outcome.code == 0, f"{arguments}: exit {outcome.code}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome


def summary(path: Path) -> dict[str, Any]:
    """Read a ``--summary-path`` file."""
    return json.loads(path.read_text())
