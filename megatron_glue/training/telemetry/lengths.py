"""Whether documents are still as long as those that the run was planned for.

Packing, memory and the hiding of copies are tuned for lengths of documents: attention grows with their squares. The
newest segments are compared with those of the whole epoch, by the largest difference of their cumulative distributions
over powers of two (the statistic of Kolmogorov and Smirnov). It reads host integers only.

Shape suffixes: S segments.
"""

from __future__ import annotations

import numpy as np

_NUM_BINS = 32
MIN_SEGMENTS = 256
"""Fewer say nothing: the distance of that many from their own distribution is below 0.1 in 99 of 100 cases."""


def histogram(lengths_S: np.ndarray) -> np.ndarray:
    """Count lengths between neighbouring powers of two: int64 [32]; bin b is that of 2^b <= length < 2^(b + 1)."""
    bins = np.floor(np.log2(np.maximum(lengths_S, 1))).astype(np.int64)
    return np.bincount(np.minimum(bins, _NUM_BINS - 1), minlength=_NUM_BINS)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Largest difference of two cumulative distributions, given as histograms with at least one entry: 0 to 1."""
    return float(np.abs(np.cumsum(first) / first.sum() - np.cumsum(second) / second.sum()).max())


class LengthDrift:
    """Compares segments of the newest steps with a reference.

    Args:
        reference_S: int64. Lengths of the segments that are expected, at least one.
        threshold: Distance above which it alarms; off: 0.
    """

    def __init__(self, reference_S: np.ndarray, threshold: float) -> None:
        self._reference, self._threshold = histogram(reference_S), threshold
        self._reference_mean = float(reference_S.mean())
        self._steps: list[np.ndarray] = []
        self._num_recent = 0
        self.is_alarming = False

    def add(self, lengths_S: np.ndarray) -> None:
        """Take over the segments of a step; older steps are forgotten as soon as the newer ones are enough."""
        self._steps.append(lengths_S)
        self._num_recent += len(lengths_S)
        while self._num_recent - len(self._steps[0]) >= MIN_SEGMENTS:
            self._num_recent -= len(self._steps.pop(0))

    def value(self) -> float | None:
        """The distance now; ``None`` before there are enough segments."""
        if self._num_recent < MIN_SEGMENTS:
            return None
        return distance(histogram(np.concatenate(self._steps)), self._reference)

    def alarms(self, value: float | None) -> list[str]:
        """What to tell the user: at most one line, when the alarm begins or ends."""
        was_alarming = self.is_alarming
        self.is_alarming = bool(self._threshold) and value is not None and value > self._threshold
        if self.is_alarming == was_alarming or value is None:
            return []
        if not self.is_alarming:
            return [f"over: lengths of documents are back, distance {value:.2f} (--length-drift-alarm)"]
        recent_mean = float(np.concatenate(self._steps).mean())
        return [
            f"alarm: lengths of documents have drifted by {value:.2f} (--length-drift-alarm {self._threshold:g}), mean "
            f"{self._reference_mean:.0f} -> {recent_mean:.0f} tokens; tune --seq-length, --packing-window, "
            "--micro-batch-size and the number of offloaded blocks again"
        ]
