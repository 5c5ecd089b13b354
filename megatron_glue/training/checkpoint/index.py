"""Which slice of which tensor stands where in a checkpoint, and whether all are there, each exactly once.

``index.json`` is read instead of DCP's ``.metadata``, which is a pickle. Its audit works on corners, not on volumes,
which a hole and an overlap of the same size would leave right. It is asked twice: before a checkpoint is published, and
by whoever reads one. That bytes are the right ones is the business of checksums (``files.py``).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_glue.training.checkpoint.facts import damage_named
from megatron_glue.training.checkpoint.files import CheckpointError, is_file_name, read_json, to_json, write_durably

INDEX_NAME = "index.json"
_EXPERT_SEGMENT = "experts"
Interval = tuple[int, int]


@dataclass(frozen=True)
class SavedSlice:
    """Where one slice of a tensor is. DCP's reader asks for these attribute names.

    Attributes:
        offsets: First element of the slice, per dim.
        sizes: Elements of the slice, per dim.
        relative_path: File in the checkpoint's folder.
        offset: First byte in the file.
        length: Number of bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class SavedTensor:
    """One whole tensor of a checkpoint.

    Attributes:
        dtype: Its dtype.
        shape: Its global shape.
        slices: Its parts, as the ranks wrote them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[SavedSlice, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_index(folder: Path, *, must_audit: bool = True) -> dict[str, SavedTensor]:
    """Read what tensors a checkpoint holds.

    Args:
        folder: The checkpoint.
        must_audit: Look whether slices cover their tensors. Of ranks that read the same file one is enough.

    Raises:
        CheckpointError: If the index is missing, damaged, or a tensor's slices do not cover it exactly once.
    """
    path = folder / INDEX_NAME
    content = read_json(path)
    with damage_named(path):
        index = parse_tensors(content["tensors"])
        if must_audit:
            check_coverage(index, path)
    return index


def write_index(folder: Path, index: Mapping[str, SavedTensor]) -> None:
    """Write ``index.json`` durably, tensors in the order of their names."""
    write_durably(folder / INDEX_NAME, to_json({"tensors": describe_tensors(index)}))


def describe_tensors(index: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """The tensors as JSON values; see :func:`parse_tensors`."""
    return {
        name: {
            "dtype": str(saved.dtype).removeprefix("torch."),
            "shape": list(saved.shape),
            "slices": [
                {
                    "offsets": list(part.offsets),
                    "sizes": list(part.sizes),
                    "file": part.relative_path,
                    "start": part.offset,
                    "bytes": part.length,
                }
                for part in saved.slices
            ],
        }
        for name, saved in sorted(index.items())
    }


def parse_tensors(content: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """The inverse of :func:`describe_tensors`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: If something else was written.
    """
    return {
        _tensor_name(name): SavedTensor(
            dtype=_dtype(entry["dtype"]),
            shape=tuple(map(_integer, entry["shape"])),
            slices=tuple(
                SavedSlice(
                    tuple(map(_integer, part["offsets"])),
                    tuple(map(_integer, part["sizes"])),
                    _file_name(part["file"]),
                    _integer(part["start"]),
                    _integer(part["bytes"]),
                )
                for part in entry["slices"]
            ),
        )
        for name, entry in content.items()
    }


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def _integer(value: Any) -> int:
    """Neither 1e999 nor a number that no tensor of torch's can have."""
    if type(value) is not int or abs(value) >= 1 << 62:
        raise TypeError(f"{str(value)[:40]!r} is no size")
    return value


def _tensor_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name[:100]!r} is no name of a tensor")
    return name


def _file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name[:100]!r} is no file of this folder")
    return name


