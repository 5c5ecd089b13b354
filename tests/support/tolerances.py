"""Tolerances of comparisons, per dtype, in one place. Loosening one is a decision about the whole project.

Relative norm is |a - b| / |b| over all elements; it does not blow up where single elements are near zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE_NORM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def relative_norm(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| in float64 (0 when both are zero)."""
    difference = (actual.detach().double() - expected.detach().double()).norm().item()
    scale = expected.detach().double().norm().item()
    return difference / scale if scale > 0 else difference


def assert_close(actual: Tensor, expected: Tensor, *, what: str = "tensor", tolerance: float | None = None) -> None:
    """Assert equal shapes, finite values and a relative norm within the tolerance of ``expected``'s dtype."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    limit = RELATIVE_NORM[expected.dtype] if tolerance is None else tolerance
    difference = relative_norm(actual, expected)
    assert difference <= limit, f"{what}: relative norm {difference:.3e} exceeds {limit:.1e}"
