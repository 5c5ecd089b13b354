"""How a run is asked to stop between two steps: by a signal to any rank, or because its time is up.

A signal may reach one rank only, and ranks must not stop at different iterations. So each step begins a vote: every
rank says what it was asked, the all-reduce runs beside the step on the host's own group, and all ranks read the same
answer at the step's end. On a GPU nothing waits for the device.

Signals are taken by a thread. A Python handler runs between two lines of Python, and a rank that waits inside a
collective comes to no next line; the thread hears the second signal there too, and ends the process.

Stands beside the loop, which saves and stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import Pending, start_all_reduce_max_
from megatron_glue.training.exit_codes import EXIT_OF_SIGNAL

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REPEAT_WINDOW_S = 3.0
"""A terminal and a scheduler signal the whole process group, and torchrun passes on what it has got itself: one request
arrives twice within moments. Only what comes later than this asks again."""

_TIME_IS_UP = 1000  # above the number of any signal
_RANKS = 2**32


@dataclass(frozen=True)
class StopRequest:
    """Why all ranks stop.

    Attributes:
        rank: The lowest rank that was asked.
        signal_number: What it got; ``None``: its time is up.
    """

    rank: int
    signal_number: int | None

    def describe(self) -> str:
        """The reason, in words."""
        if self.signal_number is None:
            return "time is up (--exit-duration-in-mins)"
        return f"{signal.Signals(self.signal_number).name} on rank {self.rank}"


class SignalListener:
    """Takes ``STOP_SIGNALS`` for the length of a ``with`` block: one is remembered, a second ends the process.

    Outside the main thread, where Python lets nobody take signals, it hears none.

    Args:
        rank: This rank, for what it says.
        end: Ends the process with an exit code, from any thread.

    Attributes:
        received: Number of the first signal; ``None`` before.
        rank: This rank.
    """

    def __init__(self, rank: int, end: Callable[[int], object] = os._exit) -> None:
        self.received: int | None = None
        self.rank = rank
        self._end = end
        self._received_at = 0.0
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SignalListener:
        """Take over the signals."""
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        self._ends = reading, writing
        self._thread = threading.Thread(target=self._listen, args=(reading,), name="signal-listener", daemon=True)
        self._thread.start()
        # The C handler writes the signal's number there at once, wherever the main thread is.
        self._wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _stay_alive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        """Give the signals back."""
        if self._ends is None or self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._wakeup_before)
        reading, writing = self._ends
        writing.close()
        self._thread.join()
        reading.close()
        self._ends = None

    def _listen(self, reading: socket.socket) -> None:
        while numbers := reading.recv(64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._take(number)

    def _take(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
            logger.warning(
                "%s on rank %d: all ranks save and stop at a step's end; again in %.0f s or later: end at once",
                *(name, self.rank, REPEAT_WINDOW_S),
            )
        elif now - self._received_at >= REPEAT_WINDOW_S:
            with contextlib.suppress(OSError, ValueError):
                line = f"error: [rank {self.rank}] second signal ({name}): ended at once, without a checkpoint"
                print(line, file=sys.stderr, flush=True)
            self._end(EXIT_OF_SIGNAL + number)


def _stay_alive(_number: int, _frame: FrameType | None) -> None:
    """The listening thread does the work."""


class StopVote:
    """Asks all ranks in every step whether one of them was asked to stop.

    Args:
        signals: This rank's.
        group: All ranks.
        deadline: ``time.monotonic()`` at which time is up; ``None``: never.
    """

    def __init__(self, signals: SignalListener, group: ProcessGroup | None, deadline: float | None = None) -> None:
        self._signals = signals
        self._group = group
        self._deadline = deadline
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Give this rank's vote, at the beginning of a step; every rank must. Waits for nobody."""
        assert self._pending is None, "one vote at a time"
        vote = torch.tensor([self._own()], dtype=torch.int64)
        self._pending = Pending(vote, None) if self._group is None else start_all_reduce_max_(vote, self._group)

    def end(self) -> StopRequest | None:
        """The answer, the same on all ranks, at the end of the step. One process hears what came during the step too.

        Returns:
            Why to stop; ``None``: go on.
        """
        assert self._pending is not None, "a vote has begun"
        pending, self._pending = self._pending, None
        code = int(pending.wait().numpy()[0]) if self._group is not None else self._own()
        if code == 0:
            return None
        kind, place = divmod(code, _RANKS)
        return StopRequest(_RANKS - 1 - place, None if kind == _TIME_IS_UP else kind)

    def _own(self) -> int:
        """Zero, or what this rank was asked above who it is: the largest is the lowest rank's."""
        kind = self._signals.received
        if kind is None and self._deadline is not None and time.monotonic() >= self._deadline:
            kind = _TIME_IS_UP
        return 0 if kind is None else kind * _RANKS + _RANKS - 1 - self._signals.rank
