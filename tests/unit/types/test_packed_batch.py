"""A batch whose parts do not fit together cannot be made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_glue.types import IGNORE_LABEL, PackedBatch, PackedSequence


def batch() -> PackedBatch:
    labels = [5, 6, IGNORE_LABEL, IGNORE_LABEL]
    return PackedBatch(torch.arange(4), torch.tensor(labels), PackedSequence.from_lengths([3], 1), 2, (7,))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids_T": torch.zeros(3, dtype=torch.int64)}, r"input_ids_T has shape \(3,\); .* \(4,\)"),
        ({"labels_T": torch.zeros(1, 4, dtype=torch.int64)}, "labels_T has shape"),
        ({"input_ids_T": torch.zeros(4, dtype=torch.int32)}, "input_ids_T has dtype"),
        ({"labels_T": torch.zeros(4)}, "labels_T has dtype"),
        ({"num_label_tokens": -1}, "num_label_tokens=-1"),
        ({"num_label_tokens": 4}, "the 3 valid tokens"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(batch(), **changes)


def test_to_moves_everything() -> None:
    here = batch()
    assert here.to("cpu") is here
    moved = here.to("meta")
    devices = {moved.input_ids_T.device, moved.labels_T.device, moved.sequence.device}
    assert devices == {torch.device("meta")}
    assert (moved.num_label_tokens, moved.pack_ids) == (2, (7,))


def test_tensors_are_all_of_them() -> None:
    here = batch()
    doubled = here.map_tensors(lambda tensor: tensor * 2)
    assert len(here.tensors) == 4
    assert all(torch.equal(a * 2, b) for a, b in zip(here.tensors, doubled.tensors, strict=True))
    assert (doubled.num_label_tokens, doubled.pack_ids) == (2, (7,))
