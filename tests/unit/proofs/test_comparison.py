"""The comparison lets equal observations pass and fails on anything that is wrong in one of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_glue.proofs.comparison import compare, relative_difference

Report = dict[str, Any]


def batch(step: int, micro_batch: int, packs: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    return {
        "step": step,
        "micro_batch": micro_batch,
        "pack_ids": list(packs),
        "num_tokens": num_tokens,
        "documents": f"documents of {packs}",
        "rows": f"rows of {packs}",
    }


def reference() -> Report:
    """One process: two steps of two micro-batches."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(4, 4, generator=generator) for name in ("a.weight", "b.router.weight", "b.bias")}
    digests = {name: f"digest of {name}" for name in weights}
    return {
        "dp_rank": 0,
        "cp_rank": 0,
        "losses": torch.tensor([5.0, 4.0], dtype=torch.float64),
        "grad_norms": torch.tensor([2.0, 1.0], dtype=torch.float64),
        "aux_losses": torch.tensor([1.1, 1.05], dtype=torch.float64),
        "z_losses": torch.tensor([4.0, 3.9], dtype=torch.float64),
        "expert_counts": torch.tensor([[3, 5]]),
        "gradients": {name: weight * 0.1 for name, weight in weights.items()},
        "aux_gradients": {"b.router.weight": torch.ones(4, 4)},
        "z_gradients": {"b.router.weight": torch.ones(4, 4) * 0.01},
        "weights": weights,
        "router_biases": {"b.router.expert_bias": torch.tensor([0.001, -0.001])},
        "promised": ["gradients", "aux_gradients", "z_gradients", "aux_losses", "router_biases"],
        "weight_digests": {"at step 0": dict(digests), "at step 2": dict(digests)},
        "batches": [batch(step, micro, (2 * step + micro,), 10) for step in range(2) for micro in range(2)],
    }


def two_shards() -> list[Report]:
    """Two context-parallel ranks with half of each micro-batch's tokens; the second is silent about whole tensors."""
    ranks: list[Report] = []
    for cp_rank in range(2):
        report: Report = reference() | {"cp_rank": cp_rank}
        for entry in report["batches"]:
            entry["num_tokens"] = 5
            entry["rows"] += f", shard {cp_rank}"
        ranks.append(report)
    for name in ("gradients", "aux_gradients", "z_gradients", "weights"):
        del ranks[1][name]
    return ranks


def test_equal_observations_pass() -> None:
    comparison = compare(two_shards(), reference())
    assert comparison.failures(0.0) == []
    assert comparison.largest.value == 0.0


def scale(name: str, key: str, factor: float) -> Callable[[list[Report]], None]:
    def change(ranks: list[Report]) -> None:
        ranks[0][name][key] = ranks[0][name][key] * factor

    return change


def put(rank: int, value: Any, *path: Any) -> Callable[[list[Report]], None]:
    def change(ranks: list[Report]) -> None:
        target = ranks[rank]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


WRONG = {
    "a gradient too large": (scale("gradients", "a.weight", 1.0001), "gradient of a.weight"),
    "a router's gradient from aux": (scale("aux_gradients", "b.router.weight", 2.0), "aux-only gradient of b.router"),
    "a router's gradient from z": (scale("z_gradients", "b.router.weight", 0.5), "z-only gradient of b.router"),
    "a weight": (scale("weights", "b.bias", 1.0001), "weight b.bias"),
    "a weight that is NaN": (scale("weights", "b.bias", math.nan), "weight b.bias"),
    "a loss": (put(0, torch.tensor(4.01), "losses", 1), "loss of step 1"),
    "a norm": (put(0, torch.tensor(2.01), "grad_norms", 0), "clip norm of step 0"),
    "an auxiliary loss": (put(0, torch.tensor(1.06), "aux_losses", 1), "aux loss of step 1"),
    "a z-loss": (put(0, torch.tensor(4.01), "z_losses", 0), "z loss of step 0"),
    "no auxiliary losses": (put(0, torch.zeros(0), "aux_losses"), "number of aux_losses"),
    "a step too few": (put(0, torch.tensor([5.0]), "losses"), "number of losses"),
    "a token at another expert": (put(0, torch.tensor([[4, 4]]), "expert_counts"), "tokens per expert"),
    "another shape": (put(0, torch.zeros(2, 2), "gradients", "a.weight"), "gradient of a.weight"),
    "one gradient more": (put(0, torch.zeros(1), "gradients", "c"), "gradient of c (unexpected)"),
    "a replica": (put(1, "other", "weight_digests", "at step 2", "a.weight"), "a.weight at step 2 is not the same"),
    "a replica at the start": (put(1, "other", "weight_digests", "at step 0", "b.bias"), "b.bias at step 0"),
    "a bias": (put(1, torch.zeros(2), "router_biases", "b.router.expert_bias"), "expert_bias of rank 0 is not that"),
    "other documents": (put(1, "other", "batches", 3, "documents"), "documents of micro-batch 1 of step 1"),
    "a lost token": (put(1, 4, "batches", 2, "num_tokens"), "tokens of step 1: 19 instead of 20"),
    "another pack": (put(0, [9], "batches", 0, "pack_ids"), "packs of step 0"),
}


