"""Hidden copy time / min(copy, compute), from fences."""

from __future__ import annotations

import pytest

from megatron_glue.activation import statistics
from megatron_glue.activation.statistics import (
    ActivationStats,
    BlockCall,
    ReloadRecord,
    ReloadTimes,
    StatisticsRecorder,
    sum_times,
)
from megatron_glue.activation.tiers import Transfer

CALL = BlockCall(micro_batch=1, block=2)


def recorder(record_timeline=False):
    return StatisticsRecorder(lambda: 100.0, lambda begin, end: end - begin, record_timeline)


def summary(recorder):
    return recorder.summary(requested_bytes=1, held_bytes=2, buffer_bytes=3)


@pytest.mark.parametrize(
    ("copies", "efficiency"),
    [
        ([(10, 0, 20)], 1.0),
        ([(10, 10, 20)], 0.0),
        ([(10, 5, 20)], 0.5),
        ([(30, 20, 10)], 1.0),
        ([(30, 25, 10)], 0.5),
        ([(10, 12, 20)], 0.0),
        ([(10, 40, 20), (10, 0, 20)], 0.5),
        ([(10, 0, 5)], 1.0),
    ],
)
def test_efficiency_is_hidden_copy_time_by_the_smaller_of_copy_and_compute(copies, efficiency):
    """A wait that began before its copy (for the copy off the device) hides no less than that copy."""
    record = recorder()
    for copy_ms, wait_ms, compute_ms in copies:
        received = 100.0 + copy_ms
        record.add_reload(
            ReloadRecord(CALL, Transfer(100.0, received), received - wait_ms, received, received + compute_ms)
        )
    assert summary(record).overlap_efficiency == pytest.approx(efficiency)


def test_efficiency_without_reloads_is_zero():
    assert ActivationStats().overlap_efficiency == 0.0


def test_sums_and_reset(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_OPEN_RECORDS", 2)
    record = recorder()
    for start in (0.0, 100.0, 200.0, 300.0):
        record.add_offload(CALL, 8, Transfer(start, start + 3))
        record.add_reload(ReloadRecord(CALL, Transfer(start + 1, start + 5), start + 4, start + 6, start + 16))
    assert len(record._open) == 2
    stats = summary(record)
    assert (stats.num_offloads, stats.num_reloads, stats.offloaded_bytes) == (4, 4, 32)
    assert (stats.copy_ms, stats.reload_wait_ms, stats.compute_ms) == (16.0, 8.0, 40.0)
    assert (stats.requested_bytes, stats.held_bytes, stats.buffer_bytes) == (1, 2, 3)
    assert summary(record) == stats, "asking changes nothing"
    assert record.timeline() == []
    record.reset()
    assert summary(record).num_reloads == 0


def test_each_step_has_times_of_its_own(monkeypatch):
    monkeypatch.setattr(statistics, "MAX_OPEN_RECORDS", 1)
    record = recorder()
    for step in range(3):
        record.begin_step()
        for _ in range(step):
            record.add_reload(ReloadRecord(CALL, Transfer(1.0, 5.0), 4.0, 6.0, 16.0))
    once = ReloadTimes(copy_ms=4.0, hidden_copy_ms=2.0, reload_wait_ms=2.0, compute_ms=10.0)
    assert record.step_times() == [ReloadTimes(), once, sum_times([once, once])]
    assert record.step_times(last_steps=2) == [once, sum_times([once, once])]
    assert record.step_times(last_steps=9) == record.step_times()
    assert summary(record).copy_ms == 12.0
    record.reset()
    assert record.step_times() == []


def test_a_repetition_counts_into_its_step():
    record = recorder()
    once = ReloadTimes(copy_ms=4.0, hidden_copy_ms=2.0, reload_wait_ms=2.0, compute_ms=10.0)
    for is_repetition in (False, True, False):
        if is_repetition:
            record.repeat_step()
        record.begin_step()
        record.add_reload(ReloadRecord(CALL, Transfer(1.0, 5.0), 4.0, 6.0, 16.0))
    assert record.step_times() == [sum_times([once, once]), once]


def test_timeline_bars_count_from_the_reset():
    record = recorder(record_timeline=True)
    record.begin_step()
    record.end_forward(CALL, record.begin_forward())
    record.add_offload(CALL, 8, Transfer(101.0, 103.0))
    record.add_reload(ReloadRecord(CALL, Transfer(104.0, 106.0), 105.0, 106.0, 110.0))
    bars = [(bar.name, bar.lane, bar.start_ms, bar.end_ms) for bar in record.timeline()]
    assert {(bar.call, bar.step) for bar in record.timeline()} == {(CALL, 1)}
    assert bars == [
        ("forward", "compute", 0.0, 0.0),
        ("offload", "offload", 1.0, 3.0),
        ("reload", "reload", 4.0, 6.0),
        ("wait", "compute", 5.0, 6.0),
        ("backward", "compute", 6.0, 10.0),
    ]


def test_a_timeline_can_start_later():
    record = recorder()
    assert record.begin_forward() is None
    record.add_offload(CALL, 8, Transfer(101.0, 103.0))
    record.start_timeline()
    assert record.timeline() == []
    assert summary(record).num_offloads == 0
    record.add_offload(CALL, 8, Transfer(101.0, 103.0))
    assert len(record.timeline()) == 1


def test_observing_keeps_bars_for_a_while_and_changes_no_figure():
    record = recorder()
    record.add_offload(CALL, 8, Transfer(101.0, 103.0))
    record.start_observing()
    record.begin_step()
    record.add_offload(CALL, 8, Transfer(104.0, 107.0))
    (bar,) = record.stop_observing()
    assert (bar.name, bar.start_ms, bar.end_ms, bar.step) == ("offload", 4.0, 7.0, 1)
    record.add_offload(CALL, 8, Transfer(101.0, 103.0))
    assert record.timeline() == record.stop_observing() == []
    assert summary(record).num_offloads == 3


def test_observing_beside_a_timeline_leaves_it_whole():
    record = recorder(record_timeline=True)
    for num_bars in (1, 2):
        record.start_observing()
        record.add_offload(CALL, 8, Transfer(101.0, 103.0))
        assert len(record.stop_observing()) == 1
        assert len(record.timeline()) == num_bars


def test_the_backward_of_a_block_whose_input_stayed_counts_as_compute_only():
    record = recorder(record_timeline=True)
    record.begin_step()
    for resident_bytes in (8, 16, 8):
        record.add_resident(resident_bytes)
    record.add_resident_backward(CALL, 90.0)
    stats = summary(record)
    assert (stats.num_residents, stats.resident_bytes, stats.num_reloads) == (3, 16, 0)
    assert record.step_times() == [ReloadTimes(compute_ms=10.0)]
    assert [(bar.name, bar.lane) for bar in record.timeline()] == [("backward", "compute")]