def merge_tensors(indexes: Iterable[Mapping[str, SavedTensor]], where: object) -> dict[str, SavedTensor]:
    """Put the slices of all ranks together.

    Args:
        indexes: What each rank wrote.
        where: What to name in the message.

    Raises:
        CheckpointError: If two ranks do not agree about a tensor's shape or dtype.
    """
    first: dict[str, SavedTensor] = {}
    slices: dict[str, list[SavedSlice]] = {}
    for index in indexes:
        for name, saved in index.items():
            known = first.setdefault(name, saved)
            if (known.shape, known.dtype) != (saved.shape, saved.dtype):
                both = f"{known.shape} {known.dtype} on one rank, {saved.shape} {saved.dtype} on another"
                raise CheckpointError(f"{where}: {name} is {both}")
            slices.setdefault(name, []).extend(saved.slices)
    return {name: SavedTensor(saved.dtype, saved.shape, tuple(slices[name])) for name, saved in sorted(first.items())}


def check_coverage(index: Mapping[str, SavedTensor], where: object) -> None:
    """Refuse an index in which an element of a tensor is in no slice, or in two.

    Args:
        index: The tensors of a checkpoint.
        where: What to name in the message.

    Raises:
        CheckpointError: Naming the tensor, the elements and, for an overlap, the files.
    """
    for name, saved in index.items():
        for part in saved.slices:
            if not _is_inside(part, saved.shape):
                raise CheckpointError(
                    f"{where}: {name} of shape {saved.shape} has a slice at {part.offsets} of {part.sizes}"
                )
        boxes = [tuple(zip(p.offsets, map(operator.add, p.offsets, p.sizes), strict=True)) for p in saved.slices]
        fault = find_fault(saved.shape, boxes)
        if fault is None:
            continue
        region, owners = fault
        elements = f"{name}[{', '.join(f'{begin}:{end}' for begin, end in region)}]"
        if not owners:
            raise CheckpointError(f"{where}: {elements} of shape {saved.shape} is in no slice")
        files = ", ".join(saved.slices[owner].relative_path for owner in owners[:3])
        raise CheckpointError(f"{where}: {elements} is in {len(owners)} slices ({files})")


def _is_inside(part: SavedSlice, shape: tuple[int, ...]) -> bool:
    if not len(part.offsets) == len(part.sizes) == len(shape):
        return False
    for offset, length, size in zip(part.offsets, part.sizes, shape, strict=True):
        if not 0 <= offset <= offset + length <= size:
            return False
    return True


def find_fault(
    shape: Sequence[int], boxes: Sequence[tuple[Interval, ...]]
) -> tuple[tuple[Interval, ...], list[int]] | None:
    """Find elements of a tensor that not exactly one box holds.

    Args:
        shape: Of the tensor.
        boxes: (begin, end) per dim, all inside the shape.

    Returns:
        The elements, (begin, end) per dim, and the boxes that hold them: none for a hole, several for an overlap.
        ``None`` if every element is in one box.
    """
    if 0 in shape:
        return None
    filled = list(range(len(boxes)))
    if any(begin == end for box in boxes for begin, end in box):
        filled = [index for index, box in enumerate(boxes) if all(begin < end for begin, end in box)]
    if _is_covered_once(tuple(shape), [boxes[index] for index in filled]):
        return None
    return _find_fault(tuple(shape), boxes, filled, 0)


def _is_covered_once(shape: tuple[int, ...], boxes: Sequence[tuple[Interval, ...]]) -> bool:
    """Whether every element is in one box, in time proportional to the number of boxes.

    How many boxes hold an element is a function of its place. Its differences along all dims are zero but at corners of
    boxes, where each box adds 1 or -1, and they determine the function. So boxes cover the tensor once if and only if
    their corners add up to those of the whole tensor.

    Args:
        shape: Of the tensor.
        boxes: None of them empty.
    """
    cut_dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(cut_dims) == 1:
        # Most tensors: every slice must begin where another ends.
        dim = cut_dims[0]
        return [0, *sorted(box[dim][1] for box in boxes)] == [*sorted(box[dim][0] for box in boxes), shape[dim]]
    signs = [math.prod(corner) for corner in itertools.product((1, -1), repeat=len(cut_dims))]
    whole = itertools.product(*((0, shape[dim]) for dim in cut_dims))
    balance = {corner: -sign for corner, sign in zip(whole, signs, strict=True)}
    for box in boxes:
        for corner, sign in zip(itertools.product(*(box[dim] for dim in cut_dims)), signs, strict=True):
            balance[corner] = balance.get(corner, 0) + sign
    return not any(balance.values())


