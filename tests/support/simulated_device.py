"""A device whose streams run in any order that their events allow.

Stands in for CUDA under ``PinnedTier``. Work is queued and runs later, when the test says so: by a stream, by priority,
or as late as possible. Memory behaves as under torch's caching allocator: what the host frees may be overwritten by
later work of the compute stream, and what it allocates may still be in use by earlier work of it. Freed and fresh
memory is NaN, so that a copy or a kernel that runs too early or too late reads NaN or a wrong value, and says so in
``violations``.

With ``eager_compute`` the compute stream runs at once, as torch on a CPU does, so that real blocks can be driven.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Edge = tuple[str, str]
"""(stream that waits, stream whose event it waits for)."""

EDGES: dict[str, Edge] = {
    "x_written_then_offloaded": ("offload", "compute"),
    "offloaded_then_memory_of_x_reused": ("compute", "offload"),
    "f38_offloaded_then_reloaded": ("reload", "offload"),
    "buffer_read_then_refilled": ("reload", "compute"),
    "reloaded_then_computed": ("compute", "reload"),
    "reloaded_then_host_memory_reused": ("offload", "reload"),
}
"""Every hand-over of ``PinnedTier``."""


@dataclass(eq=False)
class SimulatedEvent:
    """Reached once its stream got to it."""

    device: SimulatedDevice
    stream: str
    time: float | None = None

    def synchronize(self) -> None:
        self.device.run_until(self)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        assert self.time is not None
        assert end_event.time is not None
        return end_event.time - self.time


@dataclass(eq=False)
class SimulatedStream:
    """A queue of work: events to wait for, events to reach, functions to run."""

    device: SimulatedDevice
    name: str
    queue: deque[SimulatedEvent | Callable[[], None]] = field(default_factory=deque)

    def wait_event(self, event: SimulatedEvent) -> None:
        edge = (self.name.rstrip("0123456789"), event.stream.rstrip("0123456789"))
        self.device.edges.add(edge)
        if edge not in self.device.ignored_edges:
            self.push(event)

    def push(self, item: SimulatedEvent | Callable[[], None]) -> None:
        self.queue.append(item)
        if self.device.eager_compute and self.name == "compute":
            self.synchronize()

    def synchronize(self) -> None:
        while self.queue:
            self.device.advance(self)

    @property
    def is_blocked(self) -> bool:
        head = self.queue[0]
        return isinstance(head, SimulatedEvent) and head.stream != self.name and head.time is None


class SimulatedDevice:
    """The device API of ``PinnedTier``, and the levers of a test.

    Args:
        eager_compute: Run the compute stream at once.
        ignored_edges: Waits that are left out, to see what breaks.

    Attributes:
        edges: Every kind of wait that was issued.
        violations: What went wrong on the device.
        host_bytes: Host memory held.
    """

    def __init__(self, *, eager_compute: bool, ignored_edges: Iterable[Edge] = ()) -> None:
        self.eager_compute = eager_compute
        self.ignored_edges = frozenset(ignored_edges)
        self.edges: set[Edge] = set()
        self.violations: list[str] = []
        self.host_bytes = 0
        self.num_host_blocks = 0
        self._clock = 0.0
        self._aliases: dict[int, np.ndarray] = {}
        self._users: dict[int, set[str]] = {}
        self._freed: list[np.ndarray] = []
        self.compute = self.current = SimulatedStream(self, "compute")
        self._names = iter(("offload", "reload", "compute2"))
        self.streams = {"compute": self.compute}

    # ---- the device API -------------------------------------------------------------------------------------------

    def new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(self, next(self._names))
        self.streams[stream.name] = stream
        return stream

    def current_stream(self) -> SimulatedStream:
        return self.current

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        event = SimulatedEvent(self, stream.name)
        stream.push(event)
        return event

    def allocate(self, num_bytes: int) -> Tensor:
        return self._register(np.zeros(num_bytes, dtype=np.uint8))

    def allocate_host(self, num_bytes: int) -> Tensor:
        self.host_bytes += num_bytes
        self.num_host_blocks += 1
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def free_host(self, block: Tensor) -> None:
        self.host_bytes -= block.nbytes
        self.num_host_blocks -= 1
        assert not any(stream.queue for stream in self.streams.values() if not stream.name.startswith("compute"))
        block.fill_(0xFF)

    def copy(self, destination: Tensor, source: Tensor, stream: SimulatedStream) -> None:
        to, from_ = self._alias(destination), self._alias(source)
        stream.push(lambda: to.__setitem__(slice(None), from_))

    def record_stream(self, buffer: Tensor, stream: SimulatedStream) -> None:
        self._users.setdefault(buffer.data_ptr(), set()).add(stream.name)

    @property
    def num_live_allocations(self) -> int:
        """Pieces of device memory that the host holds."""
        return len(self._aliases)

    def synchronize(self) -> None:
        self.run_by_priority(())

    def describe(self) -> str:
        return "a simulated device"

    # ---- the levers -----------------------------------------------------------------------------------------------

    def new_activation(self, value: float, num_elements: int) -> Tensor:
        """Allocate a float32 tensor and queue the kernel that writes ``value`` to it."""
        x = self._register(np.zeros(4 * num_elements, dtype=np.uint8)).view(torch.float32)
        content = self._alias(x)
        self.current.push(lambda: content.view(np.float32).fill(value))
        return x

    def check(self, x: Tensor, value: float) -> None:
        """Queue a kernel that reads ``x`` and expects ``value`` everywhere."""
        content = self._alias(x)

        def kernel() -> None:
            found = content.view(np.float32)
            if not (found == value).all():
                self.violations.append(f"a kernel expected {value} and read {found[:2]}")

        self.current.push(kernel)

    def fill(self, x: Tensor, byte: int) -> None:
        """Queue a kernel that writes one byte all over ``x``."""
        content = self._alias(x)
        self.current.push(lambda: content.fill(byte))

    def advance(self, stream: SimulatedStream) -> None:
        """Run the head of a stream; what it waits for runs first."""
        head = stream.queue[0]
        if not isinstance(head, SimulatedEvent):
            stream.queue.popleft()()
            return
        if head.stream == stream.name:
            self._clock += 1.0
            head.time = self._clock if head.time is None else head.time
        else:
            self.run_until(head)
        stream.queue.popleft()

    def run_until(self, event: SimulatedEvent) -> None:
        """Run no more than what an event needs."""
        while event.time is None:
            self.advance(self.streams[event.stream])

    def use_another_compute_stream(self) -> None:
        """Compute on a new stream that is not ordered with the first one."""
        self.current = self.new_stream()

    def run_by_priority(self, names: Iterable[str]) -> None:
        """Run everything; the first stream in ``names`` that is not blocked always goes first, the others last."""
        names = list(names)
        order = [self.streams[name] for name in names + [name for name in self.streams if name not in names]]
        while any(stream.queue for stream in order):
            self.advance(next(stream for stream in order if stream.queue and not stream.is_blocked))
        if any((backing != 0xFF).any() for backing in self._freed):
            self.violations.append("memory was written to after it was freed")

    def advance_if_possible(self, name: str) -> None:
        """Run one item of a stream unless it is empty or blocked."""
        stream = self.streams[name]
        if stream.queue and not stream.is_blocked:
            self.advance(stream)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _register(self, backing: np.ndarray) -> Tensor:
        view = backing[:]  # lives as long as the tensor; the backing memory outlives both
        tensor = torch.from_numpy(view)
        self._aliases[tensor.data_ptr()] = backing
        weakref.finalize(view, self._free, tensor.data_ptr(), self.current)
        self.current.push(lambda: backing.fill(0xFF))  # its previous owner may still be using it
        return tensor

    def _free(self, address: int, stream: SimulatedStream) -> None:
        backing = self._aliases.pop(address)
        self._freed.append(backing)
        for name in self._users.pop(address, set()) - {stream.name}:
            stream.push(self.record(self.streams[name]))
        stream.push(lambda: backing.fill(0xFF))  # its next owner may use it from here on

    def _alias(self, tensor: Tensor) -> np.ndarray:
        """The bytes of a tensor, in a form that does not keep device memory alive."""
        content = tensor.detach().reshape(-1).view(torch.uint8)
        backing = self._aliases.get(tensor.data_ptr())
        return content.numpy() if backing is None else backing[: content.nbytes]
