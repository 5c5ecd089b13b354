"""What a local parameter is a part of: its global name, global shape and the tensor dim each mesh axis splits.

Parameters are plain local tensors; the spec stands beside them as an attribute. It is turned into a DTensor only where
one is needed: before FSDP2 wraps the parameter. Checkpoints take slices of the whole from it. A parameter without split
dims is replicated over its mesh.

Copying a parameter (``deepcopy``) or wrapping it drops attributes; the data-parallel engine attaches specs anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

if TYPE_CHECKING:
    pass

_SPEC_ATTRIBUTE = "shard_spec"
EXPERT_AXIS = "ep"
SHARD_AXES = ("tp", "kv_copy", "ep", "etp")
TENSOR_AXES = ("tp", "kv_copy")
EMBEDDING_AXIS = "embedding"
PARTIAL_AXES = ("tp", "kv_copy", EMBEDDING_AXIS)


def tensor_split(dim: int) -> tuple[tuple[str, int], ...]:
    """``shard_dims`` of a tensor dim that all ranks of a tensor-parallel group split."""
    return tuple((axis, dim) for axis in TENSOR_AXES)


@dataclass(frozen=True)
class ShardSpec:
    """The place of one parameter in the whole model.

    Attributes:
        global_name: Name that is the same on all ranks and layouts.
        global_shape: Shape of the whole tensor.
        shard_dims: (mesh axis, tensor dim) of each split, outer axis first; one dim may be split by several axes.
        partial_axes: Axes whose ranks hold the same values of this parameter but see other rows or heads, so that each
            one's gradient is only a part of the sum: ``tp`` for the whole tensor-parallel group, ``kv_copy`` for the
            ranks that share a KV head, ``embedding`` for a tied embedding that the first and the last pipeline stage
            hold. The engine sums over them, as it does over dp and cp for every dense parameter.
    """

    global_name: str
    global_shape: tuple[int, ...]
    shard_dims: tuple[tuple[str, int], ...] = ()
    partial_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis, dim in self.shard_dims:
            if axis not in SHARD_AXES:
                raise ValueError(f"shard_dims={self.shard_dims}: axis {axis!r} is none of {SHARD_AXES}")
            if not 0 <= dim < len(self.global_shape):
                raise ValueError(
                    f"shard_dims={self.shard_dims}: axis {axis!r} splits dim {dim} of {len(self.global_shape)}"
                )
        for axis in self.partial_axes:
            if axis not in PARTIAL_AXES:
                raise ValueError(f"partial_axes={self.partial_axes}: axis {axis!r} is none of {PARTIAL_AXES}")

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to routed experts: it names the expert axis, whatever that axis' size is."""
        return any(axis == EXPERT_AXIS for axis, _ in self.shard_dims)

    def local_shape(self, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one rank's part.

        Args:
            axis_sizes: Ranks along each mesh axis named in ``shard_dims``.

        Returns:
            The local shape.

        Raises:
            ValueError: If a dim does not divide evenly.
        """
        shape = list(self.global_shape)
        for axis, dim in self.shard_dims:
            if shape[dim] % axis_sizes[axis]:
                raise ValueError(
                    f"{self.global_name}: dim {dim} of {self.global_shape} does not divide by {axis}={axis_sizes[axis]}"
                )
            shape[dim] //= axis_sizes[axis]
        return tuple(shape)

    def local_slices(self, axis_sizes: Mapping[str, int], axis_ranks: Mapping[str, int]) -> tuple[slice, ...]:
        """Which part of the whole a rank holds.

        Args:
            axis_sizes: Ranks along each mesh axis named in ``shard_dims``, e.g. ``mesh.axis_sizes``.
            axis_ranks: The rank's index along each of them, e.g. ``mesh.axis_ranks``.

        Returns:
            One slice per dim of the global tensor.

        Raises:
            ValueError: If a dim does not divide evenly.
        """
        sizes = self.local_shape(axis_sizes)
        starts = [0] * len(sizes)
        extents = list(self.global_shape)
        for axis, dim in self.shard_dims:
            extents[dim] //= axis_sizes[axis]
            starts[dim] += axis_ranks[axis] * extents[dim]
        return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

    def placements(self, axes: tuple[str, ...]) -> tuple[Placement, ...]:
        """DTensor placements over mesh axes, ``Replicate`` where the spec names no dim."""
        dims = dict(self.shard_dims)
        return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in axes)


def set_shard_spec(param: Tensor, spec: ShardSpec) -> None:
    """Attach a spec to a parameter."""
    setattr(param, _SPEC_ATTRIBUTE, spec)


def get_shard_spec(param: Tensor) -> ShardSpec | None:
    """The spec of a parameter; ``None`` if it has none, which means replicated."""
    return getattr(param, _SPEC_ATTRIBUTE, None)


def is_expert_parameter(param: Tensor) -> bool:
    """Whether a parameter belongs to routed experts."""
    spec = get_shard_spec(param)
    return spec is not None and spec.is_expert
