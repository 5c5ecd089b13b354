"""Which bytes of a block of storage are taken: a first-fit free list whose neighbours merge.

Used for blocks of pinned host memory and for the offload file alike. It counts; it touches no memory. Inputs of one
training step are few (layers x micro-batches in flight), so a linear walk is the simple and sufficient choice.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 4096
"""Memory page and the largest common disk sector: every extent starts and ends on a multiple of it."""


def round_up(num_bytes: int) -> int:
    """Return the smallest positive multiple of the alignment that holds ``num_bytes``."""
    return max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Extent:
    """Bytes ``begin`` to ``end`` (exclusive) of a block."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length."""
        return self.end - self.begin


class ExtentList:
    """The free bytes of one block.

    Args:
        num_bytes: Size of the block, a multiple of the alignment.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        assert num_bytes % ALIGNMENT_BYTES == 0
        self.num_bytes = num_bytes
        self.taken_bytes = 0
        self._free = [Extent(0, num_bytes)] if num_bytes else []

    def take(self, num_bytes: int) -> Extent | None:
        """Take the first free extent of ``round_up(num_bytes)`` bytes; None if there is none."""
        needed = round_up(num_bytes)
        for index, hole in enumerate(self._free):
            if hole.num_bytes >= needed:
                taken = Extent(hole.begin, hole.begin + needed)
                self._free[index : index + 1] = [Extent(taken.end, hole.end)] if taken.end < hole.end else []
                self.taken_bytes += needed
                return taken
        return None

    def grow_for(self, num_bytes: int) -> int:
        """Return the block size at which ``take(num_bytes)`` would succeed, counting a hole at the block's end."""
        last_hole_bytes = self._free[-1].num_bytes if self._free and self._free[-1].end == self.num_bytes else 0
        return self.num_bytes + max(0, round_up(num_bytes) - last_hole_bytes)

    def grow(self, num_bytes: int) -> None:
        """Make the block ``num_bytes`` long."""
        assert num_bytes >= self.num_bytes
        if num_bytes > self.num_bytes:
            self._insert(Extent(self.num_bytes, num_bytes))
            self.num_bytes = num_bytes

    def give_back(self, extent: Extent) -> None:
        """Free an extent that ``take`` returned."""
        self._insert(extent)
        self.taken_bytes -= extent.num_bytes
        assert self.taken_bytes >= 0

    def _insert(self, extent: Extent) -> None:
        index = next((i for i, hole in enumerate(self._free) if hole.begin >= extent.end), len(self._free))
        assert index == 0 or self._free[index - 1].end <= extent.begin, "an extent was freed twice"
        begin, end, first, last = extent.begin, extent.end, index, index
        if index > 0 and self._free[index - 1].end == begin:
            begin, first = self._free[index - 1].begin, index - 1
        if index < len(self._free) and self._free[index].begin == end:
            end, last = self._free[index].end, index + 1
        self._free[first:last] = [Extent(begin, end)]
