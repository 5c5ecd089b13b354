"""Writes checkpoints behind the training thread, one at a time.

The training thread takes the snapshot and waits until it is staged; a thread of this file writes, audits, publishes and
prunes, over a process group of its own. What became of it is told when the training thread asks, which it does between
steps and before it leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.ranks import Ranks
from megatron_glue.training.checkpoint.staging import HostStaging
from megatron_glue.training.checkpoint.write import Snapshot, not_saved


@dataclass(frozen=True)
class SaveReport:
    """What became of a save.

    Attributes:
        step: Its step.
        error: Why it failed; ``None`` if it is published.
        seconds: Time from its start to its end.
        num_bytes: What this rank wrote of it.
    """

    step: int
    error: Exception | None
    seconds: float
    num_bytes: int = 0


class BackgroundWriter:
    """The thread, its group and its copy of the state. All ranks build it and call it alike.

    Args:
        write: Writes and publishes a snapshot over the given ranks.
        ranks: The ranks as the training thread knows them.
        device: Where the run computes.
        timeout: Longest wait for another rank.
    """

    def __init__(
        self, write: Callable[[Snapshot, Ranks], None], ranks: Ranks, device: torch.device, timeout: timedelta
    ) -> None:
        self._write = write
        group = None if ranks.group is None else dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = replace(ranks, group=group)
        self.staging = HostStaging(device)
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._step = -1

    @property
    def step_in_flight(self) -> int | None:
        """Step that is being written, or whose report nobody took yet."""
        return None if self._thread is None else self._step

    def start(self, snapshot: Snapshot, ranks: Ranks) -> None:
        """Stage a snapshot and begin to write it. The one before must have been reported.

        Args:
            snapshot: It may change after this call.
            ranks: All ranks, with the training thread's group.

        Raises:
            CheckpointError: On all ranks, if one cannot stage its part.
        """
        assert self._thread is None, "one save at a time"
        try:
            staged = replace(snapshot, parts=ranks.together(lambda: self.staging.stage(snapshot.parts)))
        except CheckpointError as error:
            raise not_saved(snapshot.step, error) from error
        self._step = snapshot.step
        # A daemon: a user who interrupts the wait for it is let go.
        self._thread = threading.Thread(target=self._run, args=(staged,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def take_report(self, *, wait: bool) -> SaveReport | None:
        """What became of the save in flight.

        Args:
            wait: Wait for its end.

        Returns:
            Its report, once; ``None`` if there is none, or it goes on.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        return self._report

    def ends_in_time(self, timeout_s: float) -> bool:
        """Wait for the save in flight without taking its report.

        Returns:
            Whether one was in flight and has ended without an error.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return False
        thread.join(timeout_s)
        return not thread.is_alive() and self._report is not None and self._report.error is None

    def close(self) -> None:
        """Free the staged copy; the save in flight has been waited for."""
        if self._thread is None:
            self.staging.close()

    def _run(self, snapshot: Snapshot) -> None:
        start, error = time.perf_counter(), None
        try:
            self._write(snapshot, self._ranks)
        except Exception as caught:
            error = caught
        self._report = SaveReport(snapshot.step, error, time.perf_counter() - start, snapshot.num_bytes)
