"""Every way to run blocks, with the oracle that all of them must equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import context_of, gradients_of
from tests.support.simulated_device import SimulatedDevice

OFFLOAD = {"recompute": True, "offload": True, "poison": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": {"recompute": True},
    "disk-single": OFFLOAD,
    "disk-double": {**OFFLOAD, "double_buffer": True},
    "disk-double-room-for-one": {**OFFLOAD, "double_buffer": True, "buffer_size_bytes": 4096},
    "disk-double-no-room": {**OFFLOAD, "double_buffer": True, "buffer_size_bytes": 1},
    "disk-double-conservative": {**OFFLOAD, "double_buffer": True, "conservative_sync": True},
    "pinned-single": OFFLOAD,
    "pinned-double": {**OFFLOAD, "double_buffer": True},
    "disk-double-one-inflight": {**OFFLOAD, "double_buffer": True, "max_inflight": 1},
    "pinned-double-one-inflight": {**OFFLOAD, "double_buffer": True, "max_inflight": 1},
    "pinned-double-conservative": {**OFFLOAD, "double_buffer": True, "conservative_sync": True},
}
OFFLOADING = [name for name in VARIANTS if "-" in name]


@contextlib.contextmanager
def managed(variant: str, folder: Path) -> Iterator[ActivationManager]:
    """A manager of one variant; pinned ones run on a simulated device that must see no violation."""
    plan = ActivationPlan(**VARIANTS[variant], offload_dir=folder)
    device = SimulatedDevice(eager_compute=True)
    tier = PinnedTier(device, poison=True, max_inflight=plan.max_inflight) if variant.startswith("pinned") else None
    manager = ActivationManager(plan, "cpu", tier=tier)
    try:
        yield manager
    finally:
        manager.close()
        assert device.violations == []


def inputs(num: int, num_tokens: int = 8, dim: int = 16) -> list[Tensor]:
    """The same inputs every time."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(num_tokens, dim, generator=generator) for _ in range(num)]


def plain_gradients(blocks: nn.ModuleList, micro_batches: list[Tensor]) -> list[Tensor | None]:
    """The oracle: no manager, one micro-batch after another."""
    for index, x in enumerate(micro_batches):
        for block in blocks:
            x = block(x, context_of(index, x.shape[0]))
        x.square().sum().backward()
    return gradients_of(blocks)


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Equal bit for bit, and missing where missing."""
    for got, want in zip(actual, expected, strict=True):
        assert (got is None and want is None) or (got is not None and want is not None and torch.equal(got, want))
