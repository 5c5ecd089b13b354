"""The index, and the audit that finds holes and overlaps by their elements."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import (
    INDEX_NAME,
    SavedSlice,
    SavedTensor,
    check_coverage,
    check_experts,
    check_files,
    find_fault,
    merge_tensors,
    read_index,
    write_index,
)


def box(*intervals: tuple[int, int], file: str = "__0_0.distcp", start: int = 0, length: int = 100) -> SavedSlice:
    offsets = tuple(begin for begin, _ in intervals)
    return SavedSlice(offsets, tuple(end - begin for begin, end in intervals), file, start, length)


def saved(shape: tuple[int, ...], *slices: SavedSlice) -> SavedTensor:
    return SavedTensor(torch.float32, shape, slices)


def refused(tensor: SavedTensor) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_coverage({"model.a": tensor}, "step_1")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hole_is_named_by_its_elements() -> None:
    tensor = saved((4, 6), box((0, 2), (0, 6)), box((2, 4), (0, 3)))
    assert refused(tensor) == "step_1: model.a[2:4, 3:6] of shape (4, 6) is in no slice"
    assert refused(saved((3,))) == "step_1: model.a[0:3] of shape (3,) is in no slice"
    assert refused(saved(())) == "step_1: model.a[] of shape () is in no slice"


def test_an_overlap_is_named_with_its_files_though_the_volume_is_right() -> None:
    tensor = saved((4,), box((0, 2)), box((1, 3), file="__1_0.distcp"))
    assert refused(tensor) == "step_1: model.a[1:2] is in 2 slices (__0_0.distcp, __1_0.distcp)"


def test_slices_outside_the_tensor_are_refused() -> None:
    assert "has a slice at (2,) of (2,)" in refused(saved((3,), box((0, 2)), box((2, 4))))
    assert "has a slice at (-1,) of (4,)" in refused(saved((3,), box((-1, 3))))
    assert "has a slice at (0,) of (3,)" in refused(saved((3, 1), box((0, 3))))
    assert "has a slice at (0,) of (-1,)" in refused(saved((3,), box((0, -1)), box((0, 3))))


def test_whole_empty_and_scalar_tensors_are_covered() -> None:
    tensors = {
        "whole": saved((2, 3), box((0, 2), (0, 3))),
        "scalar": saved((), box()),
        "empty": saved((0, 4), box((0, 0), (0, 4))),
        "with an empty slice": saved((2,), box((0, 2)), box((2, 2))),
    }
    check_coverage(tensors, "x")


def cut(shape: tuple[int, ...], rng) -> list[tuple[tuple[int, int], ...]]:
    """Cut a box in two along some dim, again and again: partitions that are no grid."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(rng.randint(0, 12)):
        victim = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        begin, end = victim[dim]
        middle = rng.randint(begin, end)
        for part in ((begin, middle), (middle, end)):
            boxes.append((*victim[:dim], part, *victim[dim + 1 :]))
    rng.shuffle(boxes)
    return boxes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_every_fault_is_found_and_nothing_else(sizes: list[int], rng) -> None:
    shape = tuple(sizes)
    boxes = cut(shape, rng)
    assert find_fault(shape, boxes) is None
    change = rng.choice(["drop", "twice", "grow"])
    index = rng.randrange(len(boxes))
    if change == "drop":
        boxes.pop(index)
    elif change == "twice":
        boxes.append(boxes[index])
    else:
        boxes[index] = tuple((0, size) for size in shape)
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for intervals in boxes:
        for element in itertools.product(*(range(begin, end) for begin, end in intervals)):
            counts[element] += 1
    fault = find_fault(shape, boxes)
    if all(count == 1 for count in counts.values()):
        assert fault is None
    else:
        assert fault is not None
        region, owners = fault
        elements = list(itertools.product(*(range(begin, end) for begin, end in region)))
        assert elements
        assert all(counts[element] == len(owners) for element in elements)


class CountedInt(int):
    """A bound of an interval that counts what is done with it."""

    num_uses = 0

    def _counted(name: str):
        def use(self: CountedInt, *others: int):
            CountedInt.num_uses += 1
            return getattr(int, name)(self, *others)

        return use

    __eq__, __ne__, __hash__ = _counted("__eq__"), _counted("__ne__"), _counted("__hash__")
    __lt__, __le__, __gt__, __ge__ = map(_counted, ("__lt__", "__le__", "__gt__", "__ge__"))


def strips(count: int) -> list[tuple[tuple[int, int], ...]]:
    """Columns from top to bottom beside one that is cut into rows: a cut of the rows meets every column."""
    bounds = [CountedInt(number) for number in range(count + 1)]
    columns = [((bounds[0], bounds[count]), (bounds[i], bounds[i + 1])) for i in range(count - 1)]
    return columns + [((bounds[i], bounds[i + 1]), (bounds[count - 1], bounds[count])) for i in range(count)]


def test_the_audit_does_as_much_per_slice_however_many_there_are() -> None:
    def uses_per_slice(count: int) -> float:
        boxes = strips(count)
        CountedInt.num_uses = 0
        assert find_fault((count, count), boxes) is None
        return CountedInt.num_uses / len(boxes)

    assert uses_per_slice(256) < 1.2 * uses_per_slice(32)


