"""Takes one training step under watch and reports every host read of a device value in it. Judges nothing.

The step is the entry points' own: batches, forward, backward, clipping, update, and the reading of its numbers as on
a logging step. A step before it is not watched: it creates what all later ones use. ``sync_budget.py`` says what is
too much.
"""

from __future__ import annotations

from typing import Any

from megatron_glue.config.sections import RunConfig
from megatron_glue.proofs.cuda_sync_watch import CudaSyncWatch
from megatron_glue.proofs.observation import ObservedPlace, watch_batches
from megatron_glue.proofs.sync_watch import SyncWatch
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import STEP_FUNCTIONS, train_step
from megatron_glue.types import PackedBatch


def audit_on_rank(rank: int, world_size: int, config: RunConfig, folder: str) -> dict[str, Any]:
    """Audit a step on one of several local ranks (``parallel/local_ranks.py``).

    Args:
        rank: This rank.
        world_size: Number of ranks.
        config: A configuration that is valid for them.
        folder: Room for temporary files of all ranks.

    Returns:
        This rank's report (:func:`audit_step`).
    """
    return audit_step(config, ObservedPlace.on_local_rank(rank, world_size, config, folder))


def audit_step(config: RunConfig, place: ObservedPlace) -> dict[str, Any]:
    """Audit a step; every rank of the mesh must call this.

    Args:
        config: A validated configuration.
        place: Ranks and device.

    Returns:
        ``rank``, ``device`` (its type), ``num_micro_batches`` of the step on this rank, ``moe_layers`` (global
        indices), ``has_exchange`` (whether ranks share experts), ``num_announced`` reads that ``HostReader`` counted,
        and ``reads``: each :class:`~megatron_glue.proofs.host_read.HostRead` as a mapping, with its ``count``.
    """
    session = build_session(config, place.mesh, place.device, place.folder)
    try:
        take_step(session)
        stations = frozenset(f.__code__ for f in (take_step, *STEP_FUNCTIONS))
        kind = CudaSyncWatch if place.device.type == "cuda" else SyncWatch
        watch = kind(session.engine.module, stations)

        def show(batches: list[PackedBatch]) -> list[PackedBatch]:
            watch.put_on_device([[batch.tensors, batch.sequence.cache_entries] for batch in batches])
            return batches

        watch_batches(session, show)
        num_announced, num_micro_batches = session.host_reader.count, session.num_micro_batches
        with watch:
            watch.put_on_device(_moments(session))
            take_step(session)
    finally:
        session.close()
    mesh, layers = place.mesh, range(config.model.num_layers)
    return {
        "rank": mesh.rank,
        "device": place.device.type,
        "num_micro_batches": session.num_micro_batches - num_micro_batches,
        "moe_layers": [layer for layer in layers if config.moe.is_moe_layer(layer)],
        "has_exchange": mesh.ep_size * mesh.etp_size > 1,
        "num_announced": session.host_reader.count - num_announced,
        "reads": [read.as_dict() | {"count": count} for read, count in sorted(watch.reads.items())],
    }


def take_step(session: Session) -> None:
    """One step, and its numbers read as on a logging step."""
    result = train_step(session)
    session.metrics.add(result, 0.0)
    session.metrics.flush(session.host_reader, session.mesh.world_group)


def _moments(session: Session) -> list[Any]:
    """The optimizer's state on the device; the step counters of the foreach variant stand on the host."""
    has_host_counters = session.built.backends.optimizer == "foreach"
    return [
        value
        for _, _, state in session.optimizer.named_state()
        for name, value in state.items()
        if name != "step" or not has_host_counters
    ]
