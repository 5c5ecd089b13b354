"""Whole runs as a launcher would start them, one process per rank, with a trap that springs where a test says so.

Ranks come from a forkserver that has torch loaded (see ``processes.py``), set the launcher's variables themselves and
call the entry point's ``main``. Nothing ends the others when one dies: what they do then is what is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TIMEOUT_S = 90
SMALL_FLAGS = [
    *("--hidden-size", "32", "--num-attention-heads", "2", "--moe-ffn-hidden-size", "16", "--hidden-dropout", "0.1"),
    *("--data-path", "corpus.jsonl", "--seq-length", "64", "--heldout-fraction", "0.2"),
    *("--device", "cpu", "--eval-iters", "1", "--eval-interval", "0", "--sample-tokens", "0"),
    *("--summary-path", "summary.json"),
]
"""A model that trains in moments; layers, experts, batch and saves are for the test to choose, and so is the corpus."""
Trap = Callable[[int], None]


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        code: Its exit code; negative: the signal that killed it; ``None``: it did not end in time.
        out: Standard output.
        err: Standard error.
    """

    code: int | None
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """What it told its user about the end."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run_job(arguments: list[str], folder: Path, world_size: int, trap: Trap | None = None) -> list[RankEnd]:
    """Run ``pretrain_moe.py`` to its end on every rank.

    Args:
        arguments: Behind the program's name.
        folder: Where the ranks run.
        world_size: Number of ranks.
        trap: Module-level function, called with the rank before training.

    Returns:
        Each rank's end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint", "pydantic", "rich"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = folder / f"logs-{time.monotonic_ns()}"
    logs.mkdir()
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, port, folder, logs, arguments, trap), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    texts = [[(logs / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(world_size)]
    return [RankEnd(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def kill_self() -> None:
    """What ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(
    rank: int, world_size: int, port: int, folder: Path, logs: Path, arguments: list[str], trap: Trap | None
) -> None:
    for kind, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(logs / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = (rank, rank, world_size, world_size, "127.0.0.1", port)
        os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    os.chdir(folder)
    torch.set_num_threads(1)
    from megatron_glue.training.app import main
    from megatron_glue.training.presets import MOE_DEFAULTS

    if trap is not None:
        trap(rank)
    code = main(MOE_DEFAULTS, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
