"""Counts steps whose loss or gradient was not finite and losses that jump; stops the run when it is told to.

Every rank judges by numbers that are the same on all ranks (the global gradient norm, the summed loss), so all come to
the same end without talking. Nothing waits for the device: whether an update was skipped is known one step later, with
the flag that the schedule needs anyway; losses are looked at when they are read.

Called by the loop behind each step; the skip itself is the optimizer's (``optimizer.py``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from megatron_glue.config.fields import flag_of
from megatron_glue.training.nonfinite import name_first_nonfinite
from megatron_glue.training.session import Session, StepStart

SPIKE_WINDOW_STEPS = 100
_FEWEST_LOSSES = 20
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_SMALLEST_SPREAD = 0.01


class TrainingFaultError(RuntimeError):
    """The run goes no further; all ranks raise it in the same step, with the reason."""


class FaultWatch:
    """Follows one run.

    Args:
        session: At any iteration.
        say: Shows a line to the user.

    Attributes:
        num_in_a_row: Skipped steps at the end of those that are known.
    """

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self.num_in_a_row = 0
        self._session = session
        self._say = say
        self._num_skipped = session.optimizer.num_known_skips
        self._examined = session.iteration
        self._num_losses = len(session.metrics.losses)

    def after_step(self, start: StepStart) -> None:
        """Look at the updates that are known by now; every rank calls this after every step.

        Args:
            start: Where the step began that has just been run.

        Raises:
            TrainingFaultError: After ``--max-nonfinite-steps`` skipped ones in a row.
        """
        session, limit = self._session, self._session.config.faults.max_nonfinite_steps
        self._take(session.optimizer.num_known_skips, session.iteration - 1)
        if self.num_in_a_row:
            # From the first one on the host waits for each: the step to run again must be one of them.
            self._take(session.optimizer.num_skipped_updates, session.iteration)
        if not limit or self.num_in_a_row < limit:
            return
        count, last = self.num_in_a_row, session.iteration
        found = name_first_nonfinite(session, start)
        raise TrainingFaultError(
            f"loss or gradient of the last {count} steps (to iteration {last}) was not finite, "
            f"{flag_of('max_nonfinite_steps')} is {limit}; running iteration {last} again found: {found}; nothing was "
            "saved: go on from the last checkpoint, with --detect-anomaly for the operator"
        )

    def after_flush(self) -> None:
        """Look at the losses that were read since the last call.

        Raises:
            TrainingFaultError: If one is a spike and ``--loss-spike-action`` is ``stop``.
        """
        metrics, faults = self._session.metrics, self._session.config.faults
        first, self._num_losses = self._num_losses, len(metrics.losses)
        for index in find_spikes(metrics.losses, first, faults.loss_spike_threshold):
            metrics.num_loss_spikes += 1
            usual = statistics.median(finite_before(metrics.losses, index))
            told = (
                f"loss spike in iteration {index + 1}: {metrics.losses[index]:.4f}, usual {usual:.4f}, gradient norm "
                f"{metrics.grad_norms[index]:.3f} ({flag_of('loss_spike_threshold')} {faults.loss_spike_threshold:g})"
            )
            if faults.loss_spike_action == "stop":
                raise TrainingFaultError(f"{told}; nothing was saved: go on from the last checkpoint")
            self._say(f"warning: {told}")

    def _take(self, num_skipped: int, iteration: int) -> None:
        """Take over what is known up to an iteration, one more than the last time."""
        if iteration <= self._examined:
            return
        self._examined = iteration
        if num_skipped == self._num_skipped:
            self.num_in_a_row = 0
            return
        self.num_in_a_row += num_skipped - self._num_skipped
        self._num_skipped = num_skipped
        limit = self._session.config.faults.max_nonfinite_steps
        stops = f", {limit} in a row stop the run" if limit else ""
        self._say(
            f"warning: loss or gradient of iteration {iteration} is not finite: skipped on all ranks "
            f"({self.num_in_a_row} in a row{stops}; {num_skipped} in all)"
        )


def finite_before(losses: Sequence[float], index: int) -> list[float]:
    """The finite ones among the ``SPIKE_WINDOW_STEPS`` losses before one."""
    return [loss for loss in losses[max(index - SPIKE_WINDOW_STEPS, 0) : index] if math.isfinite(loss)]


def find_spikes(losses: Sequence[float], first: int, threshold: float) -> list[int]:
    """Find losses far above what is usual. Median and median absolute deviation, which spikes themselves hardly move.

    Args:
        losses: Of all steps, nats per token.
        first: Index of the first one to judge.
        threshold: Spreads above the median; 0 finds none.

    Returns:
        Indices, ascending. A loss that is not finite is none, and nothing is one before 20 losses are known.
    """
    if not threshold:
        return []
    spikes = []
    for index in range(first, len(losses)):
        window = finite_before(losses, index)
        if len(window) < _FEWEST_LOSSES or not math.isfinite(losses[index]):
            continue
        usual = statistics.median(window)
        deviation = statistics.median(abs(loss - usual) for loss in window)
        if losses[index] > usual + threshold * max(_MAD_TO_DEVIATION * deviation, _SMALLEST_SPREAD * abs(usual)):
            spikes.append(index)
    return spikes
