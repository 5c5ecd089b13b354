"""Holds a run against a saved baseline, before a new version, driver or setting goes live.

A pure function over two observations of the same short run: same seed, same data, same steps. ``gate_run.py`` makes
them. Numbers must agree within tolerances; throughput and memory may not get worse by more than is allowed, and may get
better by anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_glue.config.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """What may differ, all relative to the baseline.

    Attributes:
        loss: Largest difference of a loss or gradient norm.
        output: Largest difference of a layer's sampled output, as a norm.
        throughput: Largest drop of tokens per second.
        memory: Largest growth of peak memory.
    """

    loss: float = 1e-5
    output: float = 1e-4
    throughput: float = 0.1
    memory: float = 0.1


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

    Raises:
        ConfigError: If the two are not of the same run.
    """
    _check_same_run(observed, baseline)
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


def _check_same_run(observed: dict[str, Any], baseline: dict[str, Any]) -> None:
    then, now = baseline["run"], observed["run"]
    different = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if different:
        key = different[0]
        raise ConfigError(
            "--gate",
            f"{key}={now.get(key)}",
            f"the baseline was made with {key}={then.get(key)}, so nothing can be compared",
            "use the same flags, or save a new baseline with --save-baseline",
        )
