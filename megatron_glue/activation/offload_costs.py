"""What copies and blocks cost, from the timeline of some steps: what the offload policy decides by.

Stands between the statistics, which record bars, and ``offload_policy.py``. It knows no device and moves nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megatron_glue.activation.statistics import TimelineEvent


@dataclass(frozen=True)
class OffloadCosts:
    """What some steps with all inputs leaving showed. Times are means over blocks of the quickest time of each.

    Attributes:
        away_ms: Copy of one input off the device.
        back_ms: Copy of one input back.
        forward_ms: Forward of one block, without waits.
        backward_ms: Recompute and backward of one block, without waits.
        input_bytes: The largest input.
        total_bytes: Most bytes that were away at one time, all micro-batches in flight together.
        room_bytes: Device memory that was free at the peak; infinity where memory is not accounted for.
        num_blocks: Recomputed blocks of the largest part of the model.
        is_integrated: Whether the device shares the host's memory.
    """

    away_ms: float = 0.0
    back_ms: float = 0.0
    forward_ms: float = math.inf
    backward_ms: float = math.inf
    input_bytes: int = 0
    total_bytes: int = 0
    room_bytes: float = math.inf
    num_blocks: int = 0
    is_integrated: bool = False

    def as_maxima(self) -> list[float]:
        """Numbers of which the largest over ranks describe the rank that can hide least and has least room."""
        smallest = {"forward_ms", "backward_ms", "room_bytes"}
        return [-float(value) if name in smallest else float(value) for name, value in asdict(self).items()]

    @classmethod
    def from_maxima(cls, maxima: Sequence[float]) -> OffloadCosts:
        """The reverse of :meth:`as_maxima`."""
        away, back, forward, backward, input_bytes, total_bytes, room, num_blocks, is_integrated = maxima
        return cls(
            away,
            back,
            -forward,
            -backward,
            int(input_bytes),
            int(total_bytes),
            -room,
            int(num_blocks),
            is_integrated > 0,
        )


def costs_of(
    events: Sequence[TimelineEvent], *, input_bytes: int, total_bytes: int, room_bytes: float, is_integrated: bool
) -> OffloadCosts:
    """Turn the bars of the measured steps of one model part into costs.

    Args:
        events: Bars of some steps in which all inputs left.
        input_bytes: The largest input.
        total_bytes: Most bytes that were away at one time.
        room_bytes: Free device memory at the peak.
        is_integrated: Whether the device shares the host's memory.

    Returns:
        Means over blocks of the quickest copy and run of each, so that one hiccup of a machine does not count.
    """
    quickest: dict[str, dict[int, float]] = defaultdict(dict)
    for event in events:
        times = quickest[event.name]
        times[event.call.block] = min(times.get(event.call.block, math.inf), event.end_ms - event.start_ms)
    means = {name: sum(times.values()) / len(times) for name, times in quickest.items()}
    without = OffloadCosts()
    return OffloadCosts(
        away_ms=means.get("offload", without.away_ms),
        back_ms=means.get("reload", without.back_ms),
        forward_ms=means.get("forward", without.forward_ms),
        backward_ms=means.get("backward", without.backward_ms),
        input_bytes=input_bytes,
        total_bytes=total_bytes,
        room_bytes=room_bytes,
        num_blocks=len(quickest["backward"]),
        is_integrated=is_integrated,
    )


def merge_costs(parts: Sequence[OffloadCosts]) -> OffloadCosts:
    """Costs of all parts on one rank: their inputs add up, of all else the worst counts."""
    worst = OffloadCosts.from_maxima([max(values) for values in zip(*(p.as_maxima() for p in parts), strict=True)])
    return replace(worst, total_bytes=sum(part.total_bytes for part in parts))
