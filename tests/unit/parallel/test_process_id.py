"""A process is told from a later one with the same number."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron_glue.parallel.process_id import ProcessId, identify, status_of


def test_this_process_is_known_and_another_with_its_number_is_not() -> None:
    own = identify(os.getpid())
    assert own.is_alive
    assert not ProcessId(own.pid, own.start_ticks + 1).is_alive
    ProcessId(own.pid, own.start_ticks + 1).kill()
    status = status_of(os.getpid())
    assert status is not None
    assert status.parent == os.getppid()


def test_a_process_that_has_ended_is_not_alive_even_if_nobody_waited() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = identify(process.pid)
    assert found.is_alive
    found.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not found.is_alive
    assert process.wait() == -9
    assert not identify(process.pid).is_alive
