"""Which rank is blamed, where a process stands, and what is written about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glue.parallel.collectives import Pending
from megatron_glue.parallel.process_id import identify, status_of
from megatron_glue.training import hang
from megatron_glue.training.hang import RankStatus, Verdict, examine, find_place, is_stopped, judge
from megatron_glue.training.heartbeat import Heartbeat
from tests.support.waiting import wait_for


def status(rank: int, *, count: int = 7, waits_in: str = "all_reduce", machine: str = "a", pid: int = 1) -> RankStatus:
    return RankStatus(
        rank, f"host-{machine}", machine, pid, 5, count, "forward and backward", 3, waits_in, "x.py:1 (f)"
    )


def test_a_rank_without_a_report_is_blamed_and_a_neighbour_looks_at_it() -> None:
    reports = {0: status(0), 2: status(2, machine="b"), 3: status(3, machine="b")}
    verdict = judge(reports, reports | {1: status(1, machine="b", pid=42)}, 4)
    assert verdict.text.startswith("rank 1 (pid 42 on host-b, last in forward and backward of iteration 3")
    assert [each.rank for each in verdict.silent] == [1]
    assert verdict.examiners == {1: 2}
    assert Verdict.from_text(verdict.to_text()) == verdict


def test_a_rank_that_never_told_anything_is_named_all_the_same() -> None:
    assert judge({0: status(0)}, {0: status(0)}, 3).text == "ranks 1, 2 hangs: no sign of life (ranks 1, 2)"


def test_the_rank_furthest_behind_is_blamed() -> None:
    verdict = judge({0: status(0), 1: status(1, count=5), 2: status(2, count=6)}, {}, 3)
    assert verdict.text.startswith("rank 1 (in forward and backward of iteration 3")
    assert "rank 2" not in verdict.text
    assert not verdict.silent


def test_among_equals_the_rank_that_waits_for_nobody_is_blamed() -> None:
    verdict = judge({0: status(0), 1: status(1), 2: status(2, waits_in="")}, {}, 3)
    assert verdict.text.startswith("rank 2 (in forward and backward of iteration 3 at x.py:1 (f)) hangs while")
    nobody = judge({rank: status(rank) for rank in range(5)}, {}, 5)
    assert nobody.text.endswith("and 2 more stands still, and no rank is behind another")


def test_the_collective_that_a_process_waits_in_is_found() -> None:
    found: list[tuple[str, str]] = []

    class Work:
        def wait(self) -> None:
            found.append(find_place(sys._current_frames()))

    Pending(torch.zeros(1), Work()).wait()
    (collective, place) = found[0]
    assert collective == "wait"
    assert place.startswith("megatron_glue/parallel/collectives.py:")
    assert find_place(sys._current_frames())[0] == ""


def test_a_status_survives_the_way_over_the_board() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat("data", 4)
    own = RankStatus.of_process(2, heartbeat, with_place=True)
    assert RankStatus.from_text(own.to_text()) == own
    assert (own.pid, own.phase, own.iteration, own.count) == (os.getpid(), "data", 4, 1)


def test_stacks_name_the_functions(tmp_path: Path) -> None:
    path = hang.write_stacks(tmp_path / "hangs", status(3), "no progress for 9 s")
    text = path.read_text()
    assert path.name == "rank_00003.stacks.txt"
    assert "no progress for 9 s" in text
    assert "test_stacks_name_the_functions" in text


@pytest.fixture
def stopped() -> Iterator[RankStatus]:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: (found := status_of(process.pid)) is not None and found.state == "T")
    own = identify(process.pid)
    yield RankStatus(1, "here", "m", own.pid, own.start_ticks, 1, "data", 2)
    process.kill()
    process.wait()


def test_a_stopped_neighbour_is_described_and_killed(
    stopped: RankStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang.shutil, "which", lambda _name: None)
    assert is_stopped(stopped)
    told = examine(tmp_path, stopped)
    expected = f"process {stopped.pid} of rank 1 is stopped, its stacks unknown (py-spy is not installed); it is killed"
    assert told == expected
    stopped.process.kill()
    wait_for(lambda: "is gone" in examine(tmp_path, stopped))


@pytest.mark.skipif(hang.shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_shows_the_stacks_of_a_stopped_neighbour(stopped: RankStatus, tmp_path: Path) -> None:
    assert "its stacks are in" in examine(tmp_path, stopped)
    assert "<module>" in (tmp_path / "rank_00001.py-spy.txt").read_text()


def test_another_process_with_the_same_number_is_left_alone(stopped: RankStatus, tmp_path: Path) -> None:
    other = RankStatus(1, "here", "m", stopped.pid, stopped.start_ticks + 1, 1, "data", 2)
    assert examine(tmp_path, other) == f"process {stopped.pid} of rank 1 is gone"
    other.process.kill()
    assert is_stopped(stopped)


def test_threads_that_watch_are_no_training_threads() -> None:
    found: list[tuple[str, str]] = []

    def watch() -> None:
        class Work:
            def wait(self) -> None:
                found.append(find_place(sys._current_frames()))

        Pending(torch.zeros(1), Work()).wait()

    thread = threading.Thread(target=watch, name="watchdog-call")
    thread.start()
    thread.join()
    assert found == [("", "")]
    assert not dist.is_initialized()
