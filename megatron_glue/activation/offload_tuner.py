"""Measures the first steps of a run and sets offload accordingly (``--offload-policy auto``).

All inputs leave at first, since that is what needs the least memory. After one step of warm-up two are measured: each
copy and each block. Before the step after them all ranks merge what they measured and take the same decision
(``offload_policy.py``); between two steps nothing is stored, so gradients do not notice. A run that is resumed under
the same circumstances takes over the decision that was saved with it.

It stands between two steps and holds no tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.offload_costs import OffloadCosts, merge_costs
from megatron_glue.activation.offload_policy import OffloadBounds, OffloadDecision, decide

logger = logging.getLogger(__name__)

WARMUP_STEPS = 1
MEASURED_STEPS = 2


class OffloadTuner:
    """One for all managers of a rank; every rank has one.

    Args:
        bounds: The user's.
        circumstances: What the decision depends on beside the measured times, in words: device, layout, sizes.
        merge: Returns the elementwise maxima over all ranks of a few numbers; a collective of the whole world.
        announces: Whether this rank logs the decision.

    Attributes:
        decision: Once there is one.
    """

    def __init__(
        self,
        bounds: OffloadBounds,
        circumstances: str,
        merge: Callable[[Sequence[float]], list[float]],
        *,
        announces: bool = True,
    ) -> None:
        self._bounds = bounds
        self._circumstances = circumstances
        self._merge = merge
        self._announces = announces
        self._num_steps = 0
        self.decision: OffloadDecision | None = None

    def before_step(self, managers: Sequence[ActivationManager]) -> None:
        """A training step is about to begin. Every rank calls this before every step; one call is collective.

        The host waits for the device once, when it reads what was measured.
        """
        if self.decision is not None:
            return
        if self._num_steps == WARMUP_STEPS:
            for manager in managers:
                manager.start_observing()
        if self._num_steps == WARMUP_STEPS + MEASURED_STEPS:
            costs = merge_costs([manager.stop_observing() for manager in managers])
            self._take(decide(OffloadCosts.from_maxima(self._merge(costs.as_maxima())), self._bounds), managers, "")
        self._num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON values, empty before the decision."""
        if self.decision is None:
            return {}
        return {"circumstances": self._circumstances, "decision": self.decision.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any], managers: Sequence[ActivationManager]) -> None:
        """Take over the decision of a run that is resumed; measure anew under other circumstances.

        Args:
            state: Of :meth:`state_dict`, the same on all ranks.
            managers: Those of this rank.

        Raises:
            ValueError: It holds no decision.
        """
        if not state:
            return
        decision, saved_in = OffloadDecision.from_dict(state["decision"]), str(state["circumstances"])
        # Ranks may run on different devices, and measuring takes all of them or none.
        (differs,) = self._merge([float(saved_in != self._circumstances)])
        if not differs:
            self._take(decision, managers, ", as when the run was saved")
        elif self._announces:
            logger.info("offload policy: measured anew, the saved decision is of %s", saved_in)

    def describe(self) -> str:
        """Say in one line what was decided, or when it will be."""
        if self.decision is None:
            return f"offload policy: decided after {WARMUP_STEPS + MEASURED_STEPS} steps"
        return f"offload policy: {self.decision.describe()}"

    def _take(self, decision: OffloadDecision, managers: Sequence[ActivationManager], origin: str) -> None:
        self.decision = decision
        for manager in managers:
            manager.apply(decision)
        if self._announces:
            logger.info("%s%s", self.describe(), origin)
