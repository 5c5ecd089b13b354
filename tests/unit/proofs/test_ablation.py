"""Which variants start each round from the baseline's weights: those whose sums have another order than its."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_glue.proofs import ablation
from megatron_glue.proofs.ablation import VARIANTS, Course, Measurement, measure


def measurements_on(device: str) -> list[Measurement]:
    found: list[Measurement] = []
    for variant in VARIANTS:
        session: Any = SimpleNamespace(
            name=variant.name,
            device=torch.device(device),
            metrics=SimpleNamespace(flush=lambda *_: None),
            host_reader=None,
            mesh=SimpleNamespace(world_group=None),
        )
        found.append(Measurement(variant, session))
    return found


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", ["one-pass grouping", "all three"]),
        # Sums of a GPU's kernels have no fixed order, so two runs of one variant drift apart as well.
        ("cuda", ["packed cache", "double buffer", "one-pass grouping", "all three"]),
    ],
)
def test_who_takes_the_baselines_weights_over(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[str]
) -> None:
    taken: list[tuple[str, str]] = []
    monkeypatch.setattr(ablation, "take_over", lambda own, base: taken.append((own.name, base.name)))
    monkeypatch.setattr(ablation, "_step", lambda *_, **__: None)
    measure(measurements_on(device), Course(1, 1), lambda _: None)
    assert taken == [(name, "none") for name in expected] * 2
