"""The exit codes of all commands, and how a tool ends: an error that its user can cause is one line, no traceback.

How an entry point ends, whose ranks fail together, stands in ``app.py``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from megatron_glue.config.errors import ConfigError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
EXIT_OF_SIGNAL = 128
"""Plus the number of the signal, as shells count."""


class TerminatedError(BaseException):
    """SIGTERM, so that what a tool has started and written aside is cleaned up as after Ctrl-C."""


def exit_code_of(run: Callable[[], int], *failures: type[Exception]) -> int:
    """Run a tool.

    Args:
        run: Its work; returns its exit code.
        *failures: What beside an ``OSError`` may go wrong without being the tool's own fault.

    Returns:
        The tool's code; 2 for a request that cannot be met as written, 1 for a failure, 130 after Ctrl-C,
        143 after SIGTERM.
    """
    try:
        with _sigterm_raises():
            return run()
    except ConfigError as error:
        line, code = " ".join(str(error).split()), EXIT_USAGE
    except (OSError, *failures) as error:
        line, code = str(error), EXIT_FAILED
    except KeyboardInterrupt:
        line, code = "interrupted", EXIT_INTERRUPTED
    except TerminatedError:
        line, code = "terminated", EXIT_TERMINATED
    print(f"error: {line}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """By default SIGTERM ends Python at once: no ``finally`` runs, and a tool's processes live on as orphans."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        raise TerminatedError

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
