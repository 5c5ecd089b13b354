"""Small blocks that draw, decide, log or fail, and tiers that are slow on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.activation.disk_tier import DiskTier
from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.offload_file import OffloadFile
from megatron_glue.types import ForwardContext, PackedSequence


class ToyBlock(nn.Module):
    """x + W2 dropout(gelu(W1 norm(x))) with one of three kinds of dropout.

    Args:
        dim: D.
        index: Number of the layer.
        dropout: "none", "context" (a generator seeded by the context) or "global" (torch's generator).
    """

    def __init__(self, dim: int, index: int = 0, dropout: str = "none") -> None:
        super().__init__()
        self.backward_s = 0.0
        self.index = index
        self.dropout = dropout
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.calls: list[ForwardContext] | None = None  # a list to record in

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if self.calls is not None:
            self.calls.append(context)
        h_TF = F.gelu(self.up(self.norm(x_TD)))
        if self.dropout == "global":
            h_TF = F.dropout(h_TF, 0.5, training=True)
        elif self.dropout == "context":
            seed = ((context.seed * 31 + context.step) * 31 + context.micro_batch) * 31 + self.index
            generator = torch.Generator().manual_seed(seed)
            h_TF = h_TF * (torch.rand(h_TF.shape, generator=generator) > 0.5)
        if self.backward_s:
            h_TF = Sleep.apply(h_TF, self.backward_s)
        return x_TD + self.down(h_TF)


def toy_blocks(num_layers: int, dim: int = 16, dropout: str = "none") -> nn.ModuleList:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.ModuleList(ToyBlock(dim, index, dropout) for index in range(num_layers))


def context_of(micro_batch: int = 0, num_tokens: int = 8, **fields: Any) -> ForwardContext:
    """A context of one segment."""
    return ForwardContext(PackedSequence.from_lengths([num_tokens]), micro_batch=micro_batch, **fields)


def run_forward(
    manager: ActivationManager, blocks: nn.ModuleList, x_TD: Tensor, micro_batch: int = 0, *, knows_last: bool = False
) -> Tensor:
    """One forward pass of a micro-batch; the manager is told which block is the last, or not."""
    context = context_of(micro_batch, x_TD.shape[0])
    for position, block in enumerate(blocks):
        is_last = knows_last and position == len(blocks) - 1
        x_TD = manager.run_block(block, x_TD, context, position=position, is_last=is_last)
    manager.end_forward()
    return x_TD


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    """Gradients in the order of parameters, and none left behind."""
    grads = [param.grad for param in module.parameters()]
    module.zero_grad(set_to_none=True)
    return grads


class SlowTier(DiskTier):
    """A disk that blocks for a while before each write and read.

    Args:
        folder: Of the disk tier.
        write_s: Seconds before a write.
        read_s: Seconds before a read.
    """

    def __init__(self, folder: Any, write_s: float = 0.0, read_s: float = 0.0) -> None:
        super().__init__(folder)
        self._file.close()
        self._file = _SlowFile(folder, write_s, read_s)


class _SlowFile(OffloadFile):
    def __init__(self, folder: Any, write_s: float, read_s: float) -> None:
        super().__init__(folder)
        self._write_s, self._read_s = write_s, read_s

    def write(self, source: Any, offset: int) -> None:
        time.sleep(self._write_s)
        super().write(source, offset)

    def read(self, destination: Any, offset: int) -> None:
        time.sleep(self._read_s)
        super().read(destination, offset)


class Sleep(torch.autograd.Function):
    """The identity; its backward takes a while, as a matrix product would, without using a core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        time.sleep(ctx.seconds)
        return grad_outputs[0], None


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Assert that every thread that was started inside has ended."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
