"""The managers of several parts, as one."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.parts import PartManagers
from megatron_glue.types import ForwardContext, PackedSequence

CONTEXT = ForwardContext(PackedSequence.from_lengths([4]))


class Block(torch.nn.Linear):
    """Keeps its result for backward."""

    def forward(self, x_TD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return super().forward(x_TD).square()


def test_a_step_of_all_parts_begins_ends_and_counts_together(tmp_path: Path) -> None:
    plan = ActivationPlan(recompute=True, offload=True, offload_dir=tmp_path)
    parts = PartManagers([ActivationManager(plan, "cpu") for _ in range(2)])
    block = Block(8, 8)
    parts.begin_step()
    x_TD = torch.randn(4, 8, requires_grad=True)
    for manager in parts.managers:
        x_TD = manager.run_block(block, x_TD, CONTEXT)
    assert [manager.num_tracked_inputs for manager in parts.managers] == [1, 1]
    x_TD.sum().backward()
    stats = parts.stats()
    assert stats.num_offloads == stats.num_reloads == 2
    assert stats.offloaded_bytes == 2 * 4 * 8 * 4
    (step,) = parts.step_times()
    assert step.copy_ms == stats.copy_ms == sum(manager.stats().copy_ms for manager in parts.managers)
    parts.managers[1].run_block(block, x_TD.detach().requires_grad_(), CONTEXT)
    parts.reset()
    assert [manager.num_tracked_inputs for manager in parts.managers] == [0, 0]
    assert parts.describe().endswith(", for each of 2 parts of the model")
    assert "parts of" not in PartManagers(parts.managers[:1]).describe()
    parts.close()
