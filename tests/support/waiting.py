"""Waits for what another thread or process is about to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_glue.proofs.local_jobs import wait_until


def wait_for(condition: Callable[[], Any], timeout_s: float = 15.0) -> None:
    """Return once a condition is true; fail if it does not become so."""
    assert wait_until(lambda: bool(condition()), timeout_s), "it did not happen in time"
