"""Recompute and offload inside DDP and FSDP2 give the gradients that these give alone, bit for bit.

FSDP2 in two shapes: hooks around the shell in which the manager runs a block, as the engines of this project have it,
and hooks on the block itself and on a module inside it, as a user of the manager may have them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_glue.activation import ActivationManager, ActivationPlan
from tests.support.activation_blocks import ToyBlock, context_of
from tests.support.processes import run_distributed

OFFLOAD = ActivationPlan(recompute=True, offload=True, double_buffer=True, poison=True)


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) * 0.1)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class BlockWithExpert(ToyBlock):
    def __init__(self, dim, index):
        super().__init__(dim, index, "context")
        self.expert = Expert(dim)

    def forward(self, x, context):
        x = super().forward(x, context)
        return x + self.expert(self.norm(x))


class Shell(nn.Module):
    def __init__(self, block, run_block):
        super().__init__()
        self.block, self.run_block = block, run_block

    def forward(self, x, context):
        return self.run_block(self.block, x, context)


class Model(nn.Module):
    def __init__(self, manager, has_shells):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(12, 12)
        blocks = [BlockWithExpert(12, index) for index in range(3)]
        self.blocks = nn.ModuleList([Shell(block, manager.run_block) if has_shells else block for block in blocks])
        self.run_block = None if has_shells else manager.run_block

    def forward(self, x, context):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, context) if self.run_block is None else self.run_block(block, x, context)
        return x


def gradients(rank, world_size, plan, engine):
    with tempfile.TemporaryDirectory() as folder:
        plan = ActivationPlan(**{**vars(plan), "offload_dir": Path(folder)})
        manager = ActivationManager(plan, "cpu")
        model = Model(manager, has_shells=engine == "fsdp2-shell")
        if engine == "ddp":
            module = nn.parallel.DistributedDataParallel(model)
        else:
            module, mesh = model, init_device_mesh("cpu", (world_size,))
            for block in model.blocks:
                if engine == "fsdp2-nested":
                    fully_shard(block.expert, mesh=mesh)
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(2):
            manager.begin_step()
            for micro_batch in range(2):
                y = module(torch.randn(8, 12, generator=generator), context_of(micro_batch))
                manager.end_forward()
                y.square().mean().backward()
            assert manager.num_tracked_inputs == 0
        manager.close()
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def compare(rank, world_size):
    equal = {}
    for engine in ("ddp", "fsdp2-shell", "fsdp2-block", "fsdp2-nested"):
        expected = gradients(rank, world_size, ActivationPlan(), engine)
        for plan in (ActivationPlan(recompute=True), OFFLOAD):
            actual = gradients(rank, world_size, plan, engine)
            same = all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
            equal[f"{engine}, offload={plan.offload}"] = same
    return equal


@pytest.mark.timeout(150)
def test_gradients_are_those_of_the_engine_without_recompute():
    for equal in run_distributed(compare, 2, timeout_s=120):
        assert len(equal) == 8
        assert all(equal.values()), equal
