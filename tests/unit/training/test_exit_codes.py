"""Every way in which a tool ends, its exit code and its one line."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.exit_codes import exit_code_of


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--a", "b", "two\nlines", "drop it"), 2, "error: --a=b: two lines; drop it\n"),
        (OSError("no room"), 1, "error: no room\n"),
        (CheckpointError("x: damaged"), 1, "error: x: damaged\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
    ids=["usage", "system", "named failure", "Ctrl-C"],
)
def test_errors_become_one_line(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise error

    assert exit_code_of(run, CheckpointError) == code
    assert capsys.readouterr() == ("", line)


def test_a_tool_keeps_its_own_code_and_its_own_faults() -> None:
    assert exit_code_of(lambda: 7) == 7

    def run() -> int:
        raise CheckpointError("a failure that this tool did not name")

    with pytest.raises(CheckpointError):
        exit_code_of(run)


def test_sigterm_cleans_up_before_it_ends_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def run() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)
        return 0

    assert exit_code_of(run) == 143
    assert cleaned == [True]
    assert capsys.readouterr() == ("", "error: terminated\n")
    assert signal.getsignal(signal.SIGTERM) is before
