"""The reload buffers: which input stands in which buffer, and who may touch it when.

    FREE --start--> LOADING --acquire--> IN_USE --release--> FREE

While backward computes on one buffer, the next input is copied into the other, so a block costs max(copy, compute)
instead of copy + compute. The buffer is chosen when the copy starts, from what is free at that moment: never from a
layer's index, so odd layer counts, skipped blocks and several micro-batches in flight need no care. Every hand-over
carries a fence: a copy starts behind the buffer's last reader, and compute reads behind the copy's end.

With one buffer nothing is fetched ahead: start the copy, wait, compute. With none, because not even one fits into the
bound, every input gets memory of its own for the time of its block, so the bound is exceeded by one input: a block
cannot run without its input.

It does not know which input comes next (``input_order.py``) nor how bytes move (``tiers.py``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from megatron_glue.activation.extents import round_up
from megatron_glue.activation.statistics import BlockCall, ReloadRecord, StatisticsRecorder
from megatron_glue.activation.tiers import Fence, StoredInput, Tier, Transfer

logger = logging.getLogger(__name__)

POISON_BYTE = 0xFF
"""Repeated, it is NaN in every floating-point format of two bytes or more."""


class SlotState(Enum):
    """Who owns a buffer."""

    FREE = "free"
    LOADING = "loading"
    IN_USE = "in use"


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        buffer: uint8 device memory; None until first used, and when it must not be held.
        state: Who owns it.
        last_reader: Fence behind everything that read it.
        generation: Times it was filled; an old user is told apart by it.
    """

    buffer: Tensor | None = None
    state: SlotState = SlotState.FREE
    last_reader: Fence = None
    generation: int = 0


@dataclass(eq=False)
class _Reload:
    """One input on its way back, or there."""

    slot: Slot
    generation: int
    buffer: Tensor
    transfer: Transfer
    asked: Fence = field(default=None)
    received: Fence = field(default=None)


