"""What moved, how long it took, and how much of that was hidden behind compute.

Times are kept as fences and turned into milliseconds only when someone asks, so that measuring does not make the host
wait. On a CUDA device the fences are timed events: the figures are those of the device.

    overlap efficiency = hidden copy time / min(copy time, compute time)

all three summed over the reloads of a step or a run. Copy time is what the copies back took. Hidden is the part of each
copy during which compute did not stand still for its input: a wait ends with its copy, so that is the copy's time less
the wait's, and nothing where the wait began before the copy. Compute time is that of the blocks that used the inputs.
An efficiency says nothing about how much there was to hide: read it beside the wall-clock time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields

from megatron_glue.activation.tiers import Fence, Transfer

MAX_OPEN_RECORDS = 4096
"""Older records are folded into the sums, which costs no wait: their copies ended thousands of blocks ago."""


@dataclass(frozen=True)
class ReloadTimes:
    """Sums over some reloads, e.g. those of one step.

    Attributes:
        copy_ms: Time that copies back took.
        hidden_copy_ms: The part of it during which compute did not wait for that copy.
        reload_wait_ms: Time that compute stood still for them.
        compute_ms: Time from getting an input to giving it back: recompute and backward of its block. Blocks whose
            inputs stayed on the device count too, since their compute hides copies as well.
    """

    copy_ms: float = 0.0
    hidden_copy_ms: float = 0.0
    reload_wait_ms: float = 0.0
    compute_ms: float = 0.0

    @property
    def overlap_efficiency(self) -> float:
        """Hidden copy time / min(copy, compute): 1.0 when all that could be hidden was, 0.0 without reloads.

        Copies may also hide behind compute between blocks (the loss), so the quotient is cut off at 1.
        """
        possible_ms = min(self.copy_ms, self.compute_ms)
        return min(1.0, self.hidden_copy_ms / possible_ms) if possible_ms > 0.0 else 0.0


NO_TIMES = astuple(ReloadTimes())


@dataclass(frozen=True)
class ActivationStats(ReloadTimes):
    """Counts and times since the last ``reset_stats``.

    Attributes:
        num_offloads: Inputs that left the device.
        num_reloads: Inputs that backward asked for and got.
        offloaded_bytes: Bytes that left the device.
        requested_bytes: Most bytes of inputs that were away at one time, since the manager was built.
        held_bytes: Host memory or file bytes held for them now.
        buffer_bytes: Device bytes of the reload buffers now.
        num_residents: Inputs that stayed on the device, such as that of the last block, which backward wants first.
        resident_bytes: Most bytes of them at one time.
    """

    num_offloads: int = 0
    num_reloads: int = 0
    offloaded_bytes: int = 0
    requested_bytes: int = 0
    held_bytes: int = 0
    buffer_bytes: int = 0
    num_residents: int = 0
    resident_bytes: int = 0


@dataclass(frozen=True)
class BlockCall:
    """Which block call something belongs to.

    Attributes:
        micro_batch: Number of the micro-batch in its step.
        block: Position among the block calls of that micro-batch that the offloader knows, in the order of forward.
    """

    micro_batch: int
    block: int


@dataclass(frozen=True)
class TimelineEvent:
    """One bar of a timeline picture.

    Attributes:
        name: "forward", "offload" (the copy away), "reload" (the copy back), "wait" (compute stands still for it) or
            "backward" (recompute and backward of a block).
        lane: Where: "offload", "reload" (the copy queues) or "compute".
        call: The block call.
        step: Steps begun since the last ``reset_stats``, this one included.
        start_ms: Begin, since the last ``reset_stats``.
        end_ms: End.
    """

    name: str
    lane: str
    call: BlockCall
    step: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, eq=False)
class ReloadRecord:
    """The fences of one reload, in the order of compute.

    Attributes:
        call: The block call that the input belongs to.
        transfer: The copy back; None if the input stayed on the device.
        asked: Compute reached the point where it needs the input.
        received: Compute has it.
        returned: Compute gave the buffer back.
    """

    call: BlockCall
    transfer: Transfer | None
    asked: Fence
    received: Fence
    returned: Fence


@dataclass(frozen=True, eq=False)
class _Bar:
    name: str
    lane: str
    call: BlockCall
    step: int
    begin: Fence
    end: Fence


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
        self._record_timeline = self._has_timeline = record_timeline
        self._begin: Fence | None = None
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self._num_offloads = self._num_reloads = self._offloaded_bytes = 0
        self._num_residents = self._resident_bytes = 0
        self._step_sums = array("d", NO_TIMES)
        self._open: deque[tuple[int, ReloadRecord]] = deque()
        self._bars: list[_Bar] = []
        self._is_repetition = False
        self._observed_from = 0
        self._begin = self._mark() if self._record_timeline else None

    def start_timeline(self) -> None:
        """Start anew, and keep every bar from here on."""
        self._record_timeline = self._has_timeline = True
        self.reset()

    def start_observing(self) -> None:
        """Keep every bar until ``stop_observing``; figures go on, and so does a timeline that was asked for."""
        if not self._record_timeline:
            self._record_timeline = True
            self._begin = self._mark()
        self._observed_from = len(self._bars)

    def stop_observing(self) -> list[TimelineEvent]:
        """Return the bars since ``start_observing``, or since a later reset. The host waits for the device."""
        events = self._events(self._bars[self._observed_from :])
        self._record_timeline = self._has_timeline
        if not self._has_timeline:
            self._bars.clear()
        return events

    def begin_step(self) -> None:
        """Later reloads belong to a new step. Those from before the first step count in the sums only."""
        if not self._is_repetition:
            self._step_sums.extend(NO_TIMES)
        self._is_repetition = False

    def repeat_step(self) -> None:
        """The next step is a repetition and counts into the present one, as its wall time does."""
        self._is_repetition = True

    def mark(self) -> Fence:
        """Return a fence for now."""
        return self._mark()

    def begin_forward(self) -> Fence | None:
        """Return a fence before a block's forward, if there is a timeline to draw."""
        return self._mark() if self._record_timeline else None

    def end_forward(self, call: BlockCall, began: Fence | None) -> None:
        """Take note of a block's forward that began at a fence of ``begin_forward``."""
        if began is not None:
            self._add_bar("forward", "compute", call, began, self._mark())

    def add_offload(self, call: BlockCall, num_bytes: int, transfer: Transfer) -> None:
        """Count one input that leaves."""
        self._num_offloads += 1
        self._offloaded_bytes += num_bytes
        if self._record_timeline:
            self._add_bar("offload", "offload", call, transfer.started, transfer.done)

    def add_reload(self, record: ReloadRecord) -> None:
        """Count one input that came back and was used."""
        assert record.transfer is not None, "it came back"
        self._num_reloads += 1
        self._add_record(record)
        if self._record_timeline:
            self._add_bar("reload", "reload", record.call, record.transfer.started, record.transfer.done)
            self._add_bar("wait", "compute", record.call, record.asked, record.received)
            self._add_bar("backward", "compute", record.call, record.received, record.returned)

    def add_resident(self, resident_bytes: int) -> None:
        """Count one input that stays on the device.

        Args:
            resident_bytes: Size of all that stay there now.
        """
        self._num_residents += 1
        self._resident_bytes = max(self._resident_bytes, resident_bytes)

    def add_resident_backward(self, call: BlockCall, received: Fence) -> None:
        """Take note of the backward, from a fence of ``mark`` until now, of a block whose input stayed."""
        returned = self._mark()
        self._add_record(ReloadRecord(call, None, received, received, returned))
        if self._record_timeline:
            self._add_bar("backward", "compute", call, received, returned)

    def summary(self, *, requested_bytes: int, held_bytes: int, buffer_bytes: int) -> ActivationStats:
        """Return all figures. The host waits for the last reload that was recorded."""
        self._fold_all()
        return ActivationStats(
            **asdict(sum_times([self._times_of(step) for step in range(self._num_steps + 1)])),
            num_offloads=self._num_offloads,
            num_reloads=self._num_reloads,
            offloaded_bytes=self._offloaded_bytes,
            requested_bytes=requested_bytes,
            held_bytes=held_bytes,
            buffer_bytes=buffer_bytes,
            num_residents=self._num_residents,
            resident_bytes=self._resident_bytes,
        )

    def step_times(self, last_steps: int | None = None) -> list[ReloadTimes]:
        """Return the times of each step since the last reset. The host waits for the last reload that was recorded.

        Args:
            last_steps: Only the newest N steps; ``None``: all.
        """
        self._fold_all()
        num_steps = self._num_steps if last_steps is None else min(last_steps, self._num_steps)
        return [self._times_of(step) for step in range(self._num_steps - num_steps + 1, self._num_steps + 1)]

    def timeline(self) -> list[TimelineEvent]:
        """Return the bars since the last reset, in order of recording; empty unless asked for at the start."""
        return self._events(self._bars)

    def _events(self, bars: Sequence[_Bar]) -> list[TimelineEvent]:
        return [
            TimelineEvent(
                bar.name,
                bar.lane,
                bar.call,
                bar.step,
                self._elapsed_ms(self._begin, bar.begin),
                self._elapsed_ms(self._begin, bar.end),
            )
            for bar in bars
        ]

    def _add_bar(self, name: str, lane: str, call: BlockCall, begin: Fence, end: Fence) -> None:
        self._bars.append(_Bar(name, lane, call, self._num_steps, begin, end))

    def _add_record(self, record: ReloadRecord) -> None:
        self._open.append((self._num_steps, record))
        if len(self._open) > MAX_OPEN_RECORDS:
            self._fold(*self._open.popleft())

    def _fold_all(self) -> None:
        while self._open:
            self._fold(*self._open.popleft())

    def _fold(self, step: int, record: ReloadRecord) -> None:
        transfer = record.transfer
        copy_ms = 0.0 if transfer is None else self._elapsed_ms(transfer.started, transfer.done)
        wait_ms = self._elapsed_ms(record.asked, record.received)
        compute_ms = self._elapsed_ms(record.received, record.returned)
        times = (copy_ms, max(0.0, copy_ms - wait_ms), wait_ms, compute_ms)
        for column, value in enumerate(times, start=step * len(times)):
            self._step_sums[column] += value

    def _times_of(self, step: int) -> ReloadTimes:
        width = len(NO_TIMES)
        return ReloadTimes(*self._step_sums[step * width : (step + 1) * width])

    @property
    def _num_steps(self) -> int:
        """Steps that began since the last reset; reloads from before the first are those of step 0."""
        return len(self._step_sums) // len(NO_TIMES) - 1


def sum_times(several: Sequence[ReloadTimes]) -> ReloadTimes:
    """Add up times, field by field."""
    return ReloadTimes(
        **{field.name: sum(getattr(times, field.name) for times in several) for field in fields(ReloadTimes)}
    )
