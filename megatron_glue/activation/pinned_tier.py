"""Inputs wait for backward in pinned host memory: the tier of CUDA devices.

Two copy streams, one each way, since the bus carries both directions at once (or one for both, to leave more of it to
others). Everything that hands memory from one stream to another does so through an event; these are the edges, each of
which a test takes away to see it fail:

1. compute wrote x             -> copy off the device begins            (``store``)
2. copy off the device done    -> compute may reuse the memory of x     (``_let_go``)
3. copy off the device done    -> copy back begins                      (``load``)
4. last reader of the buffer   -> copy back begins                      (``load``, fence from ``mark``)
5. copy back done              -> compute reads the buffer              (``wait``)
6. copy back done              -> next copy into the same host memory   (``discard``)

The copy streams need no ``record_stream``, which would make memory depend on how far the host runs ahead: x and the
buffers are allocated and freed in the order of the compute stream, and edges 2 and 5 put every copy's end back into
that order. A buffer is recorded for the compute stream that reads it; that costs nothing unless it is another one than
the buffer was allocated on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.activation.device_api import DeviceApi, Event, Stream
from megatron_glue.activation.pinned_pool import PinnedPool
from megatron_glue.activation.tiers import StoredInput, Tier, Transfer

MAX_PENDING_OFFLOADS = 2
"""Inputs that are still held on the device behind the block that runs. More would only buy room for a slow bus."""


@dataclass(frozen=True, eq=False)
class _PendingOffload:
    x: Tensor
    compute: Stream
    done: Event


class PinnedTier(Tier):
    """A pool of host memory and two copy streams.

    Args:
        device: The device, or a simulator of one.
        poison: Fill freed host memory with NaN. The host then waits for every copy.
        max_inflight: 2 for a copy stream each way, 1 for one stream, so that copies take turns.
    """

    def __init__(self, device: DeviceApi, poison: bool = False, max_inflight: int = 2) -> None:
        self._device = device
        self._poison = poison
        self._offload_stream = device.new_stream()
        self._reload_stream = device.new_stream() if max_inflight > 1 else self._offload_stream
        self._pool = PinnedPool(device, self._finish_copies, poison)
        self._pending: deque[_PendingOffload] = deque()

    def store(self, x: Tensor) -> StoredInput:
        """Issue the copy to host memory."""
        compute = self._device.current_stream()
        while len(self._pending) >= MAX_PENDING_OFFLOADS:
            self._let_go(self._pending.popleft())
        x = x.detach() if x.is_contiguous() else x.detach().contiguous()
        content = x.view(-1).view(torch.uint8)
        region = self._pool.take(content.nbytes)
        self._offload_stream.wait_event(self._device.record(compute))
        started = self._device.record(self._offload_stream)
        self._device.copy(region.memory, content, self._offload_stream)
        done = self._device.record(self._offload_stream)
        self._pending.append(_PendingOffload(x, compute, done))
        return StoredInput(x.shape, x.dtype, content.nbytes, region, Transfer(started, done))

    def allocate(self, num_bytes: int) -> Tensor:
        """Take device memory in the order of the current stream."""
        return self._device.allocate(num_bytes)

    def load(self, stored: StoredInput, buffer: Tensor, after: Event) -> Transfer:
        """Issue the copy back."""
        self._reload_stream.wait_event(stored.transfer.done)
        self._reload_stream.wait_event(after)
        started = self._device.record(self._reload_stream)
        self._device.copy(buffer[: stored.num_bytes], stored.place.memory, self._reload_stream)
        return Transfer(started, self._device.record(self._reload_stream))

    def mark(self) -> Event:
        """Record an event in the stream that is current now."""
        return self._device.record(self._device.current_stream())

    def wait(self, fence: Event, buffer: Tensor) -> None:
        """Let the current stream wait; the host goes on."""
        compute = self._device.current_stream()
        compute.wait_event(fence)
        self._device.record_stream(buffer, compute)

    def discard(self, stored: StoredInput, loaded: Event | None) -> None:
        """Free the host memory, on the host's clock: copies out of it may still be under way."""
        if loaded is not None:
            self._offload_stream.wait_event(loaded)
            while any(pending.done is stored.transfer.done for pending in self._pending):
                self._let_go(self._pending.popleft())
        if self._poison:
            stored.transfer.done.synchronize()
            if loaded is not None:
                loaded.synchronize()
        self._pool.give_back(stored.place)

    def settle(self) -> None:
        """Let compute wait for all copies off the device, and let go of their sources."""
        while self._pending:
            self._let_go(self._pending.popleft())

    def synchronize(self) -> None:
        """Wait for the whole device."""
        self._device.synchronize()

    def begin_step(self) -> None:
        """Merge the blocks of the first step into one."""
        self._pool.merge()

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        """Time on the device's clock."""
        end.synchronize()
        return begin.elapsed_time(end)

    def close(self) -> None:
        """Wait for the streams, then unregister the memory."""
        self.settle()
        self._finish_copies()
        self._pool.close()

    def describe(self) -> str:
        """Name the device."""
        turns = ", one copy at a time" if self._reload_stream is self._offload_stream else ""
        return f"pinned host memory of {self._device.describe()}{turns}"

    @property
    def requested_bytes(self) -> int:
        """Most bytes of inputs that were away at one time."""
        return self._pool.requested_bytes

    @property
    def held_bytes(self) -> int:
        """Pinned bytes."""
        return self._pool.held_bytes

    def _let_go(self, pending: _PendingOffload) -> None:
        """Drop x behind its copy, in the order of the stream that allocated it."""
        pending.compute.wait_event(pending.done)

    def _finish_copies(self) -> None:
        self._offload_stream.synchronize()
        self._reload_stream.synchronize()
