"""Where a run stands: what the training thread notes at each phase of a step, for whoever watches it. Two assignments.

All ranks come through the same phases in the same order, so their counts can be compared.
"""

from __future__ import annotations

_SLOW_PHASES = frozenset({"evaluation", "checkpoint"})
_SLOW_FACTOR = 10


class Heartbeat:
    """Noted by one thread, read by others.

    Attributes:
        count: Phases begun.
        phase: The present one.
        iteration: The step that it belongs to, counted from 1.
        first_iteration: The first one of this process; 0 before it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.phase = "start"
        self.iteration = 0
        self.first_iteration = 0

    def beat(self, phase: str, iteration: int) -> None:
        """Note that a phase begins.

        Args:
            phase: In words.
            iteration: The step, counted from 1.
        """
        self.phase, self.iteration = phase, iteration
        self.first_iteration = self.first_iteration or iteration
        self.count += 1

    @property
    def patience(self) -> int:
        """Factor on the longest time between two phases: in the first step kernels are compiled and groups made, and
        nothing tells from inside how far an evaluation or a save has come."""
        return _SLOW_FACTOR if self.phase in _SLOW_PHASES or self.iteration <= self.first_iteration else 1
