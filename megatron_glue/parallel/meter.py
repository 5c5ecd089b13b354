"""Counts what collectives move, and measures how long training stands still for them.

While installed, it stands around the functions of ``torch.distributed`` that start a collective, so that those of this
project, of FSDP2 and of torch's pipelines are seen alike; code that calls them knows nothing of it. Only the time
between ``open`` and ``close`` counts, which is that of a training step, and only what a training thread starts: a
checkpoint that is written behind it is none of its business.

A wait is the time between two fences: one in front of a blocking call or of ``Work.wait``, one behind it. On a GPU they
are timed events on the stream that waits, so the host does not. What DDP's reducer waits for inside C++ is taken from
its communication hook: from the start of its last bucket to the end of all of them. What FSDP2 makes its own streams
wait for counts as a wait whether compute stood still or not. Collectives inside compiled libraries (DeepEP,
DeepSpeed's own kernels) are not seen.

Stands beside the training step, which it does not know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_glue.parallel import collectives

Fence = Any
"""A point in time of the thread or stream that waits."""

OTHER_THREADS = ("checkpoint-writer", "batch-prefetch")
"""Names of threads that never train."""


def _arguments_bytes(position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], int]:
    """Bytes of a collective by the tensor that all of it passes through, the one at a position of its arguments."""

    def size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return tensors[position].nbytes if len(tensors) > position else 0

    return size


def _operations_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that a batch of point-to-point operations sends."""
    operations = args[0] if args else kwargs.get("p2p_op_list", [])
    return sum(each.tensor.nbytes for each in operations if each.op is dist.isend)


_OUTPUT, _INPUT = _arguments_bytes(0), _arguments_bytes(1)
_SIZES: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], int]] = {
    "all_reduce": _OUTPUT,
    "broadcast": _OUTPUT,
    "send": _OUTPUT,
    "recv": lambda _args, _kwargs: 0,
    "all_gather": lambda args, kwargs: sum(tensor.nbytes for tensor in (args[0] if args else kwargs["tensor_list"])),
    "all_gather_into_tensor": _OUTPUT,
    "all_gather_single": _OUTPUT,
    "reduce_scatter_tensor": _INPUT,
    "reduce_scatter_single": _INPUT,
    "all_to_all_single": _INPUT,
    "batch_isend_irecv": _operations_bytes,
    "barrier": lambda _args, _kwargs: 0,
}
"""Function -> bytes of the larger side of a rank's buffers (of a sum, of a broadcast: those of its one buffer).

``isend`` and ``irecv`` stay as they are, since torch compares them by identity; they pass ``batch_isend_irecv``."""


