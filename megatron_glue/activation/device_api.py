"""The few things the pinned tier asks of a device: streams, events, memory of both sides and an asynchronous copy.

Kept this small so that a simulator can stand in for it: the tests drive the same tier and state machine through a
device whose streams run in any order that the events allow.
"""

from __future__ import annotations

import math
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_glue.activation.extents import ALIGNMENT_BYTES

Stream = Any
"""A queue of device work: ``wait_event(event)`` puts later work behind an event, ``synchronize()`` blocks the host."""

Event = Any
"""A recorded point of a stream: ``synchronize()`` blocks the host, ``elapsed_time(later)`` is in milliseconds."""


class DeviceApi(Protocol):
    """What ``PinnedTier`` needs."""

    def new_stream(self) -> Stream:
        """Create a stream of the device."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream that compute is issued to at this moment."""
        ...

    def record(self, stream: Stream) -> Event:
        """Record an event, with timing, at the end of a stream."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return device memory, uint8, ordered in the current stream."""
        ...

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Return exactly ``num_bytes`` (a multiple of the page) of host memory that copies can reach directly."""
        ...

    def free_host(self, block: Tensor) -> None:
        """Give back what ``allocate_host`` returned. No copy may be under way."""
        ...

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Issue a copy between host and device to ``stream`` and return at once."""
        ...

    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        """Tell the allocator that a stream uses the memory of ``buffer``."""
        ...

    def synchronize(self) -> None:
        """Block the host until all streams of the device are empty."""
        ...

    def describe(self) -> str:
        """Name the device."""
        ...


class CudaDevice:
    """The real one.

    Args:
        device: A CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: dict[int, mmap.mmap] = {}

    def new_stream(self) -> Stream:
        """Create a stream of the device."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Stream:
        """Look the stream up anew: callers change it, and backward runs on that of forward."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        """Record an event with timing."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def allocate(self, num_bytes: int) -> Tensor:
        """Take memory from torch's allocator."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Register own pages with the driver.

        ``Tensor.pin_memory`` would round the block to a power of two, up to twice the bytes.
        """
        assert num_bytes % ALIGNMENT_BYTES == 0
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0)))
        self._pages[block.data_ptr()] = pages
        return block

    def free_host(self, block: Tensor) -> None:
        """Unregister the pages; they go back to the system with the last tensor that views them."""
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostUnregister(block.data_ptr())))
        del self._pages[block.data_ptr()]

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Issue the copy; both ends are pinned or on the device, so the host does not wait."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def record_stream(self, buffer: Tensor, stream: Stream) -> None:
        """Nothing happens if the stream is the one that the memory was allocated on."""
        buffer.record_stream(stream)

    def synchronize(self) -> None:
        """Wait for every stream, also those of other libraries."""
        torch.cuda.synchronize(self._device)

    def describe(self) -> str:
        """Name the device."""
        return torch.cuda.get_device_name(self._device)


def room_bytes(device: torch.device) -> float:
    """Device memory that was left when this process used most of it.

    Args:
        device: Any device; a CPU's memory is not accounted for.

    Returns:
        Bytes; infinity where memory is not accounted for.
    """
    if device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return float(free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def device_name(device: torch.device) -> str:
    """What computes there, in words that are the same in every run on such a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def has_integrated_memory(device: torch.device) -> bool:
    """Whether the device shares its memory with the host, so that a copy to the host frees nothing and hides nothing.

    Args:
        device: Any device; a CPU counts as not integrated, since its tier is a disk.
    """
    if device.type != "cuda":
        return False
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
