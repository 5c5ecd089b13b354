"""What a training step's time goes into: a pure function over a list of spans, without a profiler or a device.

Each moment of a step belongs to the first of these that is going on at that moment:

1. ``optimizer``: clipping and the update;
2. ``compute``: a large operator, that is a matrix product or an attention kernel of any length, or any other operator
   of at least ``large_us``;
3. ``communication``: a collective that no large operator hides;
4. ``copy``: a copy between host and device that neither hides, or a wait for one;
5. ``input``: waiting for data;
6. ``glue``: all the rest. Small operators, launches, the Python between operators, reads that make the host wait.

So the shares add up to one, and what is hidden behind compute costs nothing. The largest share is the verdict.

Where spans come from is ``profile_events.py``'s business; what a switch would gain, ``switch_model.py``'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["step", "optimizer", "product", "operator", "communication", "copy", "input", "sync"]
Interval = tuple[float, float]

CATEGORIES = ("compute", "glue", "copy", "communication", "input", "optimizer")
NUM_SHOWN_OPERATORS = 10


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        name: Of the operator, kernel or range.
        kind: What it is. A ``step`` is a window that is analysed; a ``sync`` makes the host wait for the device, and is
            counted only.
        start_us: Begin, on a clock that all spans share, in microseconds.
        end_us: End.
    """

    name: str
    kind: Kind
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Microseconds from begin to end."""
        return self.end_us - self.start_us


@dataclass(frozen=True)
class SmallOperator:
    """Operators of one name that were too short to count as compute.

    Attributes:
        name: Theirs.
        count_per_step: How many of them a step has.
        us_per_step: Their time in a step.
    """

    name: str
    count_per_step: float
    us_per_step: float


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a mean step went.

    Attributes:
        num_steps: Steps that were analysed.
        step_us: Mean duration of one.
        us_by_category: Mean microseconds per category of :data:`CATEGORIES`; they add up to ``step_us``.
        hidden_communication_us: Communication behind large operators or the optimizer, per step.
        copy_us: All copies between host and device, hidden or not, per step.
        num_syncs: Waits of the host for the device, per step.
        num_operators: Operators or kernels per step.
        num_large: Those among them that count as compute.
        small_operators: What most of the glue's operator time went into, reads included, the longest first.
    """

    num_steps: int
    step_us: float
    us_by_category: dict[str, float]
    hidden_communication_us: float
    copy_us: float
    num_syncs: float
    num_operators: float
    num_large: float
    small_operators: list[SmallOperator] = field(default_factory=list)

    def share(self, category: str) -> float:
        """Share of the step in [0, 1]."""
        return self.us_by_category[category] / self.step_us if self.step_us else 0.0

    @property
    def verdict(self) -> str:
        """The category that the largest part of the step goes into; among equals the first of :data:`CATEGORIES`."""
        return max(CATEGORIES, key=lambda category: self.us_by_category[category])

    @property
    def removable_ceiling(self) -> float:
        """Amdahl's bound on what removing all glue and all copies in sight can gain: old step time / new step time."""
        left = self.step_us - self.us_by_category["glue"] - self.us_by_category["copy"]
        return self.step_us / left if left > 0 else float("inf")

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "num_steps": self.num_steps,
            "profiled_step_ms": self.step_us / 1e3,
            "verdict": f"{self.verdict}-bound",
            "shares": {category: self.share(category) for category in CATEGORIES},
            "ms": {category: self.us_by_category[category] / 1e3 for category in CATEGORIES},
            "hidden_communication_ms": self.hidden_communication_us / 1e3,
            "copy_ms": self.copy_us / 1e3,
            "syncs_per_step": self.num_syncs,
            "operators_per_step": self.num_operators,
            "large_operators_per_step": self.num_large,
            "ceiling_without_glue_and_copies": self.removable_ceiling,
            "small_operators": [
                {"name": each.name, "count_per_step": each.count_per_step, "ms_per_step": each.us_per_step / 1e3}
                for each in self.small_operators
            ],
        }


