"""Processes of this machine as /proc shows them: which one a number means, and what it does. Linux only.

A number alone is not enough before a process is killed: the kernel gives it to another one later.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process, told from a later one that got the same number.

    Attributes:
        pid: Its number.
        start_ticks: When it started, in the kernel's clock.
    """

    pid: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it runs; one that has ended and that nobody waited for does not."""
        status = status_of(self.pid)
        return status is not None and status.start_ticks == self.start_ticks and status.state not in "ZX"

    def kill(self) -> None:
        """kill -9, if it is still there."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ProcessStatus:
    """A part of /proc/PID/stat.

    Attributes:
        parent: Number of the process that started it.
        state: The kernel's letter, e.g. ``R`` running, ``S`` sleeping, ``T`` stopped, ``D`` waiting for a device.
        start_ticks: When it started, in the kernel's clock.
    """

    parent: int
    state: str
    start_ticks: int


def identify(pid: int) -> ProcessId:
    """The process that has a number now; one that never was alive if there is none."""
    status = status_of(pid)
    return ProcessId(pid, -1 if status is None else status.start_ticks)


def status_of(pid: int) -> ProcessStatus | None:
    """Read /proc/PID/stat; the name in it is in brackets and may hold anything.

    Returns:
        ``None`` if there is no such process, or no /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return ProcessStatus(parent=int(fields[1]), state=fields[0], start_ticks=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
