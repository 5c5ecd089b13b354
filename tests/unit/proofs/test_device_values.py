"""Storages are known by themselves, not by where they lie: views count as one, recycled memory as another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_glue.proofs.device_values import StorageSet, tensors_in


@dataclass
class Holder:
    tensor: Tensor
    other: Any = None


def test_tensors_are_found_in_containers_and_dataclasses() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(tensors_in({"x": [a, (b, None)], "y": Holder(c, "text")})) == [a, b, c]
    assert list(tensors_in(Holder)) == []


def test_views_and_parameters_are_their_storage() -> None:
    base = torch.nn.Parameter(torch.zeros(4, 4))
    known = StorageSet()
    known.add(base)
    assert known.has_any(base[1:].detach().view(-1))
    assert not known.has_any(base.clone())
    known.discard(base[0])
    assert not known.has_any(base)


def test_recycled_memory_bears_no_mark() -> None:
    known = StorageSet()
    addresses, recycled = set(), 0
    for _ in range(100):
        tensor = torch.empty(1024)
        recycled += tensor.data_ptr() in addresses
        addresses.add(tensor.data_ptr())
        assert not known.has_any(tensor)
        known.add(tensor)
    assert recycled > 0, "the allocator gave no address twice, so this showed nothing"


def test_dead_storages_are_forgotten() -> None:
    known = StorageSet()
    kept = torch.zeros(1)
    known.add(kept)
    for _ in range(20_000):
        known.add(torch.empty(1))
    assert len(known) < 10_000
    assert known.has_any(kept)


def test_a_sparse_tensor_is_no_element() -> None:
    known = StorageSet()
    known.add(torch.eye(2).to_sparse())
    assert len(known) == 0
