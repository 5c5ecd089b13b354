"""The first moments of a process: who ends it, and how its threads wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_glue.config.process import limit_spinning
from tests.support.commands import ROOT, environment

RANK = """
import sys, time
from megatron_glue.config.process import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_its_launcher() -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    assert launcher.stdout is not None
    words = {launcher.stdout.readline().strip() for _ in range(2)}
    (rank,) = words - {"ready"}
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 20
    while _is_running(int(rank)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(int(rank))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_entry_points_prepare_before_torch_is_imported() -> None:
    code = "import sys, megatron_glue.config.process as p; p.prepare_process(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=False).returncode == 0
    for name in ("pretrain_gpt.py", "pretrain_moe.py"):
        text = (ROOT / name).read_text()
        assert text.index("prepare_process()") < text.index("from megatron_glue.training.app import main")


def test_threads_sleep_at_barriers_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning(os.environ)
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    limit_spinning({"GOMP_SPINCOUNT": "7"})
    assert "OMP_WAIT_POLICY" not in os.environ
    limit_spinning({})
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.delenv("OMP_WAIT_POLICY")


def test_a_process_may_open_as_many_files_as_its_user() -> None:
    code = (
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 200)))\n"
        "from megatron_glue.config.process import prepare_process\n"
        "prepare_process()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True, capture_output=True, text=True
    )
    soft, hard = outcome.stdout.split()
    assert soft == hard != "64"
