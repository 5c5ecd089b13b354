"""What every builder of a layer gets, and how it says what a parameter is a part of.

A builder makes modules of this rank's sizes, names each parameter as it is named in the whole model, and says which dim
is split over which axis. The initial value is that part of the whole parameter's, so that every layout starts equal.

Used while a model is built, never after. It creates no process group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from megatron_glue.backends.registry import Backends
from megatron_glue.layers.initialisation import init_part_normal_
from megatron_glue.layers.packed_metadata import PackedMetadataCache
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, set_shard_spec
from megatron_glue.parallel.tensor import TensorParallel


@dataclass(frozen=True, eq=False)
class LayerBuild:
    """What the layers of one model share while they are built.

    Attributes:
        backends: Kernels.
        metadata_cache: The model's.
        seed: The run's seed.
        mesh: The run's mesh.
    """

    backends: Backends
    metadata_cache: PackedMetadataCache
    seed: int
    mesh: ParallelMesh = field(default_factory=ParallelMesh)

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """The ranks that split each layer's weights, as layers see them."""
        return TensorParallel.from_mesh(self.mesh)

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """``partial_axes`` of what works on the residual stream: its ranks hold different rows, or the same ones."""
        return ("tp",) if self.mesh.sequence_parallel else ()

    @property
    def head_axes(self) -> tuple[str, ...]:
        """``partial_axes`` of what every head shares: each tensor-parallel rank holds other heads."""
        return ("tp",) if self.mesh.tp_size > 1 else ()

    def place(
        self,
        param: nn.Parameter,
        name: str,
        shard_dims: tuple[tuple[str, int], ...] = (),
        partial_axes: tuple[str, ...] = (),
        std: float | None = None,
    ) -> None:
        """Say what a parameter is a part of, and draw its initial value.

        Args:
            param: This rank's part.
            name: Name in the whole model, e.g. ``blocks.3.attention.qkv_weight``.
            shard_dims: See :class:`ShardSpec`.
            partial_axes: See :class:`ShardSpec`.
            std: Standard deviation of the initial value; ``None`` keeps the value that ``param`` has.
        """
        sizes = self.mesh.axis_sizes
        shape = list(param.shape)
        for axis, dim in shard_dims:
            shape[dim] *= sizes[axis]
        spec = ShardSpec(name, tuple(shape), shard_dims, partial_axes)
        set_shard_spec(param, spec)
        if std is not None:
            init_part_normal_(param, std, self.seed, spec, spec.local_slices(sizes, self.mesh.axis_ranks))
