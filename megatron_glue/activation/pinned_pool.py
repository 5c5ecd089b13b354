"""Pinned host memory of exact size: in many small blocks during the first step, in one from then on.

torch's pinned allocator rounds every request to a power of two, which can nearly double the host memory. How much is
needed shows in the first step only. There the pool grows by a sixteenth at a time, so what is held stays within 1.07 of
what was asked for (plus one input), at the price of a call to the driver for about every input. Between steps, when
nothing is in use, ``merge`` replaces the blocks by one of the size that was needed. The pool only counts and hands out
memory; the order of copies is the tier's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_glue.activation.device_api import DeviceApi
from megatron_glue.activation.extents import Extent, ExtentList, round_up

MAX_BLOCK_BYTES = 256 << 20
"""While the pool grows, a block holds at most as many inputs as fit in this, and at least one."""

GROWTH_DIVISOR = 16
"""A new block is about this part of what is held already: little is held in vain."""


@dataclass(eq=False)
class _Block:
    memory: Tensor
    extents: ExtentList


@dataclass(frozen=True, eq=False)
class HostRegion:
    """Pinned memory of one input.

    Attributes:
        memory: uint8, as long as was asked for.
        block: The block it belongs to.
        extent: Its bytes there.
    """

    memory: Tensor
    block: _Block
    extent: Extent


class PinnedPool:
    """Takes blocks from a device's driver and hands out regions.

    Args:
        device: Where host memory comes from.
        finish_copies: Blocks until no copy is under way; called before memory is given back to the driver.
        poison: Fill regions that are not in use with NaN.

    Attributes:
        requested_bytes: Most bytes in use at one time, as asked for.
        held_bytes: Bytes of all blocks.
        num_blocks: Number of blocks.
    """

    def __init__(self, device: DeviceApi, finish_copies: Callable[[], None], poison: bool = False) -> None:
        self._device = device
        self._finish_copies = finish_copies
        self._poison = poison
        self._blocks: list[_Block] = []
        self._used_bytes = 0
        self._taken_bytes = 0
        self._most_taken_bytes = 0
        self._merged_bytes = 0
        self.requested_bytes = 0

    def take(self, num_bytes: int) -> HostRegion:
        """Hand out a region of ``num_bytes``."""
        block, extent = self._find(num_bytes) or self._add_block(num_bytes)
        self._taken_bytes += extent.num_bytes
        self._most_taken_bytes = max(self._most_taken_bytes, self._taken_bytes)
        self._used_bytes += num_bytes
        self.requested_bytes = max(self.requested_bytes, self._used_bytes)
        return HostRegion(block.memory[extent.begin : extent.begin + num_bytes], block, extent)

    def give_back(self, region: HostRegion) -> None:
        """Take a region back. Later copies into it must be ordered behind the last one out of it by the caller."""
        if self._poison:
            region.memory.fill_(0xFF)
        self._used_bytes -= region.memory.nbytes
        self._taken_bytes -= region.extent.num_bytes
        region.block.extents.give_back(region.extent)

    def merge(self) -> None:
        """Replace several blocks by one as large as was ever needed at one time.

        Does nothing while a region is in use, and nothing when no more was needed than at the last time: inputs whose
        sizes change from step to step may leave holes, and registering everything again would not close them.
        """
        if self._taken_bytes == 0 and self.num_blocks > 1 and self._most_taken_bytes > self._merged_bytes:
            self._free_blocks(self._blocks)
            self._append_block(self._most_taken_bytes)
            self._merged_bytes = self._most_taken_bytes

    def close(self) -> None:
        """Give all blocks back. Idempotent."""
        self._free_blocks(self._blocks)

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.extents.num_bytes for block in self._blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def _find(self, num_bytes: int) -> tuple[_Block, Extent] | None:
        for block in self._blocks:
            extent = block.extents.take(num_bytes)
            if extent is not None:
                return block, extent
        return None

    def _add_block(self, num_bytes: int) -> tuple[_Block, Extent]:
        # Empty blocks were too small for this request. Keeping them as inputs grow would hold memory for sizes that
        # do not come back.
        self._free_blocks([block for block in self._blocks if block.extents.taken_bytes == 0])
        input_bytes = round_up(num_bytes)
        growth_bytes = min(self.held_bytes // GROWTH_DIVISOR, MAX_BLOCK_BYTES)
        block = self._append_block(max(1, growth_bytes // input_bytes) * input_bytes)
        extent = block.extents.take(num_bytes)
        assert extent is not None
        return block, extent

    def _append_block(self, num_bytes: int) -> _Block:
        memory = self._device.allocate_host(num_bytes)
        if self._poison:
            memory.fill_(0xFF)
        block = _Block(memory, ExtentList(num_bytes))
        self._blocks.append(block)
        return block

    def _free_blocks(self, blocks: list[_Block]) -> None:
        if not blocks:
            return
        self._finish_copies()
        for block in list(blocks):
            self._blocks.remove(block)
            self._device.free_host(block.memory)
