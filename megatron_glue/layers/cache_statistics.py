"""What a cache did, kind by kind: hits, misses, evictions, bytes.

Counters may be moved by the thread that trains and by the one that prepares the next step. It keeps no value itself;
the summary and the debug log read it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace


@dataclass
class KindStatistics:
    """Counters of one kind of value.

    Attributes:
        hits: Times that it was found.
        misses: Times that it was built.
        built_ahead: Those of the misses that were built before anyone asked.
        evictions: Values that gave way to others, or to low memory.
        bytes: Memory of what is kept now.
        peak_bytes: The most that was ever kept.
    """

    hits: int = 0
    misses: int = 0
    built_ahead: int = 0
    evictions: int = 0
    bytes: int = 0
    peak_bytes: int = 0


class CacheStatistics:
    """Counters of all kinds of one cache; every method may be called from any thread."""

    def __init__(self) -> None:
        # Reentrant: a value's end is counted when it is freed, which may be inside another count.
        self._lock = threading.RLock()
        self._kinds: dict[str, KindStatistics] = {}
        self._thread = threading.local()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep what this thread does inside out of the counters; bytes go on being right."""
        before = self._is_counting
        self._thread.is_counting = False
        try:
            yield
        finally:
            self._thread.is_counting = before

    def hit(self, kind: str) -> None:
        """A value was found."""
        with self._lock:
            self._of(kind).hits += self._is_counting

    def miss(self, kind: str, *, built_ahead: bool = False) -> None:
        """A value was built."""
        with self._lock:
            self._of(kind).misses += self._is_counting
            self._of(kind).built_ahead += self._is_counting and built_ahead

    def evict(self, kind: str) -> None:
        """A value gave way."""
        with self._lock:
            self._of(kind).evictions += self._is_counting

    def grow(self, kind: str, num_bytes: int) -> None:
        """A value of some memory is kept from now on, or no longer if negative."""
        with self._lock:
            counters = self._of(kind)
            counters.bytes += num_bytes
            counters.peak_bytes = max(counters.peak_bytes, counters.bytes)

    def of(self, kind: str) -> KindStatistics:
        """Return a copy of one kind's counters; zeros if it never occurred."""
        with self._lock:
            return replace(self._kinds.get(kind, KindStatistics()))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return all counters as JSON values, by kind."""
        with self._lock:
            return {kind: asdict(counters) for kind, counters in sorted(self._kinds.items())}

    @property
    def _is_counting(self) -> bool:
        return getattr(self._thread, "is_counting", True)

    def _of(self, kind: str) -> KindStatistics:
        return self._kinds.setdefault(kind, KindStatistics())
