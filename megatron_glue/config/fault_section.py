"""The section that says what is a fault, and what a run does about it.

A part of ``sections.py``, which gathers all of them; what is said there holds here.
"""

from __future__ import annotations

from typing import Literal

from megatron_glue.config.section import NonNegativeFloat, NonNegativeInt, Section, option


class FaultConfig(Section):
    """Faults that a run notices by itself (docs/operations.md)."""

    max_nonfinite_steps: NonNegativeInt = option(
        10,
        "Steps in a row whose loss or gradient is not finite before the run stops and names a tensor; each is skipped "
        "on all ranks; off (never stop): 0.",
    )
    detect_anomaly: bool = option(
        False, "Stop at the first NaN in backward and name the operator that made it; slow; off: false."
    )
    loss_spike_threshold: NonNegativeFloat = option(
        10.0,
        "A loss this many times its usual spread above the median of the last 100 steps is a spike. The spread is "
        "1.4826 median absolute deviations, at least 1% of the median; off: 0.",
    )
    loss_spike_action: Literal["warn", "stop"] = option("warn", "What a spike does: a line in the log, or an end.")
    watchdog_timeout_s: NonNegativeInt = option(
        480,
        "Seconds without progress of a rank after which the run reports who hangs where and ends; the first step of a "
        "process, evaluations and saves get ten times as long; off: 0.",
    )
