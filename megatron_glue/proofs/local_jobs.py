"""Training jobs on this machine that can be watched, killed and started again: real processes, a real launcher.

A *warm* job starts from a forkserver that has torch imported, so a start costs a fraction of a second instead of
several: with one rank the process runs ``app.main``; with several, torch's elastic agent, which is what torchrun is a
command line for, runs in the first process and forks the ranks. A *cold* job is the command as users type it,
interpreter start included. Linux only: processes are followed through /proc.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_glue.config.environment import set_environment_default
from megatron_glue.config.process import prepare_process
from megatron_glue.parallel.process_id import ProcessId, identify, status_of
from megatron_glue.training.app import main
from megatron_glue.training.presets import GPT_DEFAULTS

ENTRY_POINT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
PRELOADED = (
    "megatron_glue.proofs.local_jobs",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
_POLL_S = 0.002


class LocalJob:
    """A running job.

    Args:
        argv: Words behind the entry point's name.
        world_size: Ranks; one needs no launcher.
        log_path: Where standard output and errors of all its processes go.
        is_cold: Start the command itself.
    """

    def __init__(self, argv: Sequence[str], world_size: int, log_path: Path, *, is_cold: bool = False) -> None:
        self.world_size = world_size
        self.log_path = log_path
        self._followed: set[ProcessId] = set()
        # What an earlier job has said must not be taken for this one's words.
        log_path.write_bytes(b"")
        if is_cold:
            with log_path.open("ab") as log:
                command = [*_command(world_size), *argv]
                self._root = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # noqa: S603
        else:
            context = multiprocessing.get_context("forkserver")
            # The job holds one end and this process the other: when this process dies, the job ends with it.
            job_end, self._own_end = context.Pipe(duplex=False)
            self._root = context.Process(target=_run_job, args=(list(argv), world_size, str(log_path), job_end))
            self._root.start()
            job_end.close()
        assert self._root.pid is not None
        self.launcher = identify(self._root.pid)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the first process; ``None`` while it runs, negative for a signal."""
        return self._root.poll() if isinstance(self._root, subprocess.Popen) else self._root.exitcode

    def ranks(self) -> list[ProcessId]:
        """The training processes that run now."""
        if self.world_size == 1:
            return [self.launcher] if self.launcher.is_alive else []
        return _children_of(self.launcher.pid)

    def processes(self) -> list[ProcessId]:
        """All processes of the job that are known, also those that ended."""
        self._followed |= {self.launcher, *self.ranks()}
        return list(self._followed)

    def log(self) -> str:
        """What the job has said so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def wait(self, timeout_s: float) -> list[ProcessId]:
        """Wait until no process of the job runs and the exit code of the first is known.

        Args:
            timeout_s: Longest wait.

        Returns:
            What still runs then; empty if all have ended.
        """
        # The forkserver tells the code some time after the process has ended.
        wait_until(
            lambda: not any(process.is_alive for process in self.processes()) and self.exit_code is not None, timeout_s
        )
        return [process for process in self.processes() if process.is_alive]

    def end(self) -> None:
        """Kill whatever is left of it."""
        for process in self.processes():
            process.kill()
        self._root.join() if not isinstance(self._root, subprocess.Popen) else self._root.wait()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition.

    Args:
        condition: What to wait for.
        timeout_s: Longest wait.

    Returns:
        Whether it came true.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _command(world_size: int) -> list[str]:
    if world_size == 1:
        return [sys.executable, str(ENTRY_POINT)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return [sys.executable, *launcher, str(ENTRY_POINT)]


def _run_job(argv: list[str], world_size: int, log_path: str, tool: Connection) -> None:
    """First process of a warm job."""
    threading.Thread(target=_end_with, args=(tool,), daemon=True).start()
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    set_environment_default("GLOO_SOCKET_IFNAME", "lo")
    set_environment_default("OMP_NUM_THREADS", "1")
    if world_size == 1:
        raise SystemExit(_run_rank(argv))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _run_rank)(argv)


def _end_with(tool: Connection) -> None:
    """Die when the tool has died; it never sends anything. The forkserver would keep its processes alive."""
    with contextlib.suppress(EOFError, OSError):
        tool.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_rank(argv: list[str]) -> int:
    """One rank, as the entry points begin it."""
    # A forked rank has inherited the agent's handlers. They run between two lines of Python, so a rank that waits for
    # its peers inside gloo would outlive SIGTERM by half a minute; one that torchrun starts dies at once.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_process()
    code = main(GPT_DEFAULTS, argv)
    if code:
        # The agent looks at the exit code, not at what is returned.
        raise SystemExit(code)
    return code


def _children_of(pid: int) -> list[ProcessId]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := status_of(int(entry.name))) is not None and status.parent == pid:
            found.append(ProcessId(int(entry.name), status.start_ticks))
    return sorted(found, key=lambda process: (process.start_ticks, process.pid))
