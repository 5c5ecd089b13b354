"""Sums gradients that are parts of a sum beside data parallelism: see ``ShardSpec.partial_axes``.

Few and small parameters are concerned: norms and routers under sequence parallelism, KV heads that several ranks hold,
and a tied embedding between the first and the last pipeline stage. Runs after the engine's own reduction.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import EMBEDDING_AXIS, PARTIAL_AXES, get_shard_spec


class PartialSums:
    """One reducer per axis.

    Args:
        params: The model's trainable parameters, as the optimizer sees them.
        mesh: The run's mesh.
    """

    def __init__(self, params: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
        params = list(params)
        groups = {"tp": mesh.tp_group, "kv_copy": mesh.kv_copy_group, EMBEDDING_AXIS: mesh.embedding_group}
        self._reducers = [
            FlatReducer(members, groups[axis])
            for axis in PARTIAL_AXES
            if groups[axis] is not None and (members := [p for p in params if axis in _partial_axes(p)])
        ]

    def reduce(self) -> None:
        """Replace each gradient by its sum."""
        for reducer in self._reducers:
            reducer.reduce()


def _partial_axes(param: nn.Parameter) -> tuple[str, ...]:
    spec = get_shard_spec(param)
    return () if spec is None else spec.partial_axes
