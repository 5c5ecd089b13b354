"""The thread that writes: one save at a time, each reported once. What a run makes of it: test_saving.py."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_glue.training.checkpoint.background import BackgroundWriter
from megatron_glue.training.checkpoint.files import CheckpointError
from tests.support.toy_run import CPU, Run


def writer_of(run: Run, write) -> BackgroundWriter:
    return BackgroundWriter(write, run.store.ranks, CPU, timedelta(seconds=30))


def test_a_save_is_reported_once_and_only_when_it_has_ended(tmp_path: Path) -> None:
    run, gate = Run(tmp_path), threading.Event()
    writer = writer_of(run, lambda snapshot, ranks: gate.wait(30))
    assert writer.step_in_flight is None
    assert writer.take_report(wait=True) is None
    writer.start(run.store.snapshot(3, run.state()), run.store.ranks)
    assert writer.step_in_flight == 3
    assert writer.take_report(wait=False) is None
    with pytest.raises(AssertionError, match="one save at a time"):
        writer.start(run.store.snapshot(4, run.state()), run.store.ranks)
    gate.set()
    report = writer.take_report(wait=True)
    assert report is not None
    assert (report.step, report.error) == (3, None)
    assert report.seconds > 0
    assert writer.take_report(wait=True) is None
    assert writer.step_in_flight is None


def test_what_the_thread_raises_is_in_the_report(tmp_path: Path) -> None:
    run, failure = Run(tmp_path), CheckpointError("full")

    def fail(*_args: object) -> None:
        raise failure

    writer = writer_of(run, fail)
    writer.start(run.store.snapshot(0, run.state()), run.store.ranks)
    report = writer.take_report(wait=True)
    assert report is not None
    assert report.error is failure


def test_a_copy_that_finds_no_room_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    writer = writer_of(run, run.store.write)

    def no_room(_parts: object) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(writer.staging, "stage", no_room)
    with pytest.raises(CheckpointError, match=r"step 0 was not saved, earlier .*not enough memory"):
        writer.start(run.store.snapshot(0, run.state()), run.store.ranks)
    assert writer.step_in_flight is None


def test_memory_in_use_is_not_freed(tmp_path: Path) -> None:
    run, gate = Run(tmp_path), threading.Event()
    writer = writer_of(run, lambda snapshot, ranks: gate.wait(30))
    writer.start(run.store.snapshot(0, run.state()), run.store.ranks)
    writer.close()
    assert writer.staging.held_bytes > 0
    gate.set()
    writer.take_report(wait=True)
    writer.close()
    assert writer.staging.held_bytes == 0
