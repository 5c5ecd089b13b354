"""Device values are followed through sharded parameters and collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from megatron_glue.proofs.sync_watch import SyncWatch
from tests.support.processes import run_distributed


def read_sharded(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()]))
    model = nn.Module()
    model.weight = weight
    watch = SyncWatch(model)
    received = torch.zeros(4, 4)
    with watch:
        (weight * 2).sum().to_local().item()
        dist.all_to_all_single(received, weight.to_local().detach())
        received.sum().item()
    return sorted(read.kind for read in watch.reads.elements())


def test_sharded_parameters_and_collectives() -> None:
    assert run_distributed(read_sharded, 2) == [["item", "item"]] * 2
