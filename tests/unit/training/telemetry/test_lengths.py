from __future__ import annotations

import numpy as np

from megatron_glue.training.telemetry.lengths import MIN_SEGMENTS, LengthDrift, distance, histogram


def test_distance_of_distributions() -> None:
    short, long = histogram(np.full(10, 3)), histogram(np.full(7, 300))
    assert distance(short, short) == 0
    assert distance(short, long) == 1
    assert distance(short, histogram(np.array([2, 300]))) == 0.5
    assert histogram(np.array([1, 2, 3, 4]))[:3].tolist() == [1, 2, 1]


def test_drift_alarms_once_with_advice_and_says_when_it_is_over() -> None:
    drift = LengthDrift(np.array([100, 110, 120]), threshold=0.5)
    drift.add(np.full(MIN_SEGMENTS - 1, 1000))
    assert drift.value() is None, "too few to say"
    assert drift.alarms(drift.value()) == []
    drift.add(np.full(1, 1000))
    assert drift.value() == 1.0
    (line,) = drift.alarms(drift.value())
    assert line.startswith("alarm: lengths of documents have drifted by 1.00 (--length-drift-alarm 0.5)")
    assert "mean 110 -> 1000 tokens" in line
    assert "tune --seq-length" in line
    assert drift.is_alarming
    assert drift.alarms(drift.value()) == []
    drift.add(np.full(MIN_SEGMENTS, 100))
    assert drift.value() == 0.0, "the old steps are forgotten"
    assert drift.alarms(drift.value())[0].startswith("over: ")


def test_a_sample_of_the_reference_is_no_drift() -> None:
    generator = np.random.default_rng(0)
    reference = generator.lognormal(5, 1, 20_000).astype(np.int64) + 1
    for seed in range(20):
        drift = LengthDrift(reference, threshold=0.2)
        drift.add(np.random.default_rng(seed).choice(reference, MIN_SEGMENTS))
        assert drift.alarms(drift.value()) == []


def test_a_threshold_of_zero_is_off() -> None:
    drift = LengthDrift(np.array([1]), threshold=0.0)
    drift.add(np.full(MIN_SEGMENTS, 1000))
    assert drift.value() == 1.0
    assert drift.alarms(drift.value()) == []
    assert not drift.is_alarming
