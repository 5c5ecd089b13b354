"""Takes the numbers of a short run that no layout may change, on every rank, through the parts that train.

Four sessions from the same start: gradients of the first step; those of the load-balancing loss alone and of the
router's z-loss alone, where a wrong factor would drown in the main loss; some whole steps. It judges nothing: see
``comparison.py``. Everything here reads the device and talks to all ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_glue.config.environment import RankEnvironment
from megatron_glue.config.sections import RunConfig
from megatron_glue.data.loader import BatchLoader
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.launch import choose_device
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import accumulate_gradients, train_settled_step
from megatron_glue.types import IGNORE_LABEL, PackedBatch


def observe_on_rank(rank: int, world_size: int, config: RunConfig, folder: str) -> dict[str, Any]:
    """Observe a run on one of several local ranks (``parallel/local_ranks.py``).

    Args:
        rank: This rank.
        world_size: Number of ranks.
        config: A configuration that is valid for them.
        folder: Room for temporary files of all ranks.

    Returns:
        This rank's report (:func:`observe`).
    """
    return observe(config, ObservedPlace.on_local_rank(rank, world_size, config, folder))


@dataclass(frozen=True)
class ObservedPlace:
    """Where one rank observes.

    Attributes:
        mesh: Its ranks.
        device: Where it computes.
        folder: For offloaded activations, its own.
    """

    mesh: ParallelMesh
    device: torch.device
    folder: Path

    @classmethod
    def on_local_rank(cls, rank: int, world_size: int, config: RunConfig, folder: str) -> ObservedPlace:
        """Take the place of one of several local ranks; every rank must call this.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            config: A configuration that is valid for them.
            folder: Room for temporary files of all ranks.

        Returns:
            The place, its folder a part of ``folder``.
        """
        device = choose_device(config.training.device, RankEnvironment(rank, rank, world_size, world_size))
        mesh = ParallelMesh.build(config.parallel, device.type, config.model.num_kv_heads)
        return cls(mesh, device, Path(folder) / f"rank_{rank}")


class WatchedLoader:
    """A loader that shows every step's micro-batches to somebody who may exchange them.

    Args:
        loader: The loader; whatever else is asked of this object is asked of it.
        watch: Gets the batches of a step and returns those to train on.
    """

    def __init__(self, loader: BatchLoader, watch: Callable[[list[PackedBatch]], list[PackedBatch]]) -> None:
        self._loader = loader
        self._watch = watch

    def next_step(self) -> list[PackedBatch]:
        """The next step's micro-batches, watched."""
        return self._watch(self._loader.next_step())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def watch_batches(session: Session, watch: Callable[[list[PackedBatch]], list[PackedBatch]]) -> None:
    """Put a :class:`WatchedLoader` before a session's loader."""
    watched: Any = WatchedLoader(session.data.loader, watch)
    session.data = replace(session.data, loader=watched)


def observe(config: RunConfig, place: ObservedPlace, num_steps: int = 3) -> dict[str, Any]:
    """Observe a run; every rank of the mesh must call this.

    Args:
        config: A validated configuration.
        place: Ranks and device.
        num_steps: Whole steps to take.

    Returns:
        Tensors, numbers and texts by name. Whole tensors are in the first rank's report only.
    """
    mesh, cpu_start = place.mesh, time.process_time()
    report: dict[str, Any] = {"dp_rank": mesh.dp_rank, "cp_rank": mesh.cp_rank, "promised": promised_content(config)}
    report["gradients"] = _first_gradients(config, place)
    for name, other_coefficient in (("aux_gradients", "moe_z_loss_coeff"), ("z_gradients", "moe_aux_loss_coeff")):
        report[name] = _router_gradients(config, other_coefficient, place) if config.moe.num_experts else {}
    report |= _train(config, place, num_steps)
    report["cpu_seconds"] = time.process_time() - cpu_start
    if mesh.rank != 0:
        for name in ("gradients", "aux_gradients", "z_gradients", "weights"):
            del report[name]
    return report


def promised_content(config: RunConfig) -> list[str]:
    """What a report under this configuration must hold, and not only zeros.

    Args:
        config: A validated configuration.

    Returns:
        Names of entries of a report.
    """
    moe, names = config.moe, ["losses", "grad_norms", "gradients", "weights"]
    if not moe.num_experts:
        return names
    names.append("expert_counts")
    if moe.moe_aux_loss_coeff:
        names += ["aux_gradients", "aux_losses"]
    if moe.moe_z_loss_coeff:
        names += ["z_gradients", "z_losses"]
    if moe.moe_router_enable_expert_bias and moe.moe_router_bias_update_rate:
        names.append("router_biases")
    return names


