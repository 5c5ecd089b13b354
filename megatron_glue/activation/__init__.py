"""Floor 4: recompute of blocks, and moving their inputs off the device and back."""

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.activation.statistics import ActivationStats, ReloadTimes, TimelineEvent

__all__ = ["ActivationManager", "ActivationPlan", "ActivationStats", "ReloadTimes", "TimelineEvent"]
