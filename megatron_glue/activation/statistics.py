"""What moved, how long it took, and how much of that was hidden behind compute.

Times are kept as fences and turned into milliseconds only when someone asks, so that measuring does not make the host
wait. On a CUDA device the fences are timed events: the figures are those of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megatron_glue.activation.tiers import Fence, Transfer

MAX_OPEN_RECORDS = 4096
"""Older records are folded into the sums, which costs no wait: their copies ended thousands of blocks ago."""


@dataclass(frozen=True)
class ActivationStats:
    """Counts and times since the last ``reset_stats``.

    Attributes:
        num_offloads: Inputs that left the device.
        num_reloads: Inputs that backward asked for and got.
        offloaded_bytes: Bytes that left the device.
        copy_ms: Time that copies back took.
        reload_wait_ms: Time that compute stood still for them.
        compute_ms: Time from getting an input to giving its buffer back: recompute and backward of its block.
        requested_bytes: Most bytes of inputs that were away at one time, since the manager was built.
        held_bytes: Host memory or file bytes held for them now.
        buffer_bytes: Device bytes of the reload buffers now.
    """

    num_offloads: int = 0
    num_reloads: int = 0
    offloaded_bytes: int = 0
    copy_ms: float = 0.0
    reload_wait_ms: float = 0.0
    compute_ms: float = 0.0
    requested_bytes: int = 0
    held_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def overlap_efficiency(self) -> float:
        """Hidden copy time / min(copy, compute): 1.0 when all that could be hidden was, 0.0 without reloads."""
        possible_ms = min(self.copy_ms, self.compute_ms)
        if possible_ms <= 0.0:
            return 0.0
        return min(1.0, max(0.0, self.copy_ms - self.reload_wait_ms) / possible_ms)


@dataclass(frozen=True)
class TimelineEvent:
    """One bar of a timeline picture.

    Attributes:
        name: What happened.
        lane: Where: "offload", "reload" (the copy queues) or "compute".
        start_ms: Begin, since the last ``reset_stats``.
        end_ms: End.
    """

    name: str
    lane: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, eq=False)
class ReloadRecord:
    """The fences of one reload, in the order of compute.

    Attributes:
        transfer: The copy back.
        asked: Compute reached the point where it needs the input.
        received: Compute has it.
        returned: Compute gave the buffer back.
    """

    transfer: Transfer
    asked: Fence
    received: Fence
    returned: Fence


class StatisticsRecorder:
    """Collects fences.

    Args:
        mark: Returns a fence for now.
        elapsed_ms: Turns two fences into milliseconds.
        record_timeline: Keep every copy and wait for ``timeline``.
    """

    def __init__(
        self, mark: Callable[[], Fence], elapsed_ms: Callable[[Fence, Fence], float], record_timeline: bool
    ) -> None:
        self._mark = mark
        self._elapsed_ms = elapsed_ms
        self._record_timeline = record_timeline
        self._begin: Fence | None = None
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self._num_offloads = self._num_reloads = self._offloaded_bytes = 0
        self._copy_ms = self._wait_ms = self._compute_ms = 0.0
        self._open: deque[ReloadRecord] = deque()
        self._bars: list[tuple[str, str, Fence, Fence]] = []
        self._begin = self._mark() if self._record_timeline else None

    def add_offload(self, num_bytes: int, transfer: Transfer) -> None:
        """Count one input that leaves."""
        self._num_offloads += 1
        self._offloaded_bytes += num_bytes
        if self._record_timeline:
            self._bars.append(("offload", "offload", transfer.started, transfer.done))

    def add_reload(self, record: ReloadRecord) -> None:
        """Count one input that came back and was used."""
        self._num_reloads += 1
        self._open.append(record)
        if len(self._open) > MAX_OPEN_RECORDS:
            self._fold(self._open.popleft())
        if self._record_timeline:
            self._bars.append(("reload", "reload", record.transfer.started, record.transfer.done))
            self._bars.append(("wait", "compute", record.asked, record.received))
            self._bars.append(("block", "compute", record.received, record.returned))

    def summary(self, *, requested_bytes: int, held_bytes: int, buffer_bytes: int) -> ActivationStats:
        """Return all figures. The host waits for the last reload that was recorded."""
        while self._open:
            self._fold(self._open.popleft())
        return ActivationStats(
            num_offloads=self._num_offloads,
            num_reloads=self._num_reloads,
            offloaded_bytes=self._offloaded_bytes,
            copy_ms=self._copy_ms,
            reload_wait_ms=self._wait_ms,
            compute_ms=self._compute_ms,
            requested_bytes=requested_bytes,
            held_bytes=held_bytes,
            buffer_bytes=buffer_bytes,
        )

    def timeline(self) -> list[TimelineEvent]:
        """Return the bars since the last reset, in order of recording; empty unless asked for at the start."""
        return [
            TimelineEvent(name, lane, self._elapsed_ms(self._begin, start), self._elapsed_ms(self._begin, end))
            for name, lane, start, end in self._bars
        ]

    def _fold(self, record: ReloadRecord) -> None:
        self._copy_ms += self._elapsed_ms(record.transfer.started, record.transfer.done)
        self._wait_ms += self._elapsed_ms(record.asked, record.received)
        self._compute_ms += self._elapsed_ms(record.received, record.returned)
