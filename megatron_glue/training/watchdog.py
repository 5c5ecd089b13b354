"""Notices that a run hangs, finds out which rank and where, writes stacks into the run's folder and ends the job.

A thread on every rank looks at the training thread's heartbeat. When it stands still for too long, or another rank says
so, the rank writes its stacks and reports over the store (not over collectives, which are what hangs). One rank judges
over the reports; a rank without a report is stopped, and a neighbour on its machine looks at it and kills it. Then all
ranks end with exit code 1, whatever their training threads wait for.

It sees no reason to act while a rank makes progress, however slowly, and touches no device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_glue.parallel.rank_board import RankBoard, run_bounded
from megatron_glue.training.exit_codes import EXIT_FAILED
from megatron_glue.training.hang import RankStatus, Verdict, examine, is_stopped, judge, write_stacks
from megatron_glue.training.heartbeat import Heartbeat

_LEAST_INTERVAL_S, _LARGEST_INTERVAL_S = 0.1, 10.0
_INTERVALS_PER_TIMEOUT = 20
_POLL_S = 0.05
_STANDARD_ERROR = 2


@dataclass(frozen=True)
class WatchPlace:
    """What a watchdog watches, and where it writes.

    Attributes:
        rank: This rank.
        folder: The run's.
        heartbeat: Of the training thread.
        finish_save: Waits some seconds for a save in the background; returns whether one was completed meanwhile.
    """

    rank: int
    folder: Path
    heartbeat: Heartbeat
    finish_save: Callable[[float], bool]


class Watchdog:
    """Watches for the length of a ``with`` block.

    Args:
        place: What, and where to write.
        timeout_s: Longest time without progress; 0 watches nothing.
        board: Where ranks leave notes; ``None`` for one process.
        end: Ends the process with an exit code, from any thread.
    """

    def __init__(
        self, place: WatchPlace, timeout_s: float, board: RankBoard | None, end: Callable[[int], object] = os._exit
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._board = board
        self._end = end
        self._interval_s = min(max(timeout_s / _INTERVALS_PER_TIMEOUT, _LEAST_INTERVAL_S), _LARGEST_INTERVAL_S)
        self._grace_s = max(3 * self._interval_s, 2.0)
        self._closing = threading.Event()
        self._is_called = threading.Event()
        self._first_rank: RankStatus | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        if self._timeout_s:
            self._start("watchdog", self._watch)
            if self._board is not None:
                self._start("watchdog-store", self._exchange)
        return self

    def __exit__(self, *_error: object) -> None:
        """Watch no longer."""
        self._closing.set()
        for thread in self._threads:
            # The store may not answer any more; then its thread is left behind.
            thread.join(1.0)
        if self._threads:
            faulthandler.cancel_dump_traceback_later()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        heartbeat, idle_s = self._place.heartbeat, 0.0
        count, then = heartbeat.count, time.monotonic()
        while not self._closing.wait(self._interval_s):
            # If a library holds the interpreter's lock for ever, no thread of Python runs, this one included; then C
            # writes the stacks to standard error, and the other ranks miss this one.
            faulthandler.dump_traceback_later(self._timeout_s + self._grace_s, exit=False, file=_STANDARD_ERROR)
            now = time.monotonic()
            # A job that was stopped as a whole and goes on must not take the pause for a hang.
            idle_s += min(now - then, 2 * self._interval_s)
            then = now
            if heartbeat.count != count:
                count, idle_s = heartbeat.count, 0.0
            if self._is_called.is_set() or idle_s >= self._timeout_s * heartbeat.patience:
                self._end_job(idle_s)
                return

    def _exchange(self) -> None:
        """Tell the other ranks where this one is, and hear whether one of them calls."""
        assert self._board is not None
        # A lost store (the run of another rank is over) is no hang: each rank still watches itself.
        with contextlib.suppress(RuntimeError, OSError):
            board = self._board.connect()
            while not self._closing.is_set():
                board.leave("status", RankStatus.of_process(board.rank, self._place.heartbeat).to_text())
                if self._first_rank is None and (note := board.note_of("status", 0)) is not None:
                    self._first_rank = RankStatus.from_text(note)
                if board.add("calls", 0):
                    self._is_called.set()
                    return
                self._closing.wait(self._interval_s)

    def _end_job(self, idle_s: float) -> None:
        place = self._place
        status = RankStatus.of_process(place.rank, place.heartbeat, with_place=True)
        folder = place.folder / "hangs" / f"iteration_{status.iteration:08d}"
        reason = f"no progress for {idle_s:.1f} s (--watchdog-timeout-s {self._timeout_s:g})"
        try:
            stacks = f"stacks are in {write_stacks(folder, status, reason)}"
        except OSError as error:
            stacks = f"stacks could not be written ({error})"
        verdict = self._agree(status)
        told = [verdict.text, f"this rank was {status.describe()}", stacks]
        if place.finish_save(self._grace_s):
            told.append("the checkpoint in the background was completed")
        own_silent = [each for each in verdict.silent if verdict.examiners.get(each.rank) == place.rank]
        told += [examine(folder, silent) for silent in own_silent]
        with contextlib.suppress(OSError, ValueError):
            print(f"error: [rank {place.rank}] {reason}: {'; '.join(told)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        self._wait_for_others(len(verdict.silent))
        for silent in own_silent:
            # Last: it cannot end itself, and its end wakes training threads that would tell of it in other words.
            silent.process.kill()
        self._end(EXIT_FAILED)

    def _agree(self, status: RankStatus) -> Verdict:
        """Report, and get the verdict over all reports."""
        if self._board is None:
            return Verdict("it hangs")
        found = run_bounded(lambda: self._report_and_hear(status), 3 * self._grace_s)
        if found is not None:
            return found
        text = "rank 0 hangs, or its launcher, or the way there: the store there does not answer"
        first = self._first_rank
        # Without a verdict of all ranks only a process that is stopped beyond doubt is looked at, and killed.
        if first is None or first.machine != status.machine or not is_stopped(first):
            return Verdict(text)
        return Verdict(text, (first,), {first.rank: status.rank})

    def _report_and_hear(self, status: RankStatus) -> Verdict:
        assert self._board is not None
        board = self._board.connect()
        is_judge = board.add("calls") == 1
        board.leave("report", status.to_text())
        board.add("reports")
        deadline = time.monotonic() + self._grace_s * (1 if is_judge else 2)
        if is_judge:
            while board.add("reports", 0) < board.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            reports, known = (
                {rank: RankStatus.from_text(note) for rank, note in board.notes(kind).items()}
                for kind in ("report", "status")
            )
            verdict = judge(reports, known, board.world_size)
            board.leave("verdict", verdict.to_text())
            board.add("verdicts", board.rank + 1)
            return verdict
        while time.monotonic() < deadline:
            if (judging_rank := board.add("verdicts", 0) - 1) >= 0:
                note = board.note_of("verdict", judging_rank)
                assert note is not None, "it is left before the number"
                return Verdict.from_text(note)
            time.sleep(_POLL_S)
        return Verdict("which rank hangs was not found out in time")

    def _wait_for_others(self, num_silent: int) -> None:
        """The process that holds the store must not leave before the others have read what is there."""

        def wait() -> bool:
            assert self._board is not None
            board, deadline = self._board.connect(), time.monotonic() + self._grace_s
            board.add("ready")
            while board.add("ready", 0) < board.world_size - num_silent and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return True

        if self._board is not None:
            run_bounded(wait, self._grace_s)
