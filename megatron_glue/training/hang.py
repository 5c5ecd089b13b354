"""What is found out about a run that hangs: where each rank is, which one the others wait for, and its stacks.

Here is what one rank can tell of itself and of its neighbours, and the judgement over what all have told. When to ask
and how to end is ``watchdog.py``'s business.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron_glue.parallel.process_id import ProcessId, identify, status_of
from megatron_glue.training.heartbeat import Heartbeat

_PACKAGE = f"{os.sep}megatron_glue{os.sep}"
_COLLECTIVES_FILE = "distributed_c10d.py"
_WAITS = frozenset({"wait", "synchronize"})
_PYSPY_TIMEOUT_S = 20.0
_SHOWN = 3
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device", "Z": "dead", "X": "dead"}
"""Letters of /proc for processes that make no progress, and what they mean."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank tells about itself from time to time.

    Attributes:
        rank: Who.
        host: Name of its machine.
        machine: The same for processes that see each other's numbers: the machine's boot and the namespace.
        pid: Its process.
        start_ticks: When that started (:class:`ProcessId`).
        count: Phases it has begun.
        phase: The present one.
        iteration: Its step, counted from 1.
        waits_in: The collective that it waits in; empty: none that can be seen. Only in the report of a hang.
        place: Innermost line of this package. Only in the report of a hang.
    """

    rank: int
    host: str
    machine: str
    pid: int
    start_ticks: int
    count: int
    phase: str
    iteration: int
    waits_in: str = ""
    place: str = ""

    @property
    def process(self) -> ProcessId:
        """Its process, for this machine."""
        return ProcessId(self.pid, self.start_ticks)

    @classmethod
    def of_process(cls, rank: int, heartbeat: Heartbeat, *, with_place: bool = False) -> RankStatus:
        """This process now.

        Args:
            rank: This rank.
            heartbeat: Of its training thread.
            with_place: Also look where its threads are.
        """
        own = identify(os.getpid())
        waits_in, place = find_place(sys._current_frames()) if with_place else ("", "")
        return cls(
            rank=rank,
            host=socket.gethostname(),
            machine=_machine(),
            pid=own.pid,
            start_ticks=own.start_ticks,
            count=heartbeat.count,
            phase=heartbeat.phase,
            iteration=heartbeat.iteration,
            waits_in=waits_in,
            place=place,
        )

    @classmethod
    def from_text(cls, text: str) -> RankStatus:
        """Read what :meth:`to_text` wrote."""
        return cls(**json.loads(text))

    def to_text(self) -> str:
        """As a note for other ranks."""
        return json.dumps(asdict(self))

    def describe(self) -> str:
        """Where it is, in words."""
        waits = f", waits in {self.waits_in}" if self.waits_in else ""
        at = f" at {self.place}" if self.place else ""
        return f"in {self.phase} of iteration {self.iteration}{waits}{at}"


@dataclass(frozen=True)
class Verdict:
    """Who hangs, as all ranks tell it.

    Attributes:
        text: In words.
        silent: Ranks that gave no sign, the last they told of themselves.
        examiners: Rank on the same machine that looks at each of them and ends it, by the silent rank.
    """

    text: str
    silent: tuple[RankStatus, ...] = ()
    examiners: Mapping[int, int] = field(default_factory=dict)

    def to_text(self) -> str:
        """As a note for other ranks."""
        pairs = list(self.examiners.items())
        return json.dumps({"text": self.text, "silent": [asdict(each) for each in self.silent], "examiners": pairs})

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        """Read what :meth:`to_text` wrote."""
        values = json.loads(text)
        silent = tuple(RankStatus(**each) for each in values["silent"])
        return cls(values["text"], silent, dict(values["examiners"]))


def judge(reports: Mapping[int, RankStatus], last_known: Mapping[int, RankStatus], world_size: int) -> Verdict:
    """Say which rank the others wait for.

    Args:
        reports: What ranks told when they were asked, by rank.
        last_known: What ranks told before, by rank.
        world_size: Number of ranks.

    Returns:
        Ranks that gave no sign, if there are any; else those behind the others; else those that wait in no collective.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        known = tuple(last_known[rank] for rank in silent if rank in last_known)
        examiners = {
            status.rank: min(neighbours)
            for status in known
            if (neighbours := [rank for rank, report in reports.items() if report.machine == status.machine])
        }
        told = _list(
            f"rank {each.rank} (pid {each.pid} on {each.host}, last {each.describe()})" for each in known[:_SHOWN]
        )
        return Verdict(f"{told or _names(silent)} hangs: no sign of life ({_names(silent)})", known, examiners)
    newest = max(report.count for report in reports.values())
    behind = [report for report in reports.values() if report.count < newest]
    if behind:
        oldest = min(report.count for report in behind)
        return _blame([report for report in behind if report.count == oldest], "hangs, behind the others")
    busy = [report for report in reports.values() if not report.waits_in]
    if busy and len(busy) < len(reports):
        return _blame(busy, "hangs while the others wait in a collective")
    return _blame(list(reports.values()), "stands still, and no rank is behind another")


