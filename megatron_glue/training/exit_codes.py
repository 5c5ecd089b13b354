"""The exit codes of all commands, and how a tool ends: an error that its user can cause is one line, no traceback.

How an entry point ends, whose ranks fail together, stands in ``app.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_glue.config.errors import ConfigError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def exit_code_of(run: Callable[[], int], *failures: type[Exception]) -> int:
    """Run a tool.

    Args:
        run: Its work; returns its exit code.
        *failures: What beside an ``OSError`` may go wrong without being the tool's own fault.

    Returns:
        The tool's code; 2 for a request that cannot be met as written, 1 for a failure, 130 after Ctrl-C.
    """
    try:
        return run()
    except ConfigError as error:
        line, code = " ".join(str(error).split()), EXIT_USAGE
    except (OSError, *failures) as error:
        line, code = str(error), EXIT_FAILED
    except KeyboardInterrupt:
        line, code = "interrupted", EXIT_INTERRUPTED
    print(f"error: {line}", file=sys.stderr)
    return code
