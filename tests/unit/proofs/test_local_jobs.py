"""What a forked rank must put right before it is like one that torchrun starts. Jobs: tests/distributed/proofs."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest

from megatron_glue.proofs import local_jobs


def _report_handlers(path: str) -> None:
    """In a process of its own: an agent's handler is there, then a rank begins."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    patch = pytest.MonkeyPatch()
    patch.setattr(local_jobs, "prepare_process", lambda: None)

    def main(_defaults: object, _argv: list[str]) -> int:
        found = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        Path(path).write_text(str(found == (signal.SIG_DFL, signal.default_int_handler)))
        return 0

    patch.setattr(local_jobs, "main", main)
    local_jobs._run_rank([])


def test_a_rank_does_not_inherit_the_agents_signal_handlers(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(
        target=_report_handlers, args=(str(tmp_path / "found"),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "found").read_text() == "True"
