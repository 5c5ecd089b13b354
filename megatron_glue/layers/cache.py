"""The one cache of a model: everything deterministic that its layers would otherwise build again.

It has two parts. What follows from the layout of a micro-batch (attention metadata with its masks, rows of position
tables, index maps of context parallelism) hangs on the immutable ``PackedSequence`` and dies with it: nothing is
invalidated by hand, micro-batches in flight do not evict each other, and memory does not grow with the number of
layouts seen. What does not (position tables, causal and window masks) is kept in a :class:`LongLivedCache`, bounded by
bytes. Every key holds all that its value depends on.

Layers see it through ``packed_metadata.py`` and ``rotary.py``. It builds nothing itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_glue.backends.attention_masks import CausalBand, build_band
from megatron_glue.layers.cache_statistics import CacheStatistics
from megatron_glue.layers.long_lived_cache import (
    CacheKey,
    CacheLimits,
    LongLivedCache,
    is_low_on_memory,
    storages_of,
    tensors_of,
)
from megatron_glue.types import PackedSequence

Value = TypeVar("Value")

BAND = "causal_band"
# Longer packs come in small steps; a corner serves all shorter ones.
_BAND_LENGTH_MULTIPLE = 128


class CacheManager:
    """Both parts of the cache, and their counters.

    A micro-batch is prepared by one thread and then handed to another, never used by two at a time.

    Args:
        shares: Keep what belongs to a micro-batch, and bands; else each call builds anew, with the same values.
            Position tables are kept in either case.
        limits: Of the long-lived part.
        is_low: Whether a device has little memory left.
    """

    def __init__(
        self,
        shares: bool,
        limits: CacheLimits | None = None,
        is_low: Callable[[torch.device], bool] = is_low_on_memory,
    ) -> None:
        self.shares = shares
        self.statistics = CacheStatistics()
        self.long_lived = LongLivedCache(limits or CacheLimits(), self.statistics, is_low)

    def of_batch(self, sequence: PackedSequence, key: CacheKey, build: Callable[[], Value]) -> Value:
        """Return a value that follows from the layout of one micro-batch.

        Args:
            sequence: The micro-batch; it owns the value.
            key: What the value depends on beside the layout.
            build: Returns it.

        Returns:
            The value; never write to it.
        """
        entry = sequence.cache_entries.get(key) if self.shares else None
        if entry is None:
            self.statistics.miss(key.kind)
            return self._add(sequence, key, build, is_asked_for=True)
        if entry.is_asked_for:
            self.statistics.hit(key.kind)
        else:
            entry.is_asked_for = True
            self.statistics.miss(key.kind, built_ahead=True)
        return entry.value

    def prepare(self, sequence: PackedSequence, key: CacheKey, build: Callable[[], Any]) -> list[Tensor]:
        """Build a value ahead of :meth:`of_batch`. It is counted when somebody asks for it.

        Args:
            sequence: See :meth:`of_batch`.
            key: See :meth:`of_batch`.
            build: See :meth:`of_batch`.

        Returns:
            The tensors that were made; none if the value is there.
        """
        if not self.shares or key in sequence.cache_entries:
            return []
        return list(tensors_of(self._add(sequence, key, build, is_asked_for=False)))

    def band(self, band: CausalBand) -> Tensor:
        """Return a causal band, shared by all micro-batches that need it. A ``BandSource``.

        Args:
            band: Which one.

        Returns:
            [L, K]; never write to it.
        """
        if not self.shares:
            return build_band(band)
        if not band.is_corner:
            shape = (band.num_queries, band.num_keys, band.distance, band.window)
            return self.long_lived.get(CacheKey(BAND, shape, band.device, band.dtype), lambda: build_band(band))
        length = -(-band.num_queries // _BAND_LENGTH_MULTIPLE) * _BAND_LENGTH_MULTIPLE
        whole = CausalBand(length, length, 0, band.window, band.dtype, band.device)
        key = CacheKey(BAND, band.window, band.device, band.dtype)
        band_LL = self.long_lived.get(key, lambda: build_band(whole), extent=length)
        return band_LL[: band.num_queries, : band.num_keys]

    def _add(self, sequence: PackedSequence, key: CacheKey, build: Callable[[], Value], *, is_asked_for: bool) -> Value:
        # Once per micro-batch and thing: often enough to notice that memory runs out.
        self.long_lived.relieve(key.device)
        # Tensors born under inference_mode could not be saved for a backward that shares them.
        with torch.inference_mode(False):
            value = build()
        if not self.shares:
            return value
        own = storages_of(sequence.tensors)
        num_bytes = sum(
            num_bytes
            for storage, num_bytes in storages_of(value).items()
            if storage not in own and not self.long_lived.owns(storage)
        )
        entry = sequence.cache_entries[key] = _Entry(value, is_asked_for)
        self.statistics.grow(key.kind, num_bytes)
        weakref.finalize(entry, self.statistics.grow, key.kind, -num_bytes).atexit = False
        return value


class _Entry:
    """A value of a micro-batch."""

    def __init__(self, value: Any, is_asked_for: bool) -> None:
        self.value = value
        self.is_asked_for = is_asked_for
