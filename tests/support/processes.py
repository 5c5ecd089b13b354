"""Runs one function on several gloo ranks and brings every rank's answer, or the first rank's failure, back.

Ranks come from a forkserver that has torch loaded already: a plain fork hangs in gloo once the parent has run a
backward, and spawning pays for the import of torch in every rank. Results travel as ``torch.save`` bytes and are read
with ``weights_only=True``, so they may be tensors, numbers, strings and containers of them.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 60.0
# Whatever is slow to import and starts no threads. FSDP2's hooks pull the compiler in.
_PRELOADED = [
    "numpy",
    "pydantic",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its traceback.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {message}")


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        readers: dict[Any, int] = {}
        processes = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            settings = (rank, world_size, rendezvous, collective_timeout_s or timeout_s)
            process = context.Process(target=_rank_main, args=(writer, settings, function, args), daemon=True)
            process.start()
            writer.close()
            readers[reader] = rank
            processes.append(process)
        try:
            return _collect(readers, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=1.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(readers: dict[Any, int], deadline: float, timeout_s: float) -> list[Any]:
    """Wait for all answers; raise the failure that came first in time."""
    answers: dict[int, Any] = {}
    pending = dict(readers)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = sorted(pending.values())
            raise RankFailedError(silent[0], f"ranks {silent} gave no answer within {timeout_s} s")
        failures: list[tuple[float, int, str]] = []
        for reader in ready:
            rank = pending.pop(reader)
            assert isinstance(reader, Connection)
            try:
                failed_at, payload = reader.recv()
            except EOFError:
                failed_at, payload = math.inf, "the process ended without an answer"
            if failed_at is None:
                answers[rank] = torch.load(io.BytesIO(payload), weights_only=True)
            else:
                failures.append((failed_at, rank, payload))
        if failures:
            # Peers of a failed rank fail in its wake; its own reason is the oldest.
            _, rank, reason = min(failures)
            raise RankFailedError(rank, reason)
    return [answers[rank] for rank in range(len(readers))]


def _rank_main(
    writer: Connection, settings: tuple[int, int, str, float], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Body of one rank's process."""
    rank, world_size, rendezvous, collective_timeout_s = settings
    try:
        # Without this gloo resolves the machine's host name, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout_s),
        )
        buffer = io.BytesIO()
        torch.save(function(rank, world_size, *args), buffer)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        writer.send((None, buffer.getvalue()))
    except BaseException:
        writer.send((time.monotonic(), traceback.format_exc()))
        # Peers may still wait in a collective with this rank: leave at once, without the interpreter's shutdown.
        writer.close()
        os._exit(1)
