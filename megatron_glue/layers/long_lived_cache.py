"""Values that outlive a micro-batch: tables of positions and masks that depend on lengths alone.

They are kept within a bound of bytes; the least recently used ones give way. Where the device runs low on memory, all
that is kept there is dropped, nothing new is kept, and tables are looked up on the host until there is room again.

What belongs to one micro-batch is not kept here; see ``cache.py``, which both parts stand behind.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_glue.layers.cache_statistics import CacheStatistics

Value = TypeVar("Value")
CacheTier = Literal["device", "host"]

_CPU = torch.device("cpu")
# Less room than this for activations and gradients, and what can be built again should not take it.
_LOW_MEMORY_SHARE = 1 / 16


class CacheKey(NamedTuple):
    """All that a value depends on, beside the layout of the micro-batch that owns it, if one does.

    Attributes:
        kind: What it is; counters go by it.
        parameters: Lengths, window, layout, rank: whatever changes the value.
        device: Where its tensors are.
        dtype: Their dtype, where the value has one.
    """

    kind: str
    parameters: Hashable
    device: torch.device
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class CacheLimits:
    """How much is kept between micro-batches, and where.

    Attributes:
        num_bytes: Bound on all long-lived values together; 0 keeps none.
        tier: Where tables of positions wait: on the device, or on the host, from which each micro-batch fetches.
    """

    num_bytes: int = 256 * 2**20
    tier: CacheTier = "device"


def is_low_on_memory(device: torch.device) -> bool:
    """Whether less than a sixteenth of a GPU's memory is free, counting what torch holds in reserve; else False."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + reserve < total * _LOW_MEMORY_SHARE


class LongLivedCache:
    """A bounded cache; every method may be called from any thread.

    Args:
        limits: How much, and where.
        statistics: Counts what happens here.
        is_low: Whether a device has little memory left.
    """

    def __init__(
        self,
        limits: CacheLimits,
        statistics: CacheStatistics,
        is_low: Callable[[torch.device], bool] = is_low_on_memory,
    ) -> None:
        self.limits = limits
        self._statistics = statistics
        self._is_low = is_low
        # Held while a value is built, so that it is built once.
        self._lock = threading.RLock()
        self._kept: OrderedDict[CacheKey, _Kept] = OrderedDict()
        self._storages: dict[int, int] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        return self._num_bytes

    def owns(self, storage: int) -> bool:
        """Whether a piece of memory (see :func:`storages_of`) is part of a value that is kept."""
        return storage in self._storages

    def home_of(self, device: torch.device) -> torch.device:
        """Where a table that layers on ``device`` look rows up in should be."""
        return _CPU if self.limits.tier == "host" or self._is_low(device) else device

    def get(self, key: CacheKey, build: Callable[[], Value], extent: int = 0) -> Value:
        """Return a value, built now if it is not there.

        Args:
            key: All that it depends on, beside the extent.
            build: Returns it, with its tensors on ``key.device``; called with the cache locked.
            extent: Size of a value that contains all smaller ones of its key: a larger one that is there is returned.

        Returns:
            The value; never write to it.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.extent >= extent:
                self._kept.move_to_end(key)
                self._statistics.hit(key.kind)
                kept.wait()
                return kept.value
            self._statistics.miss(key.kind)
            # Tensors born under inference_mode could not be saved for a later backward.
            with torch.inference_mode(False):
                value = build()
            self._keep(key, value, extent)
            return value

    def relieve(self, device: torch.device) -> None:
        """Drop what is kept on a device that has little memory left."""
        with self._lock:
            if self._kept and self._is_low(device):
                for key in [key for key in self._kept if key.device == device]:
                    self._evict(key)

    def _keep(self, key: CacheKey, value: Any, extent: int) -> None:
        storages = storages_of(value)
        num_bytes = sum(storages.values())
        if num_bytes > self.limits.num_bytes:
            return
        if self._is_low(key.device):
            self.relieve(key.device)
            return
        if key in self._kept:
            self._drop(key)
        while self._num_bytes + num_bytes > self.limits.num_bytes:
            self._evict(next(iter(self._kept)))
        self._kept[key] = _Kept(value, extent, storages, *_ready(key.device))
        self._storages |= storages
        self._count_bytes(key.kind, num_bytes)

    def _evict(self, key: CacheKey) -> None:
        self._drop(key)
        self._statistics.evict(key.kind)

    def _drop(self, key: CacheKey) -> None:
        kept = self._kept.pop(key)
        for storage in kept.storages:
            del self._storages[storage]
        self._count_bytes(key.kind, -sum(kept.storages.values()))

    def _count_bytes(self, kind: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._statistics.grow(kind, num_bytes)


def _ready(device: torch.device) -> tuple[Any, Any]:
    """The stream that built a value, and an event behind its last kernel; nothing without streams."""
    if device.type != "cuda":
        return None, None
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()


@dataclass(frozen=True, eq=False)
class _Kept:
    """A value, its memory (see :func:`storages_of`), and the CUDA stream and event that it was built by."""

    value: Any
    extent: int
    storages: dict[int, int]
    stream: Any
    built: Any

    def wait(self) -> None:
        """Let the current stream wait for the one that built it, and keep its memory until that has used it."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current != self.stream:
            current.wait_event(self.built)
            for tensor in tensors_of(self.value):
                tensor.record_stream(current)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tensor, a tuple, a dataclass, or an object that has them as attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif hasattr(value, "__dict__"):
        # FlexAttention's BlockMask.
        yield from (item for item in vars(value).values() if isinstance(item, Tensor))


def storages_of(value: Any) -> dict[int, int]:
    """Return the bytes of each piece of memory behind a value, by what identifies it while it is alive."""
    found = {}
    for tensor in tensors_of(value):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    if isinstance(value, tuple):
        found |= {id(array): array.nbytes for array in value if isinstance(array, np.ndarray)}
    return found
