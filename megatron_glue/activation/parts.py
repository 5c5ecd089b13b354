"""The activation managers of all model parts that one rank holds, under one roof.

Each part has a manager of its own, since what one keeps off the device belongs to one order of blocks. The training
step begins and ends a step of all of them together; figures are their sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.offload_tuner import OffloadTuner
from megatron_glue.activation.statistics import ActivationStats, ReloadTimes, TimelineEvent, sum_times


class PartManagers:
    """The managers of one rank.

    Args:
        managers: One per part of the model, in the order of parts; at least one.
        tuner: Sets offload by what the first steps show; None: it stays as planned.
    """

    def __init__(self, managers: Sequence[ActivationManager], tuner: OffloadTuner | None = None) -> None:
        self.managers = tuple(managers)
        self._tuner = tuner

    def begin_step(self) -> None:
        """Start an optimizer step: nothing of an earlier one is left. With a tuner, one call is collective."""
        if self._tuner is not None:
            self._tuner.before_step(self.managers)
        for manager in self.managers:
            manager.begin_step()

    def repeat_step(self) -> None:
        """Count the next step of all managers into the present one: it is a repetition."""
        for manager in self.managers:
            manager.repeat_step()

    def reset(self) -> None:
        """Drop everything that is kept off the device, also after an exception in forward or backward."""
        for manager in self.managers:
            manager.reset()

    def stats(self) -> ActivationStats:
        """Sums of all figures. The host waits for the device: call it on logging steps."""
        each = [manager.stats() for manager in self.managers]
        return ActivationStats(
            **{field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(ActivationStats)}
        )

    def step_times(self, last_steps: int | None = None) -> list[ReloadTimes]:
        """Sums over the parts for each step, empty without offload. The host waits for the device.

        Args:
            last_steps: Only the newest N steps; ``None``: all.
        """
        return [sum_times(parts) for parts in zip(*(m.step_times(last_steps) for m in self.managers), strict=True)]

    def start_timeline(self) -> None:
        """Set all figures to zero and keep the begin and end of everything from here on."""
        for manager in self.managers:
            manager.start_timeline()

    def timelines(self) -> list[list[TimelineEvent]]:
        """What each part's manager recorded, in the order of parts. The host waits for the device."""
        return [manager.timeline() for manager in self.managers]

    def state_dict(self) -> dict[str, Any]:
        """What was decided during the run, for its checkpoints: JSON values, empty if nothing was."""
        return {} if self._tuner is None else self._tuner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a run that is resumed had decided; collective with a tuner.

        Raises:
            ValueError: It holds no decision.
        """
        if self._tuner is not None:
            self._tuner.load_state_dict(state, self.managers)

    def close(self) -> None:
        """Free memory, files and threads. Idempotent."""
        for manager in self.managers:
            manager.close()

    def describe(self) -> str:
        """Say in one line what was chosen."""
        line = self.managers[0].describe()
        if len(self.managers) > 1:
            line += f", for each of {len(self.managers)} parts of the model"
        return line if self._tuner is None else f"{line}; {self._tuner.describe()}"
