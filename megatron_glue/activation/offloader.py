"""Block inputs between their forward and their backward, when they are offloaded.

Ties the three parts together: the tier (how bytes move), the reload buffers (where they come back to) and the order
(which comes next). It knows nothing about blocks or recompute.

Inputs may also stay on the device. It then counts them and times their blocks, whose compute hides copies like any
other. The input of the last block of a pass is one of them: backward wants it first, so its copies away and back would
stand between forward and backward, with nothing but the loss to hide them.
"""

from __future__ import annotations

from torch import Tensor

from megatron_glue.activation.double_buffer import ReloadBuffers
from megatron_glue.activation.grouping_tier import GroupingTier, group
from megatron_glue.activation.input_order import InputOrder
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.activation.recompute import InputInMemory
from megatron_glue.activation.statistics import ActivationStats, BlockCall, StatisticsRecorder
from megatron_glue.activation.tiers import Fence, StoredInput, Tier


class OffloadedInput:
    """The claim of one block call on its offloaded input."""

    def __init__(self, offloader: InputOffloader, stored: StoredInput, call: BlockCall) -> None:
        self._offloader = offloader
        self._stored = stored
        self.call = call
        self._generation = offloader.generation

    def fetch(self) -> Tensor:
        """Return the input, in memory that is valid until ``release``.

        Raises:
            RuntimeError: The step that stored it is over.
            OSError: The tier could not write or read it.
        """
        if self._generation != self._offloader.generation:
            raise RuntimeError(
                "the input of this block was dropped when its step ended: run backward before the next begin_step()"
            )
        return self._offloader.fetch(self._stored, self.call)

    def release(self) -> None:
        """Give up the claim. Does nothing when the step is over."""
        if self._generation == self._offloader.generation:
            self._offloader.release(self._stored, self.call)


class ResidentInput:
    """The claim of one block call on an input that stays on the device."""

    def __init__(self, offloader: InputOffloader, x: Tensor, call: BlockCall) -> None:
        self._offloader = offloader
        self._memory = InputInMemory(x)
        self.num_bytes = x.nbytes
        self.call = call
        self._received: Fence | None = None

    def fetch(self) -> Tensor:
        """Return the input. The copy of what backward needs next is under way from here on at the latest.

        Raises:
            RuntimeError: The step that kept it is over, or it was written to since forward.
        """
        if not self._offloader.is_resident(self):
            raise RuntimeError(
                "the input of this block was dropped when its step ended: run backward before the next begin_step()"
            )
        self._offloader.prefetch_first()
        self._received = self._offloader.statistics.mark()
        return self._memory.fetch()

    def release(self) -> None:
        """Give up the claim."""
        self._memory.release()
        if self._offloader.forget(self) and self._received is not None:
            self._offloader.statistics.add_resident_backward(self.call, self._received)

    def drop(self) -> None:
        """The step is over: let go of the memory."""
        self._memory.release()


