"""Compares what ranks observed under some layout with what one process observed. Pure functions, no process group.

A layout is right if nothing that a user could measure depends on it: losses, every gradient, the norm that gradients
are clipped by, the router's own gradients, token counts, weights after some steps. ``observation.py`` takes these
numbers on each rank; here they are compared, and what must be equal between ranks is checked.

Differences are relative norms, |a - b| / |b| over all elements of one tensor. The denominator is never smaller than
``NOISE_FLOOR`` of the largest tensor's norm: a gradient that is zero in exact arithmetic (a key's bias, which the
softmax cancels) consists of rounding only and has no relative accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NOISE_FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """How far one observed quantity is from its expected value.

    Attributes:
        what: The quantity.
        value: Relative difference; infinite where the values cannot be compared or had to be equal.
    """

    what: str
    value: float


@dataclass
class Comparison:
    """The outcome for one layout.

    Attributes:
        differences: All compared quantities.
        disagreements: What ranks that must agree did not agree about, a line each.
    """

    differences: list[Difference] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)

    @property
    def largest(self) -> Difference:
        """The quantity that differs most."""
        return max(self.differences, key=lambda difference: difference.value, default=Difference("nothing", math.inf))

    def failures(self, tolerance: float) -> list[str]:
        """Everything that is wrong, a line each, the largest difference first."""
        wrong = sorted((d for d in self.differences if not d.value <= tolerance), key=lambda d: -d.value)
        lines = [f"{d.what}: relative difference {d.value:.2e}, allowed {tolerance:.0e}" for d in wrong]
        return self.disagreements + lines


def compare(reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> Comparison:
    """Compare a layout with one process.

    Args:
        reports: What :func:`~megatron_glue.proofs.observation.observe` returned, by rank.
        reference: What it returned on one process.

    Returns:
        All differences and disagreements.
    """
    first = reports[0]
    differences = [
        *_scalars("loss", first, reference, "losses"),
        *_scalars("clip norm", first, reference, "grad_norms"),
        *_scalars("aux loss", first, reference, "aux_losses"),
        *_scalars("z loss", first, reference, "z_losses"),
    ]
    differences += tensor_differences("gradient of", first["gradients"], reference["gradients"])
    differences += tensor_differences("aux-only gradient of", first["aux_gradients"], reference["aux_gradients"])
    differences += tensor_differences("z-only gradient of", first["z_gradients"], reference["z_gradients"])
    differences += tensor_differences("weight", first["weights"], reference["weights"])
    biases = {name: bias for report in reports for name, bias in report["router_biases"].items()}
    differences += tensor_differences("bias", biases, reference["router_biases"])
    moved = _moved_share(first["expert_counts"], reference["expert_counts"])
    differences.append(Difference("tokens per expert", moved))
    disagreements = [*_empty_proofs(reference), *_replica_disagreements(reports)]
    disagreements += _bias_disagreements(reports, biases)
    disagreements += _batch_disagreements(reports)
    disagreements += _data_disagreements(reports, reference)
    return Comparison(differences, disagreements)


def relative_difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return |actual - expected| / max(|expected|, floor) in float64; infinite for other shapes and for NaN.

    Args:
        actual: Any shape.
        expected: Same shape.
        floor: Least denominator.

    Returns:
        The relative norm, 0 when both are zero.
    """
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.double() - expected.double()).norm().item()
    scale = max(expected.double().norm().item(), floor)
    value = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
    return value if math.isfinite(value) else math.inf


