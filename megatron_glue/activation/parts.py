"""The activation managers of all model parts that one rank holds, under one roof.

Each part has a manager of its own, since what one keeps off the device belongs to one order of blocks. The training
step begins and ends a step of all of them together; figures are their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.statistics import ActivationStats, ReloadTimes, TimelineEvent, sum_times


class PartManagers:
    """The managers of one rank.

    Args:
        managers: One per part of the model, in the order of parts; at least one.
    """

    def __init__(self, managers: Sequence[ActivationManager]) -> None:
        self.managers = tuple(managers)

    def begin_step(self) -> None:
        """Start an optimizer step: nothing of an earlier one is left."""
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

    def close(self) -> None:
        """Free memory, files and threads. Idempotent."""
        for manager in self.managers:
            manager.close()

    def describe(self) -> str:
        """Say in one line what was chosen."""
        line = self.managers[0].describe()
        return line if len(self.managers) == 1 else f"{line}, for each of {len(self.managers)} parts of the model"