class InputOffloader:
    """Sends inputs away and brings them back ahead of backward.

    Args:
        plan: The choices of the run.
        tier: Where inputs go.
        num_buffers: 2 to fetch ahead, 1 to copy and then compute.

    Attributes:
        generation: Counts resets; a claim from before a reset is void.
    """

    def __init__(self, plan: ActivationPlan, tier: Tier, num_buffers: int) -> None:
        self._tier = GroupingTier(tier)
        self._pieces: list[StoredInput] = []
        self._statistics = StatisticsRecorder(tier.mark, tier.elapsed_ms, plan.record_timeline)
        self._buffers = ReloadBuffers(
            self._tier,
            self._statistics,
            num_wanted=num_buffers,
            max_bytes=plan.buffer_size_bytes,
            poison=plan.poison,
        )
        self._order = InputOrder()
        self._residents: set[ResidentInput] = set()
        self.generation = 0

    def store(self, x: Tensor, micro_batch: int) -> OffloadedInput:
        """Send an input away.

        Raises:
            OSError: The tier is full or cannot be written.
        """
        return self._claim(self._tier.store(x), micro_batch)

    def keep(self, x: Tensor, micro_batch: int) -> ResidentInput:
        """Let an input stay where it is, and count it."""
        resident = ResidentInput(self, x, self._next_call(micro_batch))
        self._residents.add(resident)
        self._statistics.add_resident(sum(other.num_bytes for other in self._residents))
        return resident

    def is_wanted_first(self, micro_batch: int) -> bool:
        """Whether backward will want the newest input of a micro-batch before anything that was stored or kept.

        That is so unless another micro-batch is in flight, as in a pipeline; its backward then hides the copies.
        """
        is_alone = all(other.call.micro_batch == micro_batch for other in self._residents)
        return is_alone and not self._order.has_others(micro_batch)

    def is_resident(self, resident: ResidentInput) -> bool:
        """Whether an input is kept in the step that is under way."""
        return resident in self._residents

    def forget(self, resident: ResidentInput) -> bool:
        """An input that stayed is not needed any more; whether it was still kept."""
        was_kept = resident in self._residents
        self._residents.discard(resident)
        return was_kept

    def store_piece(self, x: Tensor) -> None:
        """Send a part of what a block keeps away; ``gather`` makes one input of all parts since the last one.

        Raises:
            OSError: The tier is full or cannot be written.
        """
        self._pieces.append(self._tier.store(x))

    def gather(self, micro_batch: int) -> OffloadedInput | None:
        """Make one input of the pieces that were stored; None if there are none.

        It is uint8, each piece at a multiple of the page, in the order of storing.
        """
        pieces, self._pieces = self._pieces, []
        return self._claim(group(pieces), micro_batch) if pieces else None

    def _claim(self, stored: StoredInput, micro_batch: int) -> OffloadedInput:
        self._buffers.expect(stored.num_bytes)
        call = self._next_call(micro_batch)
        self._order.append(micro_batch, stored)
        self._statistics.add_offload(call, stored.num_bytes, stored.transfer)
        return OffloadedInput(self, stored, call)

    def _next_call(self, micro_batch: int) -> BlockCall:
        num_residents = sum(resident.call.micro_batch == micro_batch for resident in self._residents)
        return BlockCall(micro_batch, self._order.count(micro_batch) + num_residents)

    def fetch(self, stored: StoredInput, call: BlockCall) -> Tensor:
        """Bring an input back, and start on the one before it."""
        return self._buffers.acquire(stored, self._order.after(call.micro_batch, stored))

    def release(self, stored: StoredInput, call: BlockCall) -> None:
        """Give an input's buffer and its place in the tier back."""
        self._order.remove(call.micro_batch, stored)
        if self._buffers.is_in_use(stored):
            self._buffers.release(stored, call)
        else:
            self._buffers.drop(stored)

    def prefetch_first(self) -> None:
        """Start on the input that backward needs first."""
        first = self._order.first()
        if first is not None:
            self._buffers.prefetch(first)

    def begin_step(self, *, is_closed: bool = False) -> None:
        """Drop what an earlier step left, and let the tier put its room in order, unless it was closed."""
        if not is_closed:
            self.reset()
            self._tier.begin_step()
        self._statistics.begin_step()

    def reset(self) -> None:
        """Drop everything that is stored, on its way or in use; void all claims; forget earlier errors."""
        self.generation += 1
        self._tier.settle()
        for stored in self._order.pop_all():
            self._buffers.drop(stored)
        for piece in self._pieces:
            self._tier.discard(piece, None)
        self._pieces.clear()
        for resident in self._residents:
            resident.drop()
        self._residents.clear()

    def close(self) -> None:
        """Free all memory, files and threads. Idempotent."""
        self.reset()
        self._buffers.close()
        self._tier.close()

    def resize(self, num_buffers: int) -> None:
        """Bring inputs back through another number of buffers. Nothing may be stored."""
        self._buffers.resize(num_buffers)

    @property
    def input_bytes(self) -> int:
        """Size of the largest input so far."""
        return self._buffers.input_bytes

    @property
    def num_tracked(self) -> int:
        """Inputs that are stored now."""
        return len(self._order)

    @property
    def statistics(self) -> StatisticsRecorder:
        """The recorder, for reset and timeline."""
        return self._statistics

    def stats(self) -> ActivationStats:
        """All figures since the last reset of the statistics."""
        return self._statistics.summary(
            requested_bytes=self._tier.requested_bytes,
            held_bytes=self._tier.held_bytes,
            buffer_bytes=self._buffers.held_bytes,
        )

    def describe(self) -> str:
        """Say where inputs go and how they come back."""
        return f"{self._tier.describe()}, {self._buffers.describe()}"
