"""Tensors as a checkpoint sees them: a global shape, and the boxes of it that this rank holds in memory.

Every way of laying a tensor out over ranks comes down to this: whole on every rank, a slice along some dims (tensor and
expert parallelism), a slice of such a slice (FSDP2), or a range of the flattened tensor (ZeRO). Writing and reading
know only boxes, so any layout can read what any other wrote. Nothing here copies or communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec

_DATA_AXES = ("dp_replicate", "fsdp", "edp")
"""Axes whose ranks split what a ShardSpec leaves on each of them."""


@dataclass(frozen=True, eq=False)
class Part:
    """A box of a global tensor.

    Attributes:
        offsets: First element of the box, per dim of the global tensor.
        tensor: Its elements: plain, of the box's shape, sharing memory with what it is a part of.
    """

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the box, per dim."""
        return tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class GlobalTensor:
    """A tensor of which this rank holds all, some or nothing.

    Attributes:
        shape: Shape of the whole.
        dtype: Its dtype.
        parts: What this rank holds. Other ranks may hold the same parts: they are written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """A tensor that is all here."""
        return cls(tuple(tensor.shape), tensor.dtype, (Part((0,) * tensor.dim(), tensor),))

    @classmethod
    def of_parts(cls, shape: Sequence[int], parts: Sequence[Part]) -> GlobalTensor:
        """A tensor by its parts, at least one; parts without elements are left out."""
        dtype = parts[0].tensor.dtype
        return cls(tuple(shape), dtype, tuple(part for part in parts if part.tensor.numel()))


def place(tensor: Tensor | FlatRange, spec: ShardSpec | None, mesh: ParallelMesh) -> GlobalTensor:
    """Find the box that a parameter, or something shaped like it, is; or the boxes, where it was flattened and cut.

    Args:
        tensor: Plain, a DTensor that FSDP2 made, or a range that ZeRO made.
        spec: Place of the parameter; ``None`` if it is whole on every rank.
        mesh: The run's mesh.

    Returns:
        The tensor with its parts here, which share its memory and count writes to it.
    """
    if isinstance(tensor, FlatRange):
        assert spec is not None, "a parameter that was cut has a spec"
        region = spec.local_slices(mesh.axis_sizes, mesh.axis_ranks)
        parts = parts_of_range(region, tensor.values, tensor.start)
        return GlobalTensor(spec.global_shape, tensor.values.dtype, parts)
    # detach() keeps the version counter: a load then counts as a write, and compute copies are refreshed.
    tensor = tensor.detach()
    if spec is None:
        assert not isinstance(tensor, DTensor), "a sharded tensor has a spec"
        return GlobalTensor.whole(tensor)
    region = region_of(tensor, spec, mesh)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    sizes = tuple(extent.stop - extent.start for extent in region)
    assert tuple(local.shape) == sizes, f"{spec.global_name}: {tuple(local.shape)} in memory, {sizes} by its layout"
    return GlobalTensor.of_parts(spec.global_shape, [Part(tuple(extent.start for extent in region), local)])


def region_of(tensor: Tensor, spec: ShardSpec, mesh: ParallelMesh) -> tuple[slice, ...]:
    """Which elements of the whole a tensor holds on this rank.

    Args:
        tensor: Plain: then the spec says it all. DTensor: FSDP2 has split what the spec leaves on each rank once more.
        spec: Place of the parameter.
        mesh: The run's mesh.

    Returns:
        One slice per dim of the global tensor.
    """
    region = list(spec.local_slices(mesh.axis_sizes, mesh.axis_ranks))
    if not isinstance(tensor, DTensor):
        return tuple(region)
    for index, axis in enumerate(tensor.device_mesh.mesh_dim_names or ()):
        dim = getattr(tensor.placements[index], "dim", None)
        if axis in _DATA_AXES and dim is not None:
            # As torch.chunk cuts: all chunks of the same size, the last one shorter, some perhaps empty.
            begin, end = region[dim].start, region[dim].stop
            chunk = -(-(end - begin) // tensor.device_mesh.size(index))
            first = min(begin + tensor.device_mesh.get_local_rank(index) * chunk, end)
            region[dim] = slice(first, min(first + chunk, end))
    return tuple(region)


def parts_of_range(region: Sequence[slice], flat: Tensor, start: int) -> tuple[Part, ...]:
    """Cut a range of a flattened region into boxes, for optimizers that split flattened parameters (ZeRO).

    Args:
        region: Elements of the global tensor that were flattened, one slice per dim; see :func:`region_of`.
        flat: [n] the range's elements, in row-major order.
        start: Index of its first element in the flattened region.

    Returns:
        Views of ``flat``, which together are all of it: at most two per dim more than one.
    """
    sizes = [extent.stop - extent.start for extent in region]
    assert 0 <= start <= start + flat.numel() <= math.prod(sizes), f"{start}+{flat.numel()} of {sizes}"
    parts, position = [], 0
    for box in _boxes_of_range(sizes, start, start + flat.numel()):
        shape = [end - begin for begin, end in box]
        offsets = tuple(extent.start + begin for extent, (begin, _) in zip(region, box, strict=True))
        parts.append(Part(offsets, flat[position : position + math.prod(shape)].view(shape)))
        position += math.prod(shape)
    assert position == flat.numel()
    return tuple(parts)


Box = tuple[tuple[int, int], ...]
"""(begin, end) per dim."""


def _boxes_of_range(sizes: Sequence[int], begin: int, end: int) -> list[Box]:
    """Boxes of the flat range, in row-major order: the rest of a first row, whole rows, the start of a last row."""
    if begin == end:
        return []
    if not sizes:
        return [()]
    row_length = math.prod(sizes[1:])
    first, last = begin // row_length, end // row_length
    if begin % row_length == 0 and end % row_length == 0:
        return [((first, last), *((0, size) for size in sizes[1:]))]
    first_end = min(end, (first + 1) * row_length)
    inner = _boxes_of_range(sizes[1:], begin - first * row_length, first_end - first * row_length)
    if begin % row_length == 0 and first_end - begin == row_length:
        whole_end = last * row_length
        return _boxes_of_range(sizes, begin, whole_end) + _boxes_of_range(sizes, whole_end, end)
    return [((first, first + 1), *box) for box in inner] + _boxes_of_range(sizes, first_end, end)