def tensor_differences(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[Difference]:
    """Compare tensors of one kind, each by itself; the noise floor comes from the largest expected one.

    Args:
        what: Their kind, which stands before each name.
        actual: By name.
        expected: By name.

    Yields:
        A difference for every name; infinite for one that only one side has.
    """
    floor = NOISE_FLOOR * max((tensor.double().norm().item() for tensor in expected.values()), default=0.0)
    for name in sorted(actual.keys() | expected.keys()):
        if name not in actual or name not in expected:
            yield Difference(f"{what} {name} ({'missing' if name in expected else 'unexpected'})", math.inf)
        else:
            yield Difference(f"{what} {name}", relative_difference(actual[name], expected[name], floor))


def _moved_share(actual: Tensor, expected: Tensor) -> float:
    """Share of the (token, choice) pairs that went to another expert."""
    if actual.shape != expected.shape:
        return math.inf
    return (actual - expected).abs().sum().item() / max(2 * expected.sum().item(), 1)


def _scalars(what: str, first: Mapping[str, Any], reference: Mapping[str, Any], name: str) -> Iterator[Difference]:
    actual, expected = first[name], reference[name]
    if len(actual) != len(expected):
        yield Difference(f"number of {name}", math.inf)
        return
    for step in range(len(expected)):
        yield Difference(f"{what} of step {step}", relative_difference(actual[step], expected[step]))


def _empty_proofs(reference: Mapping[str, Any]) -> Iterator[str]:
    """Two empty sides are equal, and so are two zeros: what the configuration promises must be there to be compared."""
    for name in reference["promised"]:
        values = reference[name]
        if not any(bool(tensor.any()) for tensor in (values.values() if isinstance(values, Mapping) else [values])):
            yield f"{name} of one process are empty or zero: their comparison proves nothing"


def _replica_disagreements(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every rank put whole tensors together from its own replicas: all must have got the same bits."""
    for moment, digests in reports[0]["weight_digests"].items():
        for name, digest in digests.items():
            others = [rank for rank, report in enumerate(reports) if report["weight_digests"][moment][name] != digest]
            if others:
                yield f"{name} {moment} is not the same on ranks 0 and {others[0]}"


def _bias_disagreements(reports: Sequence[Mapping[str, Any]], expected: Mapping[str, Tensor]) -> Iterator[str]:
    """Balancing biases are no parameters: nobody sums them, every rank of a stage moves its own in the same way."""
    for rank, report in enumerate(reports):
        for name, bias in report["router_biases"].items():
            if not torch.equal(bias, expected[name]):
                yield f"{name} of rank {rank} is not that of other ranks"


def _batch_disagreements(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Ranks of one data-parallel index share a micro-batch; those of one shard of it share its rows."""
    for axes, kind in ((("dp_rank",), "documents"), (("dp_rank", "cp_rank"), "rows")):
        seen: dict[tuple[int, ...], tuple[int, str]] = {}
        for rank, report in enumerate(reports):
            for batch in report["batches"]:
                key = (*(report[axis] for axis in axes), batch["step"], batch["micro_batch"])
                owner, digest = seen.setdefault(key, (rank, batch[kind]))
                if digest != batch[kind]:
                    yield (
                        f"{kind} of micro-batch {batch['micro_batch']} of step {batch['step']} are not the same on "
                        f"ranks {owner} and {rank}"
                    )


def _data_disagreements(reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> Iterator[str]:
    """All ranks together saw the packs of the reference, and each of their tokens once."""
    packs, tokens = _data_of(reports), _data_of([reference])
    for step, (expected_packs, expected_tokens) in tokens.items():
        actual_packs, actual_tokens = packs.get(step, (set(), 0))
        if actual_packs != expected_packs:
            yield f"packs of step {step}: {sorted(actual_packs)} instead of {sorted(expected_packs)}"
        if actual_tokens != expected_tokens:
            yield f"tokens of step {step}: {actual_tokens} instead of {expected_tokens}"


def _data_of(reports: Iterable[Mapping[str, Any]]) -> dict[int, tuple[set[int], int]]:
    """Step -> packs and number of tokens over all shards of all micro-batches, each counted once."""
    shards: dict[tuple[int, int, int, int], Mapping[str, Any]] = {}
    for report in reports:
        for batch in report["batches"]:
            shards[batch["step"], report["dp_rank"], report["cp_rank"], batch["micro_batch"]] = batch
    data: dict[int, tuple[set[int], int]] = {}
    for (step, *_), batch in shards.items():
        packs, num_tokens = data.get(step, (set(), 0))
        data[step] = (packs | set(batch["pack_ids"]), num_tokens + batch["num_tokens"])
    return data
