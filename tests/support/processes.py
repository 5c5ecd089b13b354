"""Runs a test's function on several gloo ranks: ``parallel/local_ranks.py``, as tests like to call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from megatron_glue.config.environment import set_environment_default
from megatron_glue.parallel import local_ranks
from megatron_glue.parallel.local_ranks import DEFAULT_TIMEOUT_S, LocalGroup, RankFailedError, run_on_ranks

__all__ = ["PRELOADED", "RankFailedError", "run_distributed"]

# The package itself is the better part of a second in every rank of every test.
PRELOADED = ["pytest", "megatron_glue.training.app", "megatron_glue.parallel.pipeline"]
if find_spec("deepspeed") is not None:
    # Two seconds of imports in every rank of every test of its engine, which the server does once.
    set_environment_default("DS_ACCELERATOR", "cpu")
    PRELOADED += ["deepspeed", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer"]


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    collective_timeout_s: float | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank of a fresh gloo process group.

    Args:
        function: A module-level function.
        world_size: Number of ranks.
        *args: Further picklable arguments, the same on all ranks.
        timeout_s: Wall-clock limit for all ranks together; what still runs then is killed.
        collective_timeout_s: Longest wait for another rank inside one collective; unset: ``timeout_s``.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailedError: If a rank raised, exited without an answer, or was killed at the limit. The others are ended.
    """
    local_ranks.preload(PRELOADED)
    return run_on_ranks(function, LocalGroup(world_size, timeout_s, collective_timeout_s), *args)