class ReloadBuffers:
    """Up to two buffers. One thread at a time calls it: forward, then backward.

    Args:
        tier: Moves the bytes.
        statistics: Told about every reload.
        num_wanted: 2 to fetch ahead, 1 to copy and then compute.
        max_bytes: Most bytes the buffers may hold; 0 means no bound.
        poison: Fill buffers with NaN when they are allocated and freed.
    """

    def __init__(
        self, tier: Tier, statistics: StatisticsRecorder, *, num_wanted: int, max_bytes: int = 0, poison: bool = False
    ) -> None:
        assert num_wanted in (1, 2)
        self._tier = tier
        self._statistics = statistics
        self._num_wanted = num_wanted
        self._max_bytes = max_bytes
        self._poison = poison
        self._input_bytes = 0
        self._slots = [Slot() for _ in range(num_wanted)]
        self._reloads: dict[StoredInput, _Reload] = {}

    def expect(self, num_bytes: int) -> None:
        """Take note that inputs of this size will come back, and decide how many buffers fit."""
        if num_bytes <= self._input_bytes:
            return
        num_before = len(self._slots)
        self._input_bytes = round_up(num_bytes)
        if self._max_bytes:
            del self._slots[self._max_bytes // self._input_bytes :]
        if len(self._slots) < num_before:
            logger.warning("activation offload: %s", self.describe())

    def resize(self, num_wanted: int) -> None:
        """Have another number of buffers, as far as the bound allows. No input may be on its way or in use."""
        assert num_wanted in (1, 2)
        assert not self._reloads
        self._num_wanted = num_wanted
        self._slots = [*self._slots, Slot(), Slot()][:num_wanted]
        if self._max_bytes and self._input_bytes:
            del self._slots[self._max_bytes // self._input_bytes :]

    def prefetch(self, stored: StoredInput) -> None:
        """Start bringing an input back if a second buffer is free; else do nothing."""
        if len(self._slots) < 2 or stored in self._reloads:
            return
        slot = self._free_slot()
        if slot is not None:
            self._start(stored, slot)

    def acquire(self, stored: StoredInput, upcoming: StoredInput | None) -> Tensor:
        """Bring an input back for use, and start on the next one before waiting for this one.

        Args:
            stored: What compute needs now.
            upcoming: What it will probably need next.

        Returns:
            The input, contiguous, in memory that is valid until ``release``.

        Raises:
            OSError: The tier could not write or read it.
        """
        reload = self._reloads.get(stored)
        if reload is None:
            reload = self._start(stored, self._free_slot() or self._evict() or Slot())
        assert reload.slot.state is SlotState.LOADING, "an input is acquired once"
        if upcoming is not None:
            self.prefetch(upcoming)
        reload.asked = self._tier.mark()
        self._tier.wait(reload.transfer.done, reload.buffer)
        reload.received = self._tier.mark()
        reload.slot.state = SlotState.IN_USE
        return stored.view(reload.buffer)

    def release(self, stored: StoredInput, call: BlockCall) -> None:
        """Give the buffer of an acquired input back; everything issued so far may still read it.

        Args:
            stored: The input.
            call: Whose input it was, for the statistics.
        """
        reload = self._reloads.pop(stored)
        assert reload.slot.state is SlotState.IN_USE
        assert reload.slot.generation == reload.generation, "the buffer was filled again while it was in use"
        self._vacate(reload.slot)
        self._statistics.add_reload(
            ReloadRecord(call, reload.transfer, reload.asked, reload.received, reload.slot.last_reader)
        )
        self._tier.discard(stored, reload.transfer.done)

    def is_in_use(self, stored: StoredInput) -> bool:
        """Whether an input was acquired and not yet released."""
        reload = self._reloads.get(stored)
        return reload is not None and reload.slot.state is SlotState.IN_USE

    def drop(self, stored: StoredInput) -> None:
        """Forget an input whatever its state, also after an error."""
        reload = self._reloads.pop(stored, None)
        if reload is not None:
            try:
                self._tier.wait(reload.transfer.done, reload.buffer)
            except OSError:
                logger.debug("activation offload: dropped an input that could not be read back", exc_info=True)
            self._vacate(reload.slot)
        self._tier.discard(stored, reload.transfer.done if reload is not None else None)

    def close(self) -> None:
        """Free the buffers. Every input must have been released or dropped."""
        assert not self._reloads
        self._slots.clear()

    def describe(self) -> str:
        """Say how many buffers there are, and why not more."""
        kind = {2: "two reload buffers", 1: "one reload buffer", 0: "no reload buffer"}[len(self._slots)]
        if len(self._slots) == self._num_wanted:
            return kind
        sizes = f"inputs of {self._input_bytes / 2**20:.1f} MiB, room for {self._max_bytes / 2**20:.1f} MiB"
        remedy = "each input gets memory of its own" if not self._slots else "copies are not hidden"
        return f"{kind} ({sizes}: {remedy})"

    @property
    def num_buffers(self) -> int:
        """Buffers that fit."""
        return len(self._slots)

    @property
    def input_bytes(self) -> int:
        """Size of the largest input so far, rounded up."""
        return self._input_bytes

    @property
    def held_bytes(self) -> int:
        """Device bytes held now."""
        return sum(slot.buffer.nbytes for slot in self._slots if slot.buffer is not None)

    def _start(self, stored: StoredInput, slot: Slot) -> _Reload:
        assert slot.state is SlotState.FREE
        if slot.buffer is None or slot.buffer.nbytes < stored.num_bytes:
            slot.buffer = None  # freed before the larger one is taken
            is_pooled = any(slot is pooled for pooled in self._slots)
            slot.buffer = self._tier.allocate(self._input_bytes if is_pooled else round_up(stored.num_bytes))
            if self._poison:
                slot.buffer.fill_(POISON_BYTE)
            # Compute that used this memory before it was ours may still be running.
            slot.last_reader = self._tier.mark()
        slot.state = SlotState.LOADING
        slot.generation += 1
        transfer = self._tier.load(stored, slot.buffer, slot.last_reader)
        self._reloads[stored] = _Reload(slot, slot.generation, slot.buffer, transfer)
        return self._reloads[stored]

    def _free_slot(self) -> Slot | None:
        return next((slot for slot in self._slots if slot.state is SlotState.FREE), None)

    def _evict(self) -> Slot | None:
        """Take a buffer from an input that was fetched ahead and is not wanted yet; its stored copy stays."""
        for stored, reload in self._reloads.items():
            if reload.slot.state is SlotState.LOADING and any(reload.slot is slot for slot in self._slots):
                self._tier.wait(reload.transfer.done, reload.buffer)
                del self._reloads[stored]
                self._vacate(reload.slot)
                return reload.slot
        return None

    def _vacate(self, slot: Slot) -> None:
        if self._poison and slot.buffer is not None:
            slot.buffer.fill_(POISON_BYTE)
        slot.last_reader = self._tier.mark()
        slot.state = SlotState.FREE
