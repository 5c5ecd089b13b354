"""Load of experts per layer, and alarms about experts that get too much or nothing.

It gets counts of an interval from the metrics, which are summed over ranks already, and keeps only how long each expert
has been without a token.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TOLD = 3
"""Layers or experts that an alarm names."""


@dataclass(frozen=True)
class ExpertFigures:
    """What an interval showed.

    Attributes:
        load: Layer -> load of each expert, as a multiple of an even share.
        num_dead: Layer -> experts without a token for long enough.
        is_imbalanced: Whether a load exceeds the threshold.
        alarms: Lines about what has just begun or ended.
    """

    load: dict[int, list[float]]
    num_dead: dict[int, int]
    is_imbalanced: bool
    alarms: tuple[str, ...]


class ExpertWatch:
    """Watches all MoE layers of a run.

    Args:
        layers: Which layers of the model they are, in the order of the counts.
        imbalance: Load, as a multiple of an even share, above which it alarms; off: 0.
        dead_after: Records in a row without a token that make an expert dead; off: 0.
    """

    def __init__(self, layers: Sequence[int], imbalance: float, dead_after: int) -> None:
        self._layers, self._imbalance, self._dead_after = tuple(layers), imbalance, dead_after
        self._idle: dict[tuple[int, int], int] = {}
        self._dead: set[tuple[int, int]] = set()
        self._was_imbalanced = False

    def look(self, counts_LE: Sequence[Sequence[int]]) -> ExpertFigures:
        """Judge the (token, choice) pairs of an interval.

        Args:
            counts_LE: Pairs of all ranks per layer and expert.
        """
        load = {
            layer: [count * len(row) / max(sum(row), 1) for count in row]
            for layer, row in zip(self._layers, counts_LE, strict=True)
        }
        alarms = [*self._judge_balance(load), *self._judge_dead(load)]
        num_dead = {layer: sum(1 for at, _ in self._dead if at == layer) for layer in self._layers}
        return ExpertFigures(load, num_dead, self._was_imbalanced, tuple(alarms))

    def _judge_balance(self, load: dict[int, list[float]]) -> list[str]:
        above = {layer: max(row) for layer, row in load.items() if self._imbalance and max(row) > self._imbalance}
        was, self._was_imbalanced = self._was_imbalanced, bool(above)
        if above and not was:
            worst = sorted(above, key=lambda layer: -above[layer])[:MAX_TOLD]
            named = ", ".join(
                f"layer {layer}: expert {load[layer].index(above[layer])} {above[layer]:.1f}x" for layer in worst
            )
            return [
                f"alarm: experts are out of balance in {len(above)} layer(s) (--expert-imbalance-alarm "
                f"{self._imbalance:g} x an even share): {named}"
            ]
        if was and not above:
            return [f"over: all experts are below {self._imbalance:g} x an even share (--expert-imbalance-alarm)"]
        return []

    def _judge_dead(self, load: dict[int, list[float]]) -> list[str]:
        if not self._dead_after:
            return []
        for layer, row in load.items():
            for expert, share in enumerate(row):
                self._idle[layer, expert] = 0 if share else self._idle.get((layer, expert), 0) + 1
        was = self._dead
        self._dead = {place for place, idle in self._idle.items() if idle >= self._dead_after}
        lines = []
        if new := sorted(self._dead - was):
            named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:MAX_TOLD])
            more = f" and {len(new) - MAX_TOLD} more" if len(new) > MAX_TOLD else ""
            lines.append(f"alarm: no token for {self._dead_after} records (--dead-expert-alarm): {named}{more}")
        if was and not self._dead:
            lines.append("over: every expert gets tokens again (--dead-expert-alarm)")
        return lines
