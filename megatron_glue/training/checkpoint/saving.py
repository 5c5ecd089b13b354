"""When a run saves, and what a failed save means for it: it is told and counted, and training goes on.

A disk that is full, or a permission that was lost, costs the checkpoint and not the run: earlier checkpoints stay, and
the next save tries again. Only if the last save of a run fails has something been lost for good; then the run ends with
an error. A lost rank is no failed save: it ends the run as it does everywhere else.

Stands between the loop and ``store.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from megatron_glue.training.checkpoint.background import BackgroundWriter, SaveReport
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.state import TrainingState
from megatron_glue.training.checkpoint.store import CheckpointStore

_WORTH_TELLING_S = 0.1


class RunSaver:
    """Saves one run. Every method is called by all ranks at the same iterations.

    Args:
        store: Where to.
        say: Shows a line to the user.
        writer: Writes in the background; ``None``: the training thread writes and waits.

    Attributes:
        num_saved: Checkpoints published by this process.
        num_failed: Saves that failed.
        error: Why the newest save failed; ``None`` if it did not.
        stall_seconds: Time that training stood still for saves.
        written: Bytes of this rank, and seconds, of the newest save that was published; ``None`` before the first.
    """

    def __init__(
        self, store: CheckpointStore, say: Callable[[str], None] = print, writer: BackgroundWriter | None = None
    ) -> None:
        self.store = store
        self.say = say
        self.num_saved = self.num_failed = 0
        self.error: CheckpointError | None = None
        self.stall_seconds = 0.0
        self.written: tuple[int, float] | None = None
        self._writer = writer
        self._newest_step: int | None = None

    @classmethod
    def in_background(cls, store: CheckpointStore, device: torch.device, timeout: timedelta) -> RunSaver:
        """A saver whose checkpoints are written while training goes on."""
        return cls(store, writer=BackgroundWriter(store.write, store.ranks, device, timeout))

    @property
    def staged_bytes(self) -> int:
        """Host memory of the staged copy; 0 without one."""
        return self._writer.staging.held_bytes if self._writer is not None else 0

    def save(self, step: int, make_state: Callable[[], TrainingState]) -> None:
        """Save a step, or begin to. Nothing happens if it is on the disk already, or this was tried a moment ago.

        Args:
            step: Optimizer steps made so far.
            make_state: Collects the state, when a save before has been waited for.

        Raises:
            RuntimeError: If a rank was lost.
        """
        start = time.perf_counter()
        # Not what is known of the save in flight decides: ranks may learn of its end at different iterations.
        if step not in (self._newest_step, self.store.step_on_disk):
            self._newest_step = step
            self._wait(f"before step {step} can be saved")
            try:
                self._save(step, make_state())
            except CheckpointError as error:
                self._note(SaveReport(step, error, 0.0))
        self.stall_seconds += time.perf_counter() - start

    def _save(self, step: int, state: TrainingState) -> None:
        start = time.perf_counter()
        if self._writer is None:
            snapshot = self.store.snapshot(step, state)
            self.store.write(snapshot, self.store.ranks)
            self._note(SaveReport(step, None, time.perf_counter() - start, snapshot.num_bytes))
        else:
            self._writer.start(self.store.snapshot(step, state), self.store.ranks)

    def look(self) -> None:
        """Tell what became of a save in the background, if it has ended; costs nothing otherwise."""
        if self._writer is not None and (report := self._writer.take_report(wait=False)) is not None:
            self._note(report)

    def finish(self) -> None:
        """Wait for the save in flight, at the end of a run."""
        start = time.perf_counter()
        self._wait("before the run ends")
        self.stall_seconds += time.perf_counter() - start

    def finish_in_time(self, timeout_s: float) -> bool:
        """Wait for the save in flight, but not for ever, from any thread: the process is about to end.

        Returns:
            Whether one was in flight and has ended. What became of it is not told.
        """
        return self._writer is not None and self._writer.ends_in_time(timeout_s)

    def close(self) -> None:
        """Wait for the save in flight when a run leaves, however it does, and free memory. Raises nothing."""
        if self._writer is None:
            return
        if (step := self._writer.step_in_flight) is not None:
            self.say(f"finishing the checkpoint of step {step} before leaving")
        try:
            self.finish()
        except Exception as error:
            self.say(f"warning: a checkpoint was not completed: {' '.join(str(error).split())}")
        self._writer.close()

    def newest(self) -> Path | None:
        """The newest checkpoint."""
        return self.store.find_latest()

    def _wait(self, what_for: str) -> None:
        if self._writer is None or (step := self._writer.step_in_flight) is None:
            return
        start = time.perf_counter()
        report = self._writer.take_report(wait=True)
        seconds = time.perf_counter() - start
        if seconds > _WORTH_TELLING_S:
            self.say(f"waited {seconds:.1f} s for the checkpoint of step {step} {what_for}")
        if report is not None:
            self._note(report)

    def _note(self, report: SaveReport) -> None:
        if report.error is None:
            self.num_saved += 1
            self.written = report.num_bytes, report.seconds
            self.error, self.store.step_on_disk = None, report.step
            behind = "" if self._writer is None else f" ({report.seconds:.1f} s in the background)"
            self.say(f"saved checkpoint {self.store.path_of(report.step)}{behind}")
        elif isinstance(report.error, CheckpointError):
            self.num_failed += 1
            self.error = report.error
            self.say(f"warning: {report.error}")
        else:
            raise report.error