def test_a_fault_among_many_slices_is_found() -> None:
    boxes = [((i, i + 1), (j, j + 64)) for i in range(256) for j in range(0, 512, 64)]
    assert find_fault((256, 512), boxes) is None
    assert find_fault((256, 512), boxes[1:]) == (((0, 1), (0, 64)), [])
    assert find_fault((8, 8), strips(8)[:-1]) == (((7, 8), (7, 8)), [])


class CountedSlices(tuple[SavedSlice, ...]):
    """Slices that count how many are copied when tuples are put together."""

    num_copied = 0

    def __add__(self, other):
        CountedSlices.num_copied += len(self) + len(other)
        return CountedSlices((*self, *other))

    def __radd__(self, other):
        return CountedSlices(other) + self


def test_merging_copies_no_slice_again_and_again() -> None:
    one = box((0, 1))
    CountedSlices.num_copied = 0
    merged = merge_tensors(({"a": SavedTensor(torch.float32, (100,), CountedSlices([one]))} for _ in range(100)), "x")
    assert len(merged["a"].slices) == 100
    assert CountedSlices.num_copied <= 200


def test_only_those_who_ask_for_it_audit(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": saved((2,), box((0, 1)))})
    with pytest.raises(CheckpointError, match=r"a\[1:2\] of shape \(2,\) is in no slice"):
        read_index(tmp_path)
    assert read_index(tmp_path, must_audit=False).keys() == {"a"}


def test_slices_fill_their_files() -> None:
    index = {"a": saved((2,), box((0, 2), start=0, length=30)), "b": saved((1,), box((0, 1), start=30, length=20))}
    check_files(index, {"__0_0.distcp": 50}, "step_1")
    for num_bytes, line in ((49, "49 bytes, but its parts end at byte 50"), (60, "60 bytes, but its parts end")):
        with pytest.raises(CheckpointError, match=f"step_1/__0_0.distcp: {line}"):
            check_files(index, {"__0_0.distcp": num_bytes}, "step_1")
    with pytest.raises(CheckpointError, match=r"step_1/__0_0\.distcp: missing, a part of a is in it"):
        check_files(index, {}, "step_1")
    gap = index | {"b": saved((1,), box((0, 1), start=31, length=19))}
    with pytest.raises(CheckpointError, match="a part of b starts at byte 31, not at 30"):
        check_files(gap, {"__0_0.distcp": 50}, "step_1")
    short = index | {"b": saved((9,), box((0, 9), start=30, length=20))}
    with pytest.raises(CheckpointError, match=r"20 bytes are too few for \(9,\) of b"):
        check_files(short, {"__0_0.distcp": 50}, "step_1")


def test_f103_a_missing_expert_is_found() -> None:
    model = {"num_experts": 4, "moe_layers": [False, True, True]}

    def experts(layer: int, count: int = 4) -> dict[str, SavedTensor]:
        return {f"model.blocks.{layer}.feed_forward.experts.down_weight": saved((count, 2))}

    check_experts(model, experts(1) | experts(2), "step_1")
    check_experts({"num_experts": 0}, {}, "step_1")
    with pytest.raises(CheckpointError, match=r"step_1: no experts of layer 2"):
        check_experts(model, experts(1), "step_1")
    with pytest.raises(CheckpointError, match=r"experts\.down_weight of shape \(2, 2\) does not hold 4 experts"):
        check_experts(model, experts(1, 2) | experts(2), "step_1")
    half = {"a": saved((4, 2), box((0, 2), (0, 2)))}
    with pytest.raises(CheckpointError, match=r"a\[2:4, 0:2\]"):
        check_coverage(half, "step_1")


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    first = {"a": saved((2,), box((0, 1)))}
    merged = merge_tensors([first, {"a": saved((2,), box((1, 2), file="__1_0.distcp"))}], "x")
    assert [part.relative_path for part in merged["a"].slices] == ["__0_0.distcp", "__1_0.distcp"]
    for other in (saved((3,)), replace(first["a"], dtype=torch.bfloat16)):
        with pytest.raises(CheckpointError, match=r"on one rank, .* on another"):
            merge_tensors([first, {"a": other}], "x")


def test_an_index_comes_back_as_it_was(tmp_path: Path) -> None:
    index = {
        "b": SavedTensor(torch.bfloat16, (2, 3), (box((0, 2), (0, 1)), box((0, 2), (1, 3), file="__1_0.distcp"))),
        "a": saved((), box()),
    }
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index
    assert list(json.loads((tmp_path / INDEX_NAME).read_bytes())["tensors"]) == ["a", "b"]
    assert index["b"].num_bytes == 2 * math.prod((2, 3))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"tensors": 1}',
        '{"tensors": {"a": {}}}',
        '{"tensors": {"a": {"dtype": "no_such", "shape": [], "slices": []}}}',
        '{"tensors": {"a": {"dtype": "load", "shape": [], "slices": []}}}',
        '{"tensors": {"a": {"dtype": "float32", "shape": ["x"], "slices": []}}}',
        '{"tensors": {"a": {"dtype": "float32", "shape": [1], "slices": [{"offsets": [0], "sizes": [1], '
        '"file": "../x", "start": 0, "bytes": 9}]}}}',
    ],
)
def test_a_damaged_index_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / INDEX_NAME
    path.write_text(content)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_index(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
