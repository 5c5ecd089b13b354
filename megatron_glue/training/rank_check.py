"""The check of ``--check-ranks``: ranks that must hold the same weights or the same micro-batch really do.

A rank that has drifted, or was given other data, spoils a run without any error. What must agree: a slice of a
parameter or buffer on all ranks that hold it, a micro-batch's rows among the tensor-parallel and pipeline ranks that
share them, and the packs behind them among context-parallel ranks too. Fingerprints of 64 bits are compared, so the
host waits for the device: this is for finding faults.

Stands in front of the first step and on logging steps (weights), and behind the loader (micro-batches).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glue.parallel.collectives import gather_rows
from megatron_glue.parallel.gather import differing_replicas, fingerprint
from megatron_glue.training.session import Session
from megatron_glue.types import PackedBatch


class RanksDifferError(RuntimeError):
    """Ranks that must hold the same values do not; the message names what and where."""


def check_weights(session: Session) -> None:
    """Compare parameters and buffers, router biases among them, between the ranks that must agree; collective.

    Args:
        session: Between two steps.

    Raises:
        RanksDifferError: On all ranks, with the first tensors that differ.
    """
    if differing := differing_replicas(session.engine.model, session.mesh):
        shown = ", ".join(differing[:3])
        raise RanksDifferError(f"--check-ranks: after iteration {session.iteration}, ranks differ in {shown}")


def check_batches(session: Session, batches: Sequence[PackedBatch]) -> None:
    """Compare a step's micro-batches between the ranks that must agree; collective.

    Args:
        session: At the step that they belong to.
        batches: This rank's micro-batches.

    Raises:
        RanksDifferError: On all ranks, with the first tensor that differs.
    """
    mesh = session.mesh
    if mesh.world_group is None:
        return
    names = list(_parts(batches[0]))
    own = torch.stack([torch.stack([fingerprint(part).cpu() for part in _parts(batch).values()]) for batch in batches])
    tables = torch.stack(gather_rows(own, mesh.world_group))
    places = torch.stack(gather_rows(torch.tensor([mesh.dp_rank, mesh.cp_rank]), mesh.world_group)).tolist()
    for part, name in enumerate(names):
        # Of context-parallel ranks only what describes the whole micro-batch is the same.
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, (dp_rank, cp_rank) in enumerate(places):
            groups.setdefault((dp_rank,) if name in _OF_THE_WHOLE else (dp_rank, cp_rank), []).append(rank)
        for ranks in groups.values():
            is_same = (tables[ranks, :, part] == tables[ranks[0], :, part]).all(dim=0)
            if not is_same.all():
                index = int((~is_same).int().argmax())
                shown = ", ".join(map(str, ranks))
                raise RanksDifferError(
                    f"--check-ranks: in iteration {session.iteration + 1}, ranks {shown} differ in {name} of "
                    f"micro-batch {index}"
                )


_OF_THE_WHOLE = ("packs", "lengths")


def _parts(batch: PackedBatch) -> dict[str, Tensor]:
    sequence = batch.sequence
    return {
        "packs": torch.tensor(batch.pack_ids, dtype=torch.int64),
        "lengths": torch.tensor(sequence.whole_lengths, dtype=torch.int64),
        "token ids": batch.input_ids_T,
        "labels": batch.labels_T,
        "segments": sequence.segment_ids_T,
        "positions": sequence.positions_T,
    }
