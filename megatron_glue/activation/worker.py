"""A thread that runs copies one after another, and the fence that tells when one is done.

The CPU's stand-in for a copy stream and its events. A failed job does not end the thread: its fence carries the error,
and whoever waits for it raises it, so errors surface in the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class HostFence:
    """A moment on the host's clock, in the past or still to come."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._time_s = 0.0
        self._error: BaseException | None = None

    @classmethod
    def now(cls) -> HostFence:
        """Return a fence that is reached already."""
        fence = cls()
        fence.reach()
        return fence

    def reach(self, error: BaseException | None = None) -> None:
        """Let waiters go; with an error, let them raise it."""
        self._time_s = time.perf_counter()
        self._error = error
        self._reached.set()

    def wait(self) -> None:
        """Block until the fence is reached.

        Raises:
            BaseException: The error of the job behind the fence.
        """
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def settle(self) -> BaseException | None:
        """Block until the fence is reached and return its error instead of raising it."""
        self._reached.wait()
        return self._error

    @property
    def is_reached(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._reached.is_set()

    @property
    def time_s(self) -> float:
        """When it was reached, in seconds of ``time.perf_counter``. Blocks until then."""
        self._reached.wait()
        return self._time_s


class Worker:
    """A daemon thread with a queue. Jobs run in the order in which they were submitted.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The thread knows the queue only, so that an owner that nobody closed can still be collected.
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None] | None, after: Sequence[HostFence] = ()) -> tuple[HostFence, HostFence]:
        """Queue a job.

        Args:
            job: What to run (never None; the type allows letting go of it).
            after: Fences that it must wait for. If one carries an error, the job does not run and ends with that error.

        Returns:
            Fences that are reached when it begins and when it ends.
        """
        started, done = HostFence(), HostFence()

        def run() -> None:
            nonlocal job
            error = None
            try:
                for fence in after:
                    fence.wait()
                started.reach()
                assert job is not None
                job()
            except BaseException as caught:  # not lost: whoever waits for the fence raises it
                error = caught
                started.reach()
            job = None  # it holds tensors: whoever waits for the fence finds their memory free
            done.reach(error)

        self._jobs.put(run)
        return started, done

    def drain(self) -> None:
        """Block until what is queued has run, without raising what it raised."""
        _, done = self.submit(_nothing)
        done.wait()

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        self._jobs.put(None)
        self._thread.join()


def _nothing() -> None:
    """A job whose end tells that the jobs before it have ended."""


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