@pytest.mark.parametrize(("change", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_whatever_is_wrong_is_found(change: Callable[[list[Report]], None], complaint: str) -> None:
    ranks = copy.deepcopy(two_shards())
    change(ranks)
    failures = compare(ranks, reference()).failures(1e-5)
    assert any(complaint in line for line in failures), failures


def test_a_missing_gradient_is_found() -> None:
    ranks = two_shards()
    del ranks[0]["gradients"]["a.weight"]
    assert "gradient of a.weight (missing)" in compare(ranks, reference()).failures(1e-5)[0]


@pytest.mark.parametrize("name", ["aux_gradients", "router_biases"])
@pytest.mark.parametrize("is_zero", [False, True], ids=["empty", "zero"])
def test_what_was_promised_and_is_empty_on_both_sides_proves_nothing(name: str, is_zero: bool) -> None:
    def emptied(report: Report) -> Report:
        return report | {name: {key: tensor * 0 for key, tensor in report[name].items()} if is_zero else {}}

    ranks, expected = two_shards(), emptied(reference())
    ranks[0] = emptied(ranks[0])
    ranks[1]["router_biases"] = ranks[0]["router_biases"]
    assert compare(ranks, expected).disagreements == [
        f"{name} of one process are empty or zero: their comparison proves nothing"
    ]
    expected["promised"].remove(name)
    assert compare(ranks, expected).failures(0.0) == []


def test_promised_numbers_must_be_there() -> None:
    ranks, expected = two_shards(), reference()
    ranks[0]["aux_losses"] = expected["aux_losses"] = torch.zeros(0)
    assert compare(ranks, expected).disagreements[0].startswith("aux_losses of one process are empty")


def test_tensor_parallel_peers_must_see_the_same_rows() -> None:
    ranks = [reference(), reference()]
    ranks[1]["batches"][1]["rows"] = "others"
    assert compare(ranks, reference()).disagreements == [
        "rows of micro-batch 1 of step 0 are not the same on ranks 0 and 1"
    ]


def test_rounding_of_a_gradient_that_is_zero_does_not_count() -> None:
    expected = reference()
    expected["gradients"]["b.bias"] = torch.full((4, 4), 1e-10)
    ranks = two_shards()
    ranks[0]["gradients"]["b.bias"] = torch.full((4, 4), -1e-10)
    assert compare(ranks, expected).failures(1e-4) == []
    ranks[0]["gradients"]["b.bias"] = torch.full((4, 4), 1e-5)
    assert compare(ranks, expected).failures(1e-4)


def test_relative_difference() -> None:
    ones = torch.ones(3)
    assert relative_difference(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_difference(ones * 0, ones * 0) == 0.0
    assert relative_difference(ones, ones * 0) == math.inf
    assert relative_difference(ones, ones * 0, floor=10.0) == pytest.approx(3**0.5 / 10)
    assert relative_difference(ones, torch.ones(1, 3)) == math.inf
    assert relative_difference(ones * math.nan, ones) == math.inf
