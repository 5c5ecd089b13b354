"""Figures that every rank has of its own: one table of all ranks on each of them, and what is read from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import all_reduce_sum


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured over an interval. All are floats; not a number stands for not measured.

    Attributes:
        step_ms: Wall time per step.
        data_ms: Wait for the next batch, per step.
        communication_ms: Wait for collectives, per step.
        reload_wait_ms: Wait for offloaded activations, per step.
        allocated_bytes: Device memory in use, resident memory on a CPU.
        peak_bytes: The most that it ever was.
        host_bytes: Resident memory.
        utilization: Of the device, 0 to 1.
        collective_bytes: Payload of collectives in the interval.
        saved_bytes: What it wrote into the newest checkpoint.
    """

    step_ms: float
    data_ms: float
    communication_ms: float
    reload_wait_ms: float
    allocated_bytes: float
    peak_bytes: float
    host_bytes: float
    utilization: float
    collective_bytes: float
    saved_bytes: float

    @property
    def own_ms(self) -> float:
        """Time of a step in which it did not wait for others."""
        return self.step_ms - (0.0 if math.isnan(self.communication_ms) else self.communication_ms)


def table_of_ranks(own: RankFigures, rank: int, world_size: int, group: ProcessGroup | None) -> list[RankFigures]:
    """Bring the figures of all ranks to all ranks; blocks the host, not the device.

    Each rank adds its row to a table of zeros: one small sum, which scales better than a ring of all-gathers.

    Args:
        own: This rank's.
        rank: Its place.
        world_size: Number of ranks.
        group: All of them.

    Returns:
        Figures in the order of ranks.
    """
    row = torch.tensor(astuple(own), dtype=torch.float64)
    table = torch.zeros(world_size, len(row), dtype=torch.float64)
    table[rank] = row
    return [RankFigures(*values) for values in all_reduce_sum(table, group).tolist()]


def find_straggler(table: Sequence[RankFigures]) -> tuple[int, float]:
    """The rank with most time of its own, and how many times the median that is.

    Ranks of one job end their steps together, since the fast ones wait in collectives for the slow ones. So it is the
    time outside of them that tells who is slow.
    """
    own = [figures.own_ms for figures in table]
    slowest = max(range(len(own)), key=own.__getitem__)
    return slowest, own[slowest] / max(statistics.median(own), 1e-9)


def mean_of(values: Sequence[float]) -> float | None:
    """Mean of what was measured; ``None`` if nothing was."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None
