"""Figures that the report computes itself."""

from __future__ import annotations

import pytest

from megatron_glue.proofs.ablation_report import cost_per_million_tokens


def test_cost_counts_every_rank() -> None:
    row = {"tokens_per_second": 1e6, "ranks": 2}
    assert cost_per_million_tokens(row, gpu_hour_price=3.6) == pytest.approx(0.002)
