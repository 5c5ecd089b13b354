"""Boxes of global tensors: what a layout makes of a tensor, and ranges of flattened ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, tensor_split
from megatron_glue.training.checkpoint.index import find_fault
from megatron_glue.training.checkpoint.parts import GlobalTensor, Part, parts_of_range, place


def mesh(**axes: tuple[int, int]) -> ParallelMesh:
    """A mesh with (size, rank) along axes, without processes."""
    return ParallelMesh(
        sizes={a: size for a, (size, _) in axes.items()}, ranks={a: rank for a, (_, rank) in axes.items()}
    )


def test_a_tensor_without_a_spec_is_whole() -> None:
    tensor = torch.arange(3)
    placed = place(tensor, None, ParallelMesh())
    assert (placed.shape, placed.dtype) == ((3,), torch.int64)
    assert placed.parts[0].offsets == (0,)
    assert placed.parts[0].tensor.data_ptr() == tensor.data_ptr()


def test_a_slice_knows_its_place_on_every_axis() -> None:
    spec = ShardSpec("qkv", (8, 5, 12), (("ep", 0), *tensor_split(2)))
    boxes = []
    for ep, tp, copy in itertools.product(range(2), range(3), range(2)):
        ranks = mesh(ep=(2, ep), tp=(3, tp), kv_copy=(2, copy))
        placed = place(torch.zeros(4, 5, 2), spec, ranks)
        (part,) = placed.parts
        assert placed.shape == (8, 5, 12)
        assert part.offsets == (4 * ep, 0, 4 * tp + 2 * copy)
        boxes.append(tuple((b, b + s) for b, s in zip(part.offsets, part.sizes, strict=True)))
    assert find_fault((8, 5, 12), boxes) is None


def test_copies_are_the_same_part_on_all_their_ranks() -> None:
    spec = ShardSpec("qkv", (2, 5), (("tp", 0),), partial_axes=("kv_copy",))
    offsets = {place(torch.zeros(1, 5), spec, mesh(tp=(2, 1), kv_copy=(2, copy))).parts[0].offsets for copy in (0, 1)}
    assert offsets == {(1, 0)}


def test_a_tensor_that_does_not_fit_its_layout_is_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"w: \(4,\) in memory, \(2,\) by its layout"):
        place(torch.zeros(4), ShardSpec("w", (4,), (("tp", 0),)), mesh(tp=(2, 0)))


def test_writes_through_a_part_count_as_writes() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    version = param._version
    place(param, ShardSpec("w", (2,)), ParallelMesh()).parts[0].tensor.fill_(1)
    assert param._version > version
    assert param.tolist() == [1, 1]


def test_parts_without_elements_are_left_out() -> None:
    tensor = GlobalTensor.of_parts((2, 3), [Part((2, 0), torch.zeros(0, 3)), Part((0, 0), torch.zeros(1, 3))])
    assert [part.offsets for part in tensor.parts] == [(0, 0)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_a_range_of_a_flattened_region_becomes_boxes(sizes: list[int], data: st.DataObject) -> None:
    total = torch.Size(sizes).numel()
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    corner = [data.draw(st.integers(0, 3)) for _ in sizes]
    region = [slice(begin, begin + size) for begin, size in zip(corner, sizes, strict=True)]
    whole = torch.arange(total).view(sizes)
    found = torch.full(sizes, -1)
    for begin, end in itertools.pairwise([0, *cuts, total]):
        flat = torch.arange(begin, end)
        parts = parts_of_range(region, flat, begin)
        assert len(parts) <= max(1, 2 * len(sizes) - 1)
        for part in parts:
            where = tuple(slice(o - c, o - c + s) for o, c, s in zip(part.offsets, corner, part.sizes, strict=True))
            assert (found[where] == -1).all()
            found[where] = part.tensor
            assert part.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert torch.equal(found, whole)


def test_a_range_that_zero_cut_lies_in_its_ranks_slice_of_the_whole() -> None:
    spec = ShardSpec("experts", (4, 3, 2), (("ep", 0),))
    mesh = ParallelMesh(world_size=4, sizes={"ep": 2, "edp": 2}, ranks={"ep": 1, "edp": 1})
    whole = torch.arange(24.0).view(4, 3, 2)
    flat = whole[2:].flatten()
    found = place(FlatRange(flat[5:], 5), spec, mesh)
    assert (found.shape, found.dtype) == ((4, 3, 2), torch.float32)
    for part in found.parts:
        box = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))
        assert torch.equal(part.tensor, whole[box])
        part.tensor.fill_(-1.0)
    assert flat.tolist() == [12.0, 13.0, 14.0, 15.0, 16.0] + [-1.0] * 7, "parts share the range's memory"
    assert place(FlatRange(flat[:0], 0), spec, mesh).parts == ()
