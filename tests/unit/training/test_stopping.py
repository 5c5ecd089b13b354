"""Signals are remembered, repeated ones end the process, and time can be up."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from megatron_glue.training import stopping
from megatron_glue.training.stopping import STOP_SIGNALS, SignalListener, StopRequest, StopVote
from tests.support.waiting import wait_for


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered_and_ends_nothing(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(number)
    with SignalListener(3) as signals:
        vote = StopVote(signals, None)
        vote.begin()
        assert vote.end() is None
        vote.begin()
        os.kill(os.getpid(), number)
        wait_for(lambda: signals.received is not None)
        assert vote.end() == StopRequest(3, number)
    assert signal.getsignal(number) is before
    assert f"{number.name} on rank 3" in caplog.text


def test_a_second_signal_ends_the_process_once_it_cannot_be_an_echo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    with SignalListener(1, end=codes.append) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: signals.received is not None)
        signals._take(signal.SIGTERM)
        assert codes == [], "torchrun passes on what the whole process group has got"
        monkeypatch.setattr(stopping, "REPEAT_WINDOW_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: codes)
    assert codes == [130]
    assert signals.received == signal.SIGTERM
    assert capsys.readouterr().err.startswith("error: [rank 1] second signal (SIGINT): ended at once")


def test_a_second_signal_is_heard_while_the_main_thread_runs_no_python() -> None:
    """In a collective that never ends no handler of Python is called."""
    codes: list[int] = []
    held = threading.Lock()
    held.acquire()

    def end(code: int) -> None:
        codes.append(code)
        held.release()

    with SignalListener(0, end=end) as signals:
        signals.received = signal.SIGUSR1
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        # Python restarts this wait after a signal without coming back to its caller.
        assert held.acquire(timeout=10)
    assert codes == [143]


def test_time_can_be_up() -> None:
    with SignalListener(2) as signals:
        for deadline, expected in ((time.monotonic() + 600, None), (time.monotonic(), StopRequest(2, None))):
            vote = StopVote(signals, None, deadline)
            vote.begin()
            assert vote.end() == expected
    assert StopRequest(2, None).describe() == "time is up (--exit-duration-in-mins)"


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
    found: list[object] = []

    def work() -> None:
        with SignalListener(0) as signals:
            found.append(signal.getsignal(signal.SIGTERM))
            found.append(signals.received)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, None]
