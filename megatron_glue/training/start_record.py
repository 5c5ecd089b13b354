"""The record of a start: said in the log, and kept as ``env.json`` beside the run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_glue.activation.device_api import device_name, has_integrated_memory
from megatron_glue.config.loading import ResolvedConfig
from megatron_glue.parallel.agreement import together
from megatron_glue.training.run_environment import ENV_NAME, describe_software, environment_record, software
from megatron_glue.training.session import Session
from megatron_glue.training.start_report import Optimisation, optimisations
from megatron_glue.training.summary import write_json


def describe_start(session: Session, resolved: ResolvedConfig, resumed_from: Path | None = None) -> dict[str, Any]:
    """Gather what a start is made of.

    Args:
        session: Before its first step.
        resolved: Where its configuration came from.
        resumed_from: Checkpoint that it goes on from; ``None`` for a new run.

    Returns:
        What ``env.json`` holds.
    """
    built, mesh = session.built, session.mesh
    run = {
        "ranks": mesh.world_size,
        "layout": mesh.describe(),
        "device": device_name(session.device),
        "engine": session.engine.describe(),
        "backends": {role: {"name": name, "reason": reason} for role, name, reason in built.backends.choices},
        "activations": built.activation.describe(),
        "iteration": session.iteration,
        "resumed_from": None if resumed_from is None else str(resumed_from),
    }
    return environment_record(resolved, _techniques(session, resolved), run)


def record_start(session: Session, resolved: ResolvedConfig, folder: Path, resumed_from: Path | None) -> str:
    """Write ``env.json`` and say the same in words; every rank calls it, the first one writes.

    Args:
        session: Before its first step.
        resolved: Where its configuration came from.
        folder: Of the run. A later start replaces the file.
        resumed_from: Checkpoint that it goes on from; ``None`` for a new run.

    Returns:
        Lines for the log: versions, and each optimisation with its state, its reason and its source.

    Raises:
        OSError: If the file cannot be written.
        PeerFailedError: If that happened on the first rank, on the others.
    """
    mesh = session.mesh

    def write() -> None:
        if mesh.rank == 0:
            write_json(folder / ENV_NAME, describe_start(session, resolved, resumed_from))

    together(write, mesh.world_group)
    techniques = _techniques(session, resolved)
    return "\n".join([describe_software(software()), *(entry.describe() for entry in techniques)])


def _techniques(session: Session, resolved: ResolvedConfig) -> list[Optimisation]:
    """Each optimisation with its state, its reason and its source."""
    shared = {"auto": has_integrated_memory(session.device), "yes": True, "no": False}
    is_shared = shared[session.config.activation.activation_integrated_memory]
    return optimisations(session.config, resolved.provenance, is_memory_shared=is_shared)
