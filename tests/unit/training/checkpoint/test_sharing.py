"""How ranks share the writing: every part has one writer that holds it, and all write about as much."""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import pytest
import torch

from megatron_glue.training.checkpoint import sharing
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.sharing import WriteShares, assign_writers
from megatron_glue.training.checkpoint.tensors import NamedPart

Held = list[list[tuple[int, int]]]
"""(key, bytes) of each part, per rank."""


def writers_of(held: Held) -> dict[int, int]:
    """Key -> rank that writes it, after looking that all who hold a part were told the same."""
    rows = [(key, num_bytes, rank) for rank, entries in enumerate(held) for key, num_bytes in entries]
    keys, num_bytes, ranks = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    told: dict[int, set[int]] = defaultdict(set)
    for key, writer in zip(keys, assign_writers(keys, num_bytes, ranks, len(held)), strict=True):
        told[int(key)].add(int(writer))
    assert all(len(writers) == 1 for writers in told.values())
    return {key: writers.pop() for key, writers in told.items()}


def loads_of(held: Held, writers: dict[int, int]) -> list[int]:
    sizes = dict(entry for entries in held for entry in entries)
    return [sum(sizes[key] for key, writer in writers.items() if writer == rank) for rank in range(len(held))]


def test_every_part_has_one_writer_that_holds_it_and_loads_are_even() -> None:
    replicated = [(key, 10 * key) for key in range(1, 21)]
    held = [[*replicated, (100 + rank, 50)] for rank in range(4)]
    writers = writers_of(held)
    assert writers.keys() == {key for entries in held for key, _ in entries}
    assert all(writers[100 + rank] == rank for rank in range(4))
    loads = loads_of(held, writers)
    assert sum(loads) == sum(dict(entry for entries in held for entry in entries).values())
    assert max(loads) - min(loads) <= 50, "no more than one part"


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_holders_go_to_one_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    held: Held = [[] for _ in range(int(rng.integers(1, 9)))]
    for key in range(100):
        size = int(rng.integers(0, 1000))
        for rank in rng.choice(len(held), size=int(rng.integers(1, len(held) + 1)), replace=False):
            held[rank].append((key, size))
    writers = writers_of(held)
    assert len(writers) == 100
    assert all(key in dict(held[writer]) for key, writer in writers.items())


def test_groups_of_replicas_of_several_sizes_are_even_too() -> None:
    """Eight ranks: some parts on all, others on pairs (r, r + 4), and experts on quartets."""
    held: Held = [[] for _ in range(8)]
    for rank in range(8):
        held[rank] += [(key, 100 + key) for key in range(40)]
        held[rank] += [(1000 * (1 + rank % 4) + key, 70 + key) for key in range(30)]
        held[rank] += [(10_000 * (1 + rank % 2) + key, 90) for key in range(25)]
    loads = loads_of(held, writers_of(held))
    assert max(loads) - min(loads) <= 200


def test_more_ranks_cost_no_more_calls() -> None:
    """A loop over parts of all ranks would take minutes for a thousand ranks."""

    def num_calls(num_ranks: int) -> int:
        keys = np.arange(num_ranks)[:, None] // 2 * 1000 + np.arange(50)[None, :]
        ranks = np.repeat(np.arange(num_ranks), 50)
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            assign_writers(keys.ravel(), np.ones(keys.size, dtype=np.int64), ranks, num_ranks)
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(256) <= 1.1 * num_calls(16)


def test_a_part_has_the_same_key_wherever_it_is_and_no_other_part_has_it() -> None:
    parts = [NamedPart("a", (4,), part) for part in GlobalTensor.whole(torch.zeros(4)).parts]
    other = [NamedPart("b", (4,), part) for part in GlobalTensor.whole(torch.zeros(4)).parts]
    same = [NamedPart("a", (4,), part) for part in GlobalTensor.whole(torch.ones(4)).parts]
    (layout,), (layout_of_other,), (layout_of_same,) = map(sharing.layout_of, (parts, other, same))
    assert layout == layout_of_same
    assert sharing.key_of(layout) == sharing.key_of(layout_of_same) != sharing.key_of(layout_of_other)


def test_one_process_writes_everything() -> None:
    held = [NamedPart("a", (4,), part) for part in GlobalTensor.whole(torch.zeros(4)).parts]
    assert WriteShares().choose(held, 0, None) == held
