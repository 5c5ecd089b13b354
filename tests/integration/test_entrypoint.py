"""The image's first program: TERM reaches ranks once and alone, exit codes pass, a run that was stopped is not done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cases import write_corpus
from tests.support.commands import ROOT, environment
from tests.support.job import SMALL_FLAGS
from tests.support.waiting import wait_for

ENTRYPOINT = str(ROOT / "scripts/docker/entrypoint.sh")
LAUNCH = ["torchrun", "--standalone", "--nproc-per-node", "2"]
WITH_PYTHON = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
STOPPED_EARLY = 75
PATIENT = """
import os, pathlib, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(number))
rank = os.environ["RANK"]
pathlib.Path(f"ready{rank}").touch()
while not got:
    time.sleep(0.02)
time.sleep(1.0)
pathlib.Path(f"got{rank}").write_text(" ".join(map(str, map(int, got))))
sys.exit(int(sys.argv[1]))
"""


def _start(words: list[str], folder: Path, **extra: str) -> subprocess.Popen[str]:
    environ = environment(PATH=WITH_PYTHON, **extra)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([ENTRYPOINT, *words], cwd=folder, env=environ, text=True, **streams)


@pytest.mark.parametrize(
    ("sent", "arrives", "code"), [(signal.SIGTERM, 15, 0), (signal.SIGINT, 15, 0), (signal.SIGUSR1, 10, 1)]
)
def test_a_signal_reaches_every_rank_once_and_is_waited_for(
    sent: signal.Signals, arrives: int, code: int, tmp_path: Path
) -> None:
    """torchrun, which would send TERM twice and kill after 30 s, gets none: so its exit code is that of its ranks."""
    (tmp_path / "program.py").write_text(PATIENT)
    process = _start([*LAUNCH, "program.py", str(code)], tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2 or process.poll() is not None, 60)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == [str(arrives)] * 2


def test_a_run_that_is_stopped_is_not_done_and_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    flags = [*SMALL_FLAGS, "--num-layers", "1", "--global-batch-size", "4", "--log-interval", "1", "--save", "run"]
    words = [*LAUNCH, str(ROOT / "pretrain_gpt.py"), *flags, "--train-iters"]
    done = tmp_path / "summary.json"
    done.write_text("{}")
    process = _start([*words, "1000000"], tmp_path, DONE_FILE=str(done))
    try:
        records = tmp_path / "run/metrics.jsonl"
        wait_for(lambda: (records.exists() and records.read_text()) or process.poll() is not None, 90)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == STOPPED_EARLY, stderr
    assert not done.exists()
    (line,) = (line for line in stdout.splitlines() if line.startswith("stopping at iteration"))
    iteration = int(line.split()[3].rstrip(":"))
    process = _start([*words, str(iteration + 1)], tmp_path, DONE_FILE=str(done))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert done.stat().st_size > 2


def test_exit_codes_pass(tmp_path: Path) -> None:
    fails = ["-c", "import sys; sys.exit(3)"]
    assert _start([sys.executable, *fails], tmp_path).wait(60) == 3
    assert _start([sys.executable, *fails], tmp_path, DONE_FILE=str(tmp_path / "done")).wait(60) == 3
    writes = ["-c", "import pathlib; pathlib.Path('done').touch()"]
    assert _start([sys.executable, *writes], tmp_path, DONE_FILE=str(tmp_path / "done")).wait(60) == 0


def test_what_is_no_launcher_gets_signals_and_input_itself() -> None:
    process = subprocess.Popen([ENTRYPOINT, "sleep", "60"])
    time.sleep(0.3)
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    read = subprocess.run([ENTRYPOINT, "cat"], input="typed", capture_output=True, text=True, timeout=20, check=True)
    assert read.stdout == "typed"


def test_without_a_program_it_says_so() -> None:
    outcome = subprocess.run([ENTRYPOINT], capture_output=True, text=True, timeout=20, check=False)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("error: PROGRAM: not given")