def _first_gradients(config: RunConfig, place: ObservedPlace, *, is_labelled: bool = True) -> dict[str, Tensor]:
    """Every gradient of the first step, whole; without labels only those of auxiliary losses are left."""
    session = build_session(config, place.mesh, place.device, place.folder)
    try:
        if not is_labelled:
            watch_batches(session, lambda batches: [_without_labels(batch) for batch in batches])
        accumulate_gradients(session)
        return session.engine.full_gradients()
    finally:
        session.close()


def _router_gradients(config: RunConfig, other_coefficient: str, place: ObservedPlace) -> dict[str, Tensor]:
    """Gradients of the routers from one of their two losses alone."""
    alone = config.model_copy(update={"moe": config.moe.model_copy(update={other_coefficient: 0.0})})
    gradients = _first_gradients(alone, place, is_labelled=False)
    return {name: gradient for name, gradient in gradients.items() if ".router." in name}


def _without_labels(batch: PackedBatch) -> PackedBatch:
    return replace(batch, labels_T=torch.full_like(batch.labels_T, IGNORE_LABEL), num_label_tokens=0)


def _train(config: RunConfig, place: ObservedPlace, num_steps: int) -> dict[str, Any]:
    mesh = place.mesh
    session = build_session(config, mesh, place.device, place.folder)
    metrics, batches, expert_counts = session.metrics, [], torch.zeros(0, dtype=torch.int64)
    auxiliary: list[list[float]] = []

    def watch(step_batches: list[PackedBatch]) -> list[PackedBatch]:
        step = session.iteration
        # A step that is run again gets its micro-batches once more.
        batches[:] = [batch for batch in batches if batch["step"] < step]
        batches.extend(
            {"step": step, "micro_batch": i, **describe_batch(batch)} for i, batch in enumerate(step_batches)
        )
        return step_batches

    try:
        watch_batches(session, watch)
        start = gather_full_parameters(session.engine.module, mesh)
        for step in range(num_steps):
            metrics.add(train_settled_step(session), 0.0)
            metrics.flush(session.host_reader, mesh.world_group)
            auxiliary.append(metrics.aux_losses)
            if step == 0:
                # Of later steps only by chance: a weight that differs in its last bit may move a token.
                expert_counts = torch.tensor(metrics.expert_counts, dtype=torch.int64)
        end = gather_full_parameters(session.engine.module, mesh)
    finally:
        session.close()
    return {
        "losses": torch.tensor(metrics.losses, dtype=torch.float64),
        "grad_norms": torch.tensor(metrics.grad_norms, dtype=torch.float64),
        "expert_counts": expert_counts,
        "aux_losses": _column(auxiliary, 0),
        "z_losses": _column(auxiliary, 1),
        "weights": end,
        "router_biases": {
            f"blocks.{layer}.ffn.router.expert_bias": router.expert_bias_E.cpu()
            for layer, router in session.built.routers.items()
            if router.expert_bias_E is not None
        },
        "weight_digests": {"at step 0": _digests(start), f"at step {num_steps}": _digests(end)},
        "batches": batches,
    }


def _column(rows: list[list[float]], index: int) -> Tensor:
    """One auxiliary loss by step; a dense model has none."""
    return torch.tensor([row[index] for row in rows if row], dtype=torch.float64)


def describe_batch(batch: PackedBatch) -> dict[str, Any]:
    """What ranks that share a micro-batch must agree about.

    Args:
        batch: A rank's micro-batch.

    Returns:
        ``pack_ids`` and, as texts that are equal or not, ``documents`` of the whole micro-batch and ``rows`` of this
        rank's part of it, which holds ``num_tokens``.
    """
    sequence = batch.sequence
    tensors = (batch.input_ids_T, batch.labels_T, sequence.segment_ids_T, sequence.positions_T)
    return {
        "pack_ids": list(batch.pack_ids),
        "num_tokens": sequence.num_valid_tokens,
        "documents": repr((batch.pack_ids, sequence.whole_lengths)),
        "rows": digest(tensors) + repr((sequence.lengths, sequence.num_pad_tokens, batch.num_label_tokens)),
    }


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest([tensor]) for name, tensor in tensors.items()}


def digest(tensors: Any) -> str:
    """SHA-256 over shapes, dtypes and bits of tensors, in order, as hexadecimal text."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