def _find_fault(
    shape: tuple[int, ...], boxes: Sequence[tuple[Interval, ...]], members: list[int], dim: int
) -> tuple[tuple[Interval, ...], list[int]] | None:
    """As ``find_fault``, from one dim on, for boxes that all hold the same elements of the dims before it.

    Only what is known to have a fault is worth this search, which may look at every box at every cut.
    """
    if len(members) == 1 and all(boxes[members[0]][d] == (0, shape[d]) for d in range(dim, len(shape))):
        return None
    if not members or dim == len(shape):
        return tuple((0, size) for size in shape[dim:]), members
    # A sweep: between two neighbouring cuts the same boxes are present.
    starts: dict[int, list[int]] = {}
    for member in members:
        starts.setdefault(boxes[member][dim][0], []).append(member)
    cuts = sorted({0, shape[dim], *(cut for member in members for cut in boxes[member][dim])})
    present: list[int] = []
    for begin, end in itertools.pairwise(cuts):
        present = [member for member in present if boxes[member][dim][1] > begin] + starts.get(begin, [])
        fault = _find_fault(shape, boxes, present, dim + 1)
        if fault is not None:
            return ((begin, end), *fault[0]), fault[1]
    return None


def check_files(index: Mapping[str, SavedTensor], num_bytes: Mapping[str, int], where: object) -> None:
    """Refuse slices that do not fill their files from the first byte to the last.

    Args:
        index: The tensors of a checkpoint.
        num_bytes: Size of each file that holds slices.
        where: The checkpoint's folder.

    Raises:
        CheckpointError: Naming the file and the tensor.
    """
    by_file: dict[str, list[tuple[int, int, str]]] = {name: [] for name in num_bytes}
    for name, saved in index.items():
        for part in saved.slices:
            if part.relative_path not in num_bytes:
                raise CheckpointError(f"{where}/{part.relative_path}: missing, a part of {name} is in it")
            if part.length < math.prod(part.sizes) * saved.dtype.itemsize:
                too_few = f"{part.length} bytes are too few for {part.sizes} of {name}"
                raise CheckpointError(f"{where}/{part.relative_path}: {too_few}")
            by_file[part.relative_path].append((part.offset, part.length, name))
    for file, slices in by_file.items():
        position = 0
        for offset, length, name in sorted(slices):
            if offset != position:
                raise CheckpointError(f"{where}/{file}: a part of {name} starts at byte {offset}, not at {position}")
            position += length
        if position != num_bytes[file]:
            raise CheckpointError(f"{where}/{file}: {num_bytes[file]} bytes, but its parts end at byte {position}")


def check_experts(model: Mapping[str, Any], index: Mapping[str, SavedTensor], where: object) -> None:
    """Refuse a checkpoint that lacks experts.

    Together with :func:`check_coverage` this says that every expert of every layer is there: experts of a layer are
    stacked along the first dim of few tensors.

    Args:
        model: ``model_facts`` of the run that wrote it.
        index: Its tensors.
        where: What to name in the message.

    Raises:
        CheckpointError: Naming the layer or the tensor.
    """
    num_experts = model.get("num_experts", 0)
    if not num_experts:
        return
    missing = {index for index, is_moe in enumerate(model.get("moe_layers", ())) if is_moe}
    for name, saved in index.items():
        segments = name.split(".")
        if segments[0] != "model" or _EXPERT_SEGMENT not in segments:
            continue
        if saved.shape[:1] != (num_experts,):
            raise CheckpointError(f"{where}: {name} of shape {saved.shape} does not hold {num_experts} experts")
        missing -= {int(segment) for segment in segments if segment.isdecimal()}
    if missing:
        raise CheckpointError(f"{where}: no experts of layer {', '.join(map(str, sorted(missing)))}")
