"""What a local parameter is a part of: its global name, global shape and the tensor dim each mesh axis splits.

Parameters are plain local tensors; the spec stands beside them as an attribute. It is turned into a DTensor only where
one is needed: before FSDP2 wraps the parameter, and where a checkpoint is written or read. A parameter without split
dims is replicated over its mesh.

Copying a parameter (``deepcopy``) or wrapping it drops attributes; the data-parallel engine attaches specs anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

if TYPE_CHECKING:
    from megatron_glue.parallel.mesh import ParallelMesh

_SPEC_ATTRIBUTE = "shard_spec"
EXPERT_AXIS = "ep"


@dataclass(frozen=True)
class ShardSpec:
    """The place of one parameter in the whole model.

    Attributes:
        global_name: Name that is the same on all ranks and layouts.
        global_shape: Shape of the whole tensor.
        shard_dims: (mesh axis, tensor dim) of each split, outer axis first.
    """

    global_name: str
    global_shape: tuple[int, ...]
    shard_dims: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for axis, dim in self.shard_dims:
            if not 0 <= dim < len(self.global_shape):
                raise ValueError(
                    f"shard_dims={self.shard_dims}: axis {axis!r} splits dim {dim} of {len(self.global_shape)}"
                )

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
    """Whether a parameter belongs to routed experts: its spec names the expert axis, whatever that axis' size is."""
    spec = get_shard_spec(param)
    return spec is not None and any(axis == EXPERT_AXIS for axis, _ in spec.shard_dims)


def to_global_dtensor(tensor: Tensor, spec: ShardSpec, mesh: ParallelMesh) -> Tensor:
    """View a local tensor as the part of the whole that it is, for a checkpoint.

    Args:
        tensor: The parameter, or something shaped like it (gradient, optimizer moment). A DTensor passes unchanged:
            FSDP2 made it global already.
        spec: Place of the parameter.
        mesh: The run's mesh.

    Returns:
        A DTensor over (edp, ep) for expert parameters and over dp for the others, sharing memory with ``tensor``;
        ``tensor`` itself in a world of one process without a process group.
    """
    if isinstance(tensor, DTensor):
        return tensor
    is_expert = any(axis == EXPERT_AXIS for axis, _ in spec.shard_dims)
    device_mesh = mesh.expert_data_mesh if is_expert else mesh.data_mesh
    if device_mesh is None:
        return tensor
    axes = tuple(device_mesh.mesh_dim_names or ())
    return DTensor.from_local(tensor.detach(), device_mesh, spec.placements(axes), run_check=False)
