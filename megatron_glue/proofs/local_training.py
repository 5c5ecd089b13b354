"""Runs the entry points' own code on ranks of this machine, and records which data they trained on. For tools.

What runs is ``app.main`` with a command line: configuration, loading, training, saving, summary. Only interpreter start
and imports are left out, since ranks come from a forkserver (``parallel/local_ranks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_glue.parallel.local_ranks import LocalGroup, run_on_ranks
from megatron_glue.proofs.observation import describe_batch, watch_batches
from megatron_glue.training.app import main
from megatron_glue.training.presets import GPT_DEFAULTS
from megatron_glue.training.session import Session
from megatron_glue.types import PackedBatch


class LocalRunError(RuntimeError):
    """A run that did not end well; the message is its own error line."""


@dataclass(frozen=True)
class LocalRun:
    """A command line and its ranks.

    Attributes:
        argv: Words behind the entry point's name, on top of those of ``pretrain_gpt.py``.
        world_size: Number of ranks.
        timeout_s: Wall-clock limit.
    """

    argv: tuple[str, ...]
    world_size: int = 1
    timeout_s: float = 180.0


def train_locally(run: LocalRun, folder: Path) -> list[dict[str, Any]]:
    """Train to the end of a run, or to where its flags stop it.

    Args:
        run: What to run.
        folder: Where each rank's output goes, ``rank_N.log``.

    Returns:
        By rank: ``dp_rank``, ``cp_rank``, and under ``batches`` every micro-batch it was handed, by global index.

    Raises:
        LocalRunError: If a rank's exit code is not 0.
        RankFailedError: If a rank raised, died or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    group = LocalGroup(run.world_size, run.timeout_s, is_made_by_ranks=True)
    reports = run_on_ranks(train_on_rank, group, list(run.argv), str(folder))
    for rank, report in enumerate(reports):
        if report["code"] != 0:
            lines = (folder / f"rank_{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            told = [line for line in lines if line.startswith("error: ")] or lines[-1:]
            raise LocalRunError(f"rank {rank}, exit code {report['code']}: {'; '.join(told)}")
    return reports


def train_on_rank(rank: int, world_size: int, argv: Sequence[str], folder: str) -> dict[str, Any]:
    """One rank of :func:`train_locally`.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        argv: Words behind the entry point's name.
        folder: Where the rank's output goes.

    Returns:
        Its exit code, place and micro-batches.
    """
    report: dict[str, Any] = {"dp_rank": 0, "cp_rank": 0, "batches": []}

    def watch(session: Session) -> None:
        mesh = session.mesh
        report["dp_rank"], report["cp_rank"] = mesh.dp_rank, mesh.cp_rank

        def note(batches: list[PackedBatch]) -> list[PackedBatch]:
            for index, batch in enumerate(batches):
                place = {"step": session.iteration, "micro_batch": index * mesh.dp_size + mesh.dp_rank}
                report["batches"].append(place | describe_batch(batch))
            return batches

        watch_batches(session, note)

    log_path = Path(folder) / f"rank_{rank}.log"
    with log_path.open("w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        code = main(GPT_DEFAULTS, argv, watch)
    return report | {"code": code}