class CollectiveMeter(AbstractContextManager["CollectiveMeter"]):
    """The meter of one process. It is installed from ``__enter__`` to ``__exit__``.

    Args:
        mark: Returns a fence for now, on what a wait holds up; unset: the host's clock.
        elapsed_ms: Turns two fences into milliseconds; unset: for those of the host's clock.

    Attributes:
        num_bytes: Payload of this rank's collectives in all steps so far.
        num_calls: Their number.
    """

    def __init__(
        self, mark: Callable[[], Fence] | None = None, elapsed_ms: Callable[[Fence, Fence], float] | None = None
    ) -> None:
        self.num_bytes = self.num_calls = 0
        self._mark = mark or time.perf_counter
        self._elapsed_ms = elapsed_ms or (lambda begin, end: 1e3 * (end - begin))
        self._is_open = self._is_timing = False
        self._waits: list[tuple[Fence, Fence]] = []
        self._last_launch: Fence | None = None
        self._ends: list[Fence] = []
        self._inside = threading.local()
        self._replaced: list[tuple[Any, str, Any]] = []

    @classmethod
    def on(cls, device: torch.device) -> CollectiveMeter:
        """The meter for a device: events on its current stream, or the host's clock without one."""
        if device.type != "cuda":
            return cls()

        def mark() -> Fence:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark, lambda begin, end: begin.elapsed_time(end))

    def __enter__(self) -> CollectiveMeter:
        # The package looks two functions up when it is imported, since torch has renamed them.
        own = {"_all_gather_single": _OUTPUT, "_reduce_scatter_single": _INPUT}
        targets = [(dist, name, size) for name, size in _SIZES.items() if hasattr(dist, name)]
        targets += [(collectives, name, size) for name, size in own.items()]
        for owner, name, size in targets:
            function = getattr(owner, name)
            self._replaced.append((owner, name, function))
            setattr(owner, name, self._metered(function, size))
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A collective as it is called while the meter is installed, for those who measure the meter.

        Args:
            function: Takes a tensor first, whose bytes count.
        """
        return self._metered(function, _OUTPUT)

    def open(self, *, is_timing: bool) -> None:
        """Begin a step.

        Args:
            is_timing: Measure its waits too. Each costs two fences, so on a GPU not every step is measured.
        """
        self._is_open, self._is_timing = True, is_timing

    def close(self) -> None:
        """End the step."""
        if self._is_timing and self._last_launch is not None and self._ends:
            self._waits += [(self._last_launch, end) for end in self._ends[-1:]]
        self._is_open = self._is_timing = False
        self._last_launch = None
        self._ends.clear()

    def take_waited_ms(self) -> float:
        """Sum of all waits since the last call, in milliseconds. What they waited for has ended long ago when the host
        has waited for the device; else it waits here."""
        waits, self._waits = self._waits, []
        for _, end in waits[-1:]:
            if hasattr(end, "synchronize"):
                end.synchronize()
        return sum(max(self._elapsed_ms(begin, end), 0.0) for begin, end in waits)

    def _metered(self, function: Any, size: Callable[[tuple[Any, ...], dict[str, Any]], int]) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open or getattr(self._inside, "is_call", False):
                return function(*args, **kwargs)
            if threading.current_thread().name in OTHER_THREADS:
                return function(*args, **kwargs)
            self.num_calls += 1
            self.num_bytes += size(args, kwargs)
            self._inside.is_call = True
            try:
                return self._call(function, args, kwargs)
            finally:
                self._inside.is_call = False

        return call

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_timing:
            return function(*args, **kwargs)
        begin = self._mark()
        result = function(*args, **kwargs)
        if isinstance(result, dist.Work):
            return _MeteredWork(result, self)
        if isinstance(result, list):
            return [_MeteredWork(work, self) for work in result]
        self._waits.append((begin, self._mark()))
        return result

    def wait(self, work: dist.Work, arguments: tuple[Any, ...]) -> Any:
        """Wait for a collective and take note of how long that took."""
        begin = self._mark()
        result = work.wait(*arguments)
        self._waits.append((begin, self._mark()))
        return result

    def follow(self, work: dist.Work) -> Any:
        """A future of a collective that somebody waits for out of sight; its end is noted."""
        if not self._is_timing:
            return work.get_future()
        self._last_launch = self._mark()

        def note(future: Any) -> Any:
            self._ends.append(self._mark())
            return future.value()

        return work.get_future().then(note)


class _MeteredWork(dist.Work):
    """A running collective whose waits are measured. It is a Work itself: FSDP2 asks."""

    def __init__(self, work: dist.Work, meter: CollectiveMeter) -> None:
        super().__init__()
        self._metered_work, self._meter = work, meter

    def wait(self, *arguments: Any) -> Any:
        return self._meter.wait(self._metered_work, arguments)

    def get_future(self) -> Any:
        return self._meter.follow(self._metered_work)

    def is_completed(self) -> bool:
        return self._metered_work.is_completed()

    def is_success(self) -> bool:
        return self._metered_work.is_success()

    def exception(self) -> Any:
        return self._metered_work.exception()

    def result(self) -> Any:
        return self._metered_work.result()

    def synchronize(self) -> None:
        self._metered_work.synchronize()

    def source_rank(self) -> int:
        return self._metered_work.source_rank()

    def get_future_result(self) -> Any:
        work: Any = self._metered_work
        return work.get_future_result()

    def block_current_stream(self) -> None:
        self._metered_work.block_current_stream()
