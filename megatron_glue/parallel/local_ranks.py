"""Runs one function on several ranks of this machine and brings every rank's answer, or the first rank's failure, back.

For tools and tests that need a process group for a moment: a launcher would pay for the import of torch in every rank
and every time. Ranks come from a forkserver that has it loaded already (a plain fork hangs in gloo once the parent has
run a backward), so that eight ranks stand within 0.1 s. Each call makes fresh processes and a fresh group that meets
through a file: nothing of one call can leak into the next, and a hanging or crashing one is ended with all its ranks.

Answers travel as ``torch.save`` bytes and are read with ``weights_only=True``, so they may be tensors, numbers,
strings and containers of them. Training runs are started by torchrun, not by this.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_glue.config.environment import LAUNCHER_NAMES, set_environment_default

DEFAULT_TIMEOUT_S = 60.0
# Whatever is slow to import and starts no threads. FSDP2's hooks pull the compiler in.
PRELOADED = (
    "numpy",
    "pydantic",
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


class RankFailedError(RuntimeError):
    """A rank raised, died or did not finish in time; the message holds its traceback.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {message}")


@dataclass(frozen=True)
class LocalGroup:
    """The process group that ranks get.

    Attributes:
        world_size: Number of ranks.
        timeout_s: Wall-clock limit for all ranks together; what still runs then is killed.
        collective_timeout_s: Longest wait for another rank inside one collective; ``None``: ``timeout_s``.
        device_type: ``cpu`` for gloo, ``cuda`` for gloo and NCCL; then rank r computes on GPU r.
        is_made_by_ranks: The ranks make the group themselves, as an entry point does, out of the variables that a
            launcher sets. One rank gets no variables: an entry point then runs without a group.
    """

    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    collective_timeout_s: float | None = None
    device_type: str = "cpu"
    is_made_by_ranks: bool = False


def preload(modules: Sequence[str]) -> None:
    """Name further modules that ranks find imported; only before the first call of :func:`run_on_ranks`.

    Args:
        modules: Names of modules that start no threads and create no tensors on a GPU.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *modules])


def run_on_ranks(function: Callable[..., Any], group: LocalGroup, *args: Any) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank of a fresh process group.

    Args:
        function: A module-level function.
        group: How many ranks, and how long they may take.
        *args: Further picklable arguments, the same on all ranks.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailedError: If a rank raised, exited without an answer, or was killed at the limit. The others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(free_port()) if group.is_made_by_ranks else f"file://{Path(folder) / 'rendezvous'}"
        readers: dict[Any, int] = {}
        processes = []
        for rank in range(group.world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(writer, rank, group, rendezvous, function, args), daemon=True
            )
            process.start()
            writer.close()
            readers[reader] = rank
            processes.append(process)
        try:
            return _collect(readers, group.timeout_s)
        finally:
            for process in processes:
                process.join(timeout=1.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(readers: dict[Any, int], timeout_s: float) -> list[Any]:
    """Wait for all answers; raise the failure that came first in time."""
    deadline = time.monotonic() + timeout_s
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
            failed_at: float | None
            payload: Any
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
    writer: Connection,
    rank: int,
    group: LocalGroup,
    rendezvous: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of one rank's process."""
    try:
        _prepare_rank(rank, group, rendezvous)
        buffer = io.BytesIO()
        torch.save(function(rank, group.world_size, *args), buffer)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        writer.send((None, buffer.getvalue()))
    except BaseException:
        writer.send((time.monotonic(), traceback.format_exc()))
        # Peers may still wait in a collective with this rank: leave at once, without the interpreter's shutdown.
        writer.close()
        os._exit(1)


def _prepare_rank(rank: int, group: LocalGroup, rendezvous: str) -> None:
    """Make the group, or leave everything for making it."""
    # Without this gloo resolves the machine's host name, which need not lead anywhere.
    set_environment_default("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if not group.is_made_by_ranks:
        if group.device_type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if group.device_type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=rendezvous,
            rank=rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=group.collective_timeout_s or group.timeout_s),
        )
    elif group.world_size > 1:
        values = (rank, rank, group.world_size, group.world_size, "127.0.0.1", rendezvous)
        for name, value in zip(LAUNCHER_NAMES, values, strict=True):
            set_environment_default(name, str(value))


def free_port() -> int:
    """Return a port of this machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
