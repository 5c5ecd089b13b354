"""When one process counts as hanging. Several ranks: tests/integration/test_hang.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_glue.parallel.rank_board import run_bounded
from megatron_glue.training.heartbeat import Heartbeat
from megatron_glue.training.watchdog import Watchdog, WatchPlace
from tests.support.waiting import wait_for


@pytest.fixture
def heartbeat() -> Heartbeat:
    beaten = Heartbeat()
    for iteration in (1, 2):
        beaten.beat("forward and backward", iteration)
    return beaten


def place_of(heartbeat: Heartbeat, folder: Path) -> WatchPlace:
    return WatchPlace(0, folder, heartbeat, lambda _seconds: False)


def test_a_process_without_progress_writes_its_stacks_and_ends(
    heartbeat: Heartbeat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    with Watchdog(place_of(heartbeat, tmp_path), 0.3, None, end=codes.append):
        wait_for(lambda: codes)
    assert codes == [1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: [rank 0] no progress for 0.")
    assert "in forward and backward of iteration 2" in line
    assert "wait_for" in (tmp_path / "hangs/iteration_00000002/rank_00000.stacks.txt").read_text()


def test_progress_and_slow_phases_and_zero_end_nothing(heartbeat: Heartbeat, tmp_path: Path) -> None:
    codes: list[int] = []
    with Watchdog(place_of(heartbeat, tmp_path), 0.5, None, end=codes.append):
        for _ in range(10):
            heartbeat.beat("data", 3)
            time.sleep(0.1)
        heartbeat.beat("checkpoint", 3)
        time.sleep(1.0)
    with Watchdog(place_of(heartbeat, tmp_path), 0, None, end=codes.append):
        time.sleep(0.1)
    assert codes == []
    assert list(tmp_path.iterdir()) == []


def test_the_first_step_of_a_process_may_be_slow() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.patience > 1
    heartbeat.beat("data", 41)
    assert heartbeat.patience > 1
    heartbeat.beat("data", 42)
    assert heartbeat.patience == 1


def test_a_call_that_never_returns_or_fails_is_given_up() -> None:
    def fail() -> int:
        raise RuntimeError("Connection reset by peer")

    assert run_bounded(lambda: 3, 5.0) == 3
    assert run_bounded(fail, 5.0) is None
    assert run_bounded(lambda: time.sleep(30), 0.05) is None