def _blame(ranks: Sequence[RankStatus], what: str) -> Verdict:
    told = _list(f"rank {each.rank} ({each.describe()})" for each in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return Verdict(f"{told}{more} {what}")


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _list(parts: Any) -> str:
    return ", ".join(parts)


def find_place(frames: Mapping[int, FrameType]) -> tuple[str, str]:
    """Find the collective that a process waits in, from the stacks of its threads: it costs nothing until it is asked.

    Args:
        frames: Innermost frame by thread, as ``sys._current_frames`` returns them.

    Returns:
        Name of the collective (or ``wait``; empty where no thread is in one), and the innermost line of this package in
        that thread, else in the main thread.
    """
    main = threading.main_thread().ident
    watchers = {thread.ident for thread in threading.enumerate() if thread.name in _WATCHERS}
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident in watchers:
            continue
        collective, place = _place_in(frames[ident])
        if collective:
            return collective, place
    return "", _place_in(frames.get(main or 0))[1]


_WATCHERS = ("watchdog", "watchdog-store", "watchdog-call", "signal-listener")


def _place_in(frame: FrameType | None) -> tuple[str, str]:
    collective, place = "", ""
    while frame is not None and not place:
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES_FILE):
            collective = code.co_name
        elif _PACKAGE in code.co_filename:
            short = code.co_filename[code.co_filename.rindex(_PACKAGE) + 1 :]
            place = f"{short}:{frame.f_lineno} ({code.co_name})"
            if not collective and code.co_name in _WAITS:
                collective = code.co_name
        frame = frame.f_back
    return collective, place


def write_stacks(folder: Path, status: RankStatus, reason: str) -> Path:
    """Write the Python stacks of all threads of this process, and torch's record of collectives where it keeps one.

    Args:
        folder: Made if missing.
        status: This rank.
        reason: Why.

    Returns:
        The file with the stacks.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{status.rank:05d}.stacks.txt"
    with path.open("w", encoding="utf-8") as file:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        file.write(f"{stamp} rank {status.rank}, pid {status.pid} on {status.host}\n{reason}\n{status.describe()}\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    with contextlib.suppress(AttributeError, RuntimeError, OSError):
        record = dist.distributed_c10d._C._distributed_c10d._dump_fr_trace_json()  # pyright: ignore
        if record:
            (folder / f"rank_{status.rank:05d}.collectives.json").write_bytes(record)
    return path


def examine(folder: Path, status: RankStatus) -> str:
    """Look at a process of this machine that gives no sign.

    Args:
        folder: Where its stacks go, if py-spy is installed.
        status: What it last told of itself.

    Returns:
        What was found, in words.
    """
    if not status.process.is_alive:
        return f"process {status.pid} of rank {status.rank} is gone"
    found = status_of(status.pid)
    state = STATES.get(found.state, f"in state {found.state}") if found is not None else "gone"
    stacks = _spy(status.pid, folder / f"rank_{status.rank:05d}.py-spy.txt")
    return f"process {status.pid} of rank {status.rank} is {state}, {stacks}; it is killed"


def is_stopped(status: RankStatus) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, a debugger)."""
    found = status_of(status.pid)
    return found is not None and found.start_ticks == status.start_ticks and found.state in "Tt"


def _spy(pid: int, path: Path) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return "its stacks unknown (py-spy is not installed)"
    try:
        # Without pausing it: a stopped process never comes to the point that py-spy would wait for.
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        run = subprocess.run(command, capture_output=True, timeout=_PYSPY_TIMEOUT_S, check=False)  # noqa: S603
        if run.returncode:
            return f"its stacks unknown (py-spy: {' '.join(run.stderr.decode(errors='replace').split())[:200]})"
        path.write_bytes(run.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its stacks unknown (py-spy: {error})"
    return f"its stacks are in {path}"


def _machine() -> str:
    """The same for two processes if a number means the same process to both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
