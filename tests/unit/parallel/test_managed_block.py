"""The shell around blocks, and names without wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_glue.parallel.managed_block import ManagedBlock, canonical_name


def test_shell_runs_its_block_through_the_manager() -> None:
    calls: list[tuple[nn.Module, object]] = []

    def run_block(block: nn.Module, x_TD: torch.Tensor, context: object) -> torch.Tensor:
        calls.append((block, context))
        return block(x_TD)

    block = nn.Linear(2, 2)
    context = object()
    x_TD = torch.ones(3, 2)
    assert torch.equal(ManagedBlock(block, run_block)(x_TD, context), block(x_TD))
    assert calls == [(block, context)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.weight", "embedding.weight"),
        ("blocks.0.managed.attention.qkv", "blocks.0.attention.qkv"),
        ("module.blocks.0.managed._orig_mod.mlp.up", "blocks.0.mlp.up"),
        ("blocks.0.managed.module.weight", "blocks.0.module.weight"),
        ("parts.1.blocks.3.managed.ffn.router.expert_bias", "blocks.3.ffn.router.expert_bias"),
        ("module.parts.0.embedding.weight", "embedding.weight"),
        ("blocks.0.parts.1.weight", "blocks.0.parts.1.weight"),
        ("parts.weight", "parts.weight"),
    ],
)
def test_names_lose_what_wrappers_added(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_names_in_a_model_of_shells() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([ManagedBlock(nn.Linear(2, 2), lambda b, x, c: b(x))])})
    assert [canonical_name(name) for name, _ in model.named_parameters()] == ["blocks.0.weight", "blocks.0.bias"]
