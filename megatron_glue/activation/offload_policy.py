"""How many block inputs should leave the device, and through how many buffers they come back: a pure function.

Offload buys memory and costs time where copies are slower than the compute they run under. So as many inputs leave as
cost next to nothing, evenly spaced, so that a copy has the compute of the blocks between two of them to hide under:

    wait away = copies * away - blocks * forward                    (copies run under the forward passes of blocks)
    wait back = copies * back - (blocks - 1) * backward             (two buffers: under the blocks before, in backward)
    wait back = copies * back                                       (one buffer: nothing is hidden)

each at least 0, all per pass of a micro-batch. What was measured on several ranks is merged first, so that all ranks
decide alike. It measures nothing and moves nothing: ``offload_tuner.py`` does, between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from megatron_glue.activation.offload_costs import OffloadCosts
from megatron_glue.activation.plan import OffloadShare

MOST_WAIT_SHARE = 0.05
"""Of the compute of blocks, that waiting for copies may add."""

ONE_BUFFER_WAIT_SHARE = 0.01
"""Of the compute of blocks: where waiting for each copy adds no more, a second buffer is not worth its memory."""

ROOM_SHARE = 0.9
"""Of the free device memory that inputs may fill which do not leave any more."""


@dataclass(frozen=True)
class OffloadBounds:
    """What a user said that bounds the decision.

    Attributes:
        double_buffer: Whether two buffers may be used.
        buffer_bytes: Most bytes of all reload buffers of one part; 0: no bound.
        least_input_bytes: Smaller inputs stay: what a copy costs beside its bytes would dominate.
    """

    double_buffer: bool = True
    buffer_bytes: int = 0
    least_input_bytes: int = 0

    def num_buffers(self, input_bytes: int) -> int:
        """Most buffers that may be used; at least 1, since an input that left must come back somewhere."""
        wanted = 2 if self.double_buffer else 1
        return max(1, min(wanted, self.buffer_bytes // input_bytes)) if self.buffer_bytes else wanted


@dataclass(frozen=True)
class OffloadDecision:
    """What was decided, with its reason.

    Attributes:
        num_leaving: Of every ``num_blocks`` blocks, those whose inputs leave; 0: offload is off.
        num_blocks: See there.
        num_buffers: Reload buffers; 0 where none leaves.
        reason: For people.
    """

    num_leaving: int
    num_blocks: int
    num_buffers: int
    reason: str

    @property
    def share(self) -> OffloadShare:
        """Which blocks these are."""
        return OffloadShare(self.num_leaving, self.num_blocks)

    def describe(self) -> str:
        """One line."""
        if not self.num_leaving:
            return f"off, all inputs stay on the device: {self.reason}"
        buffers = {1: "one buffer", 2: "two buffers"}[self.num_buffers]
        return f"inputs of {self.num_leaving} of {self.num_blocks} blocks leave, {buffers}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OffloadDecision:
        """Read a saved decision.

        Raises:
            ValueError: It is none.
        """
        if values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"an offload decision has {sorted(cls.__dataclass_fields__)}, not {sorted(values)}")
        decision = cls(**values)
        *numbers, reason = astuple(decision)
        are_whole = all(type(number) is int for number in numbers) and type(reason) is str
        if not are_whole or not 0 <= decision.num_leaving <= decision.num_blocks or decision.num_blocks < 1:
            raise ValueError(f"no offload decision: {values}")
        if decision.num_buffers not in ((1, 2) if decision.num_leaving else (0,)):
            raise ValueError(f"no offload decision, num_buffers={decision.num_buffers}")
        return decision


def decide(costs: OffloadCosts, bounds: OffloadBounds) -> OffloadDecision:
    """Choose how many inputs leave.

    Args:
        costs: Of all ranks together.
        bounds: The same on all ranks.

    Returns:
        The largest share whose waits stay below ``MOST_WAIT_SHARE``, or off where none such frees memory; more where
        the inputs that stay would not fit.
    """
    num_blocks = costs.num_blocks
    if costs.is_integrated:
        return _off(costs, "the device shares the host's memory, so an input that leaves frees nothing")
    if not costs.input_bytes:
        return OffloadDecision(1, 1, bounds.num_buffers(1), "no input left in the measured steps")
    most_buffers = bounds.num_buffers(costs.input_bytes)
    needed = _num_needed(costs)
    if not needed and costs.input_bytes < bounds.least_input_bytes:
        least_kb = bounds.least_input_bytes / 1024
        return _off(costs, f"inputs of {costs.input_bytes / 1024:.0f} KiB are below {least_kb:.0f} KiB")
    chosen = _largest_hidden(costs, most_buffers)
    if chosen is not None and chosen[0] >= needed:
        return OffloadDecision(chosen[0], num_blocks, chosen[1], _times(costs))
    if needed:
        reason = f"the rest would not fit into {costs.room_bytes / 2**20:.0f} MiB, although {_times(costs)}"
        return OffloadDecision(needed, num_blocks, most_buffers, reason)
    if _saved_bytes(costs, num_blocks, num_buffers=1) <= 0:
        return _off(costs, f"buffers would hold as much as the inputs of {num_blocks} blocks")
    return _off(costs, f"waiting would dominate, {_times(costs)}")


def _off(costs: OffloadCosts, reason: str) -> OffloadDecision:
    return OffloadDecision(0, max(costs.num_blocks, 1), 0, reason)


def _num_needed(costs: OffloadCosts) -> int:
    """Fewest inputs that must leave for the others to fit."""
    if not costs.total_bytes or costs.room_bytes == math.inf:
        return 0
    staying_share = ROOM_SHARE * max(0.0, costs.room_bytes) / costs.total_bytes
    return max(0, math.ceil(costs.num_blocks * (1.0 - staying_share)))


def _largest_hidden(costs: OffloadCosts, most_buffers: int) -> tuple[int, int] | None:
    """Most inputs that leave without much waiting and with a gain in memory, and the buffers for them."""
    compute_ms = costs.num_blocks * (costs.forward_ms + costs.backward_ms)
    for num_leaving in range(costs.num_blocks, 0, -1):
        for num_buffers in range(1, most_buffers + 1):
            most_share = MOST_WAIT_SHARE if num_buffers == most_buffers else ONE_BUFFER_WAIT_SHARE
            is_hidden = _wait_ms(costs, num_leaving, num_buffers) <= most_share * compute_ms
            if is_hidden and _saved_bytes(costs, num_leaving, num_buffers) > 0:
                return num_leaving, num_buffers
    return None


def _wait_ms(costs: OffloadCosts, num_leaving: int, num_buffers: int) -> float:
    """Waits of one pass of a micro-batch, forward and backward. The last block's input stays anyway."""
    num_copies = min(num_leaving, costs.num_blocks - 1)
    away_ms = max(0.0, num_copies * costs.away_ms - costs.num_blocks * costs.forward_ms)
    hiding_ms = (costs.num_blocks - 1) * costs.backward_ms if num_buffers == 2 else 0.0
    return away_ms + max(0.0, num_copies * costs.back_ms - hiding_ms)


def _saved_bytes(costs: OffloadCosts, num_leaving: int, num_buffers: int) -> float:
    return costs.total_bytes * num_leaving / costs.num_blocks - num_buffers * costs.input_bytes


def _times(costs: OffloadCosts) -> str:
    return (
        f"a copy takes {costs.away_ms:.2f} ms away and {costs.back_ms:.2f} ms back, a block {costs.forward_ms:.2f} ms "
        f"forward and {costs.backward_ms:.2f} ms backward"
    )