def analyse(spans: Sequence[Span], large_us: float, waited_for_copies_us: float = 0.0) -> StepProfile:
    """Attribute the time of all steps.

    Args:
        spans: Steps, and what happened in them. What lies outside every step is left out.
        large_us: An operator that is no product counts as compute from this duration on, in microseconds.
        waited_for_copies_us: Waits for copies that have no spans, in all steps together: taken from the glue, which is
            where a wait without a span shows.

    Returns:
        The profile of a mean step.

    Raises:
        ValueError: If there is no step.
    """
    steps = [span for span in spans if span.kind == "step"]
    if not steps:
        raise ValueError("spans: no step among them; name each step with a span of kind 'step'")
    windows = _union((step.start_us, step.end_us) for step in steps)
    inside = [span for span in spans if span.kind != "step" and _overlap([(span.start_us, span.end_us)], windows)]
    large, small = [], []
    for span in inside:
        if span.kind == "product" or (span.kind == "operator" and span.duration_us >= large_us):
            large.append(span)
        elif span.kind == "operator":
            small.append(span)
    layers = {
        "optimizer": [span for span in inside if span.kind == "optimizer"],
        "compute": large,
        "communication": [span for span in inside if span.kind == "communication"],
        "copy": [span for span in inside if span.kind == "copy"],
        "input": [span for span in inside if span.kind == "input"],
    }
    glue_operators = [*small, *(span for span in inside if span.kind == "sync")]
    count, total_us = len(steps), _length(windows)
    us, covered, whole = {}, [], {}
    for category, members in layers.items():
        own = _intersect(_union((span.start_us, span.end_us) for span in members), windows)
        whole[category] = _length(own)
        us[category] = _length(own) - _overlap(own, covered)
        covered = _union([*covered, *own])
    glue_us = total_us - _length(covered)
    moved_us = min(waited_for_copies_us, glue_us)
    us["copy"] += moved_us
    us["glue"] = glue_us - moved_us
    return StepProfile(
        num_steps=count,
        step_us=total_us / count,
        us_by_category={category: us[category] / count for category in CATEGORIES},
        hidden_communication_us=(whole["communication"] - us["communication"]) / count,
        copy_us=(whole["copy"] + moved_us) / count,
        num_syncs=sum(span.kind == "sync" for span in inside) / count,
        num_operators=(len(large) + len(small)) / count,
        num_large=len(large) / count,
        small_operators=_by_name(_outside(glue_operators, layers["optimizer"]), count),
    )


def explain(profile: StepProfile) -> str:
    """The verdict in a sentence, with what stands behind it in second place."""
    first, second, *_ = sorted(CATEGORIES, key=profile.share, reverse=True)
    remedies = {
        "compute": "large operators fill the step; faster kernels, a lower precision or less recompute help, glue "
        "removal does not",
        "glue": "the step waits between large operators; fewer, larger operators and fewer host reads help",
        "copy": "compute waits for copies between host and device; hide them (double buffer) or move less",
        "communication": "collectives are not hidden; overlap them, or use a layout with less traffic",
        "input": "the step waits for data; prefetch more or make the packer faster",
        "optimizer": "clipping and the update dominate; a fused optimizer, sharded states or larger batches help",
    }
    return (
        f"{profile.verdict}-bound ({profile.share(first):.0%} of the step): {remedies[first]}. "
        f"Next is {second} with {profile.share(second):.0%}."
    )


def _outside(spans: Iterable[Span], ranges: Sequence[Span]) -> list[Span]:
    taken = _union((span.start_us, span.end_us) for span in ranges)
    return [span for span in spans if not _overlap([(span.start_us, span.end_us)], taken)]


def _by_name(spans: Iterable[Span], num_steps: int) -> list[SmallOperator]:
    counts: dict[str, int] = defaultdict(int)
    durations: dict[str, float] = defaultdict(float)
    for span in spans:
        counts[span.name] += 1
        durations[span.name] += span.duration_us
    longest = sorted(durations, key=lambda name: (-durations[name], name))[:NUM_SHOWN_OPERATORS]
    return [SmallOperator(name, counts[name] / num_steps, durations[name] / num_steps) for name in longest]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, sorted intervals that cover the same moments."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Moments in both; each side disjoint and sorted."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    return _length(_intersect(left, right))
