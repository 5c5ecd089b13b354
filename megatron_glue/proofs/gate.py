"""Holds a run against a saved baseline, before a new version, driver or setting goes live.

Pure functions over two observations of the same short run: same seed, same data, same steps. ``gate_run.py`` makes
them; ``tools/ablate.py --gate`` and ``tools/baseline.py compare`` ask. Numbers must agree within tolerances; throughput
and memory may not get worse by more than is allowed, and may get better by anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_glue.config.errors import ConfigError
from megatron_glue.proofs.ablation import BF16_TOLERANCE

BF16 = "bfloat16"
DATA_CONTENT = "data.content"
GATED = {
    "loss": "largest relative difference of a loss or gradient norm",
    "output": "largest relative difference of a layer's sampled output",
    "throughput": "largest relative drop of tokens per second",
    "memory": "largest relative growth of peak memory",
}
"""Fields of :class:`Thresholds`, in words for ``--help``."""


@dataclass(frozen=True)
class Thresholds:
    """What may differ, all relative to the baseline.

    Attributes:
        loss: Largest difference of a loss or gradient norm.
        output: Largest difference of a layer's sampled output, as a norm.
        throughput: Largest drop of tokens per second.
        memory: Largest growth of peak memory; infinite, as for throughput: it is reported and not judged.
    """

    loss: float = 1e-5
    output: float = 1e-4
    throughput: float = 0.1
    memory: float = 0.1

    @classmethod
    def of(cls, observed: Mapping[str, Any]) -> Thresholds:
        """Those that hold unless others are given: what bf16 keeps of a number is 1/256 of it.

        Args:
            observed: A run.
        """
        is_mixed = observed.get("made_with", {}).get("dtype") == BF16
        return cls(loss=BF16_TOLERANCE, output=BF16_TOLERANCE) if is_mixed else cls()

    def with_given(self, given: Mapping[str, float | None]) -> Thresholds:
        """These, with what a user gave in their place.

        Args:
            given: Field -> limit; ``None`` for what was not given.
        """
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})


def default_of(name: str) -> str:
    """The default of a threshold, for ``--help``."""
    exact, mixed = (getattr(limits, name) for limits in (Thresholds(), Thresholds.of({"made_with": {"dtype": BF16}})))
    return f"{exact}" if exact == mixed else f"{exact}, in bf16 {mixed}"


def given_limits(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Read a program's flags ``--gate-...``, for :meth:`Thresholds.with_given`.

    Args:
        arguments: With one for each of :data:`GATED`; ``None`` where it was not given.

    Raises:
        ConfigError: If one is negative or no number.
    """
    given = {name: getattr(arguments, f"gate_{name}") for name in GATED}
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"--gate-{name}", value, "is not a number from 0 on", "give 0 or more")
    return given


@dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
        name: What is compared.
        baseline: Its value then, for people.
        observed: Its value now.
        difference: Relative difference; for throughput and memory the change for the worse, negative if better.
        allowed: Its limit.
    """

    name: str
    baseline: str
    observed: str
    difference: float
    allowed: float

    @property
    def is_failed(self) -> bool:
        """Whether it is beyond the limit; what is not a number is."""
        return not self.difference <= self.allowed


def judge(observed: dict[str, Any], baseline: dict[str, Any], thresholds: Thresholds) -> list[Figure]:
    """Compare all figures.

    Args:
        observed: Of this run.
        baseline: The saved one.
        thresholds: What may differ.

    Returns:
        One figure per list of losses, sampled layer, throughput and memory.
    """
    figures = []
    for key, name in (("losses", "training loss"), ("grad_norms", "gradient norm"), ("heldout", "held-out loss")):
        figures.append(_of_series(name, observed[key], baseline[key], thresholds.loss))
    for name, values in baseline["outputs"].items():
        own = observed["outputs"].get(name)
        if own is None:
            figures.append(Figure(name, "sampled", "absent", math.inf, thresholds.output))
            continue
        shown = f"norm {math.hypot(*values):.6f}", f"norm {math.hypot(*own):.6f}"
        figures.append(Figure(name, *shown, relative_norm(own, values), thresholds.output))
    then, now = baseline["tokens_per_second"], observed["tokens_per_second"]
    figures.append(Figure("tokens/s", f"{then:,.0f}", f"{now:,.0f}", (then - now) / then, thresholds.throughput))
    then, now = baseline["peak_memory_bytes"], observed["peak_memory_bytes"]
    shown = f"{then / 2**20:,.1f} MiB", f"{now / 2**20:,.1f} MiB"
    figures.append(Figure("peak memory", *shown, (now - then) / then, thresholds.memory))
    return figures


def relative_norm(own: Sequence[float], base: Sequence[float]) -> float:
    """``|own - base| / |base|``, infinite if the lengths differ or something is not finite."""
    if len(own) != len(base):
        return math.inf
    difference = math.hypot(*(a - b for a, b in zip(own, base, strict=True)))
    norm = math.hypot(*base)
    if not math.isfinite(difference) or not math.isfinite(norm):
        return math.inf
    return difference / norm if norm else difference


def _of_series(name: str, own: Sequence[float], base: Sequence[float], allowed: float) -> Figure:
    """The step at which two series differ most."""
    if len(own) != len(base) or not base:
        return Figure(name, f"{len(base)} values", f"{len(own)} values", math.inf, allowed)
    differences = [relative_norm([a], [b]) for a, b in zip(own, base, strict=True)]
    worst = max(range(len(base)), key=differences.__getitem__)
    label = f"{name}, step {worst + 1}" if len(base) > 1 else name
    return Figure(label, f"{base[worst]:.7g}", f"{own[worst]:.7g}", differences[worst], allowed)


def check_same_run(now: Mapping[str, Any], then: Mapping[str, Any], known: Mapping[str, Any], asked_by: str) -> None:
    """Refuse to compare what is not the same run.

    Args:
        now: What must be equal, of the run that is judged (``gate_run.described_run``).
        then: The same, of the baseline.
        known: The same, of a configuration of nothing but defaults. An earlier version did not have each of today's
            settings; it ran as their defaults say.
        asked_by: Flag or words that named the baseline.

    Raises:
        ConfigError: For the first difference.
    """
    # Settings first: the content of data follows from some of them.
    for key in sorted(then.keys() | now.keys(), key=lambda key: (key == DATA_CONTENT, key)):
        before, after = (values.get(key, known.get(key)) for values in (then, now))
        if before != after:
            raise ConfigError(
                asked_by,
                f"{key}={after}",
                f"the baseline was made with {key}={before}, so nothing can be compared",
                "use the same flags, data and ranks, or make a new baseline",
            )


Judgement = Literal["auto", "refuse", "report"]
"""When throughput and memory refuse: on the same kind of machine, always, never."""


def performance_limits(
    observed: Mapping[str, Any], baseline: Mapping[str, Any], limits: Thresholds, judgement: Judgement
) -> tuple[Thresholds, str]:
    """Decide whether throughput and memory are judged, and how closely.

    ``auto`` judges on the same kind of machine. There, throughput may drop by its limit or by the larger of the two
    runs' spreads of step times, whichever is more: what a machine does by itself within one run is no regression.

    Args:
        observed: Of this run.
        baseline: The saved one.
        limits: What was asked for.
        judgement: When they refuse.

    Returns:
        Limits to judge by, and why in words.
    """
    if judgement == "refuse":
        return limits, "throughput and memory are judged: so it was asked for"
    unjudged = dataclasses.replace(limits, throughput=math.inf, memory=math.inf)
    if judgement == "report":
        return unjudged, "throughput and memory are reported, not judged: so it was asked for"
    then, now = baseline.get("machine") or {}, observed.get("machine") or {}
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            why = f"{key} is {now.get(key)} and was {then.get(key)}"
            return unjudged, f"throughput and memory are reported, not judged: another kind of machine, {why}"
    spread = max(spread_of(baseline.get("step_ms") or []), spread_of(observed.get("step_ms") or []))
    why = f"throughput and memory are judged: the same kind of machine; step times spread by {spread:.1%}"
    if spread > limits.throughput:
        why += ", so it was not at rest and only a drop beyond that refuses"
    return dataclasses.replace(limits, throughput=max(limits.throughput, spread)), why


def spread_of(values: Sequence[float]) -> float:
    """Distance of the quartiles as a share of the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / median
