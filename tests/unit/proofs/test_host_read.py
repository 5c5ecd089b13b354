"""A read is told with its line, the layer and the phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.activation.recompute import InputInMemory, run_recomputed
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.managed_block import ManagedBlock
from megatron_glue.proofs.host_read import HostRead, layer_of
from megatron_glue.proofs.sync_watch import SyncWatch
from megatron_glue.types import ForwardContext, PackedSequence


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grads[0].sum().item()
        return grads[0]


class Block(nn.Module):
    """Reads where its name says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.ffn = nn.Linear(4, 4)
        self.where = where

    def forward(self, x: Tensor, context: Any) -> Tensor:
        if self.where == "recompute" and context.is_recompute:
            x.tolist()
        y = self.ffn(x)
        if self.where == "forward":
            y.sum().item()
        elif self.where == "mask":
            y = y[y[:, 0] > -1e9]
        return ReadsInBackward.apply(y) if self.where == "backward" else y


class Model(nn.Module):
    def __init__(self, *places: str, recompute: bool = False) -> None:
        super().__init__()
        run = self._recompute if recompute else self._plain
        self.blocks = nn.ModuleDict({str(i): ManagedBlock(Block(place), run) for i, place in enumerate(places)})

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        for block in self.blocks.values():
            x = block(x, context)
        return x.sum()

    @staticmethod
    def _plain(block: nn.Module, x: Tensor, context: ForwardContext) -> Tensor:
        return block(x, context)

    @staticmethod
    def _recompute(block: nn.Module, x: Tensor, context: ForwardContext) -> Tensor:
        return run_recomputed(block, [x], replace(context, decisions=None), [InputInMemory(x)], preserve_rng=False)


def step(model: nn.Module, x: Tensor) -> None:
    update(model(x, ForwardContext(PackedSequence.from_lengths([3]))))


def update(loss: Tensor) -> None:
    loss.backward()


def reads_of(model: nn.Module) -> list[HostRead]:
    watch = SyncWatch(model, frozenset({step.__code__}))
    with watch:
        step(model, torch.randn(3, 4, requires_grad=True))
    return sorted(watch.reads.elements())


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "wrapped"])
def test_forward(wrap: bool) -> None:
    model: nn.Module = Model("", "forward")
    if wrap:
        bare = model
        model = nn.Module()
        model.module = bare
        model.forward = bare.forward
    (read,) = reads_of(model)
    assert (read.layer, read.phase, read.kind, read.function) == (1, "forward", "item", "Block.forward")
    assert read.module == "blocks.1"
    assert read.file == "tests/unit/proofs/test_host_read.py"
    assert read.source == "y.sum().item()"
    assert read.place == f"{read.file}:{read.line}"


def test_backward_of_a_custom_function_belongs_to_its_layer() -> None:
    (read,) = reads_of(Model("", "backward", ""))
    assert (read.layer, read.phase, read.function) == (1, "backward", "ReadsInBackward.backward")


def test_backward_of_an_operator_belongs_to_its_layer() -> None:
    forward, backward = sorted(reads_of(Model("", "", "mask")), key=lambda read: read.kind)
    assert (forward.layer, forward.phase, forward.kind) == (2, "forward", "boolean index")
    assert (backward.layer, backward.phase, backward.kind) == (2, "backward", "boolean index_put")
    assert backward.function == "update", "the line that called backward: torch's own operators have none"


def test_recompute_is_told_from_forward_and_backward() -> None:
    (read,) = reads_of(Model("", "recompute", "", recompute=True))
    assert (read.layer, read.phase, read.kind) == (1, "recompute", "tolist")
    (read,) = reads_of(Model("", "backward", "", recompute=True))
    assert (read.layer, read.phase) == (1, "backward")


def test_outside_of_layers_the_function_of_the_step_is_the_phase() -> None:
    watch = SyncWatch(nn.Module(), frozenset({read_in_step.__code__}))
    with watch:
        x = torch.zeros(2)
        watch.put_on_device(x)
        read_in_step(x)
        x.tolist()
    inside, outside = sorted(watch.reads, key=lambda read: read.phase)
    assert (inside.phase, inside.layer, inside.module) == ("clip", -1, "")
    assert (outside.phase, outside.layer) == ("outside of the step", -1)


def read_in_step(x: Tensor) -> None:
    clip(x)


def clip(x: Tensor) -> list[float]:
    return [value.item() for value in x[:1]]


def test_announced_reads_are_those_of_who_asked() -> None:
    reader = HostReader()
    watch = SyncWatch(nn.Module())
    x = torch.zeros(2)
    watch.put_on_device(x)
    with watch:
        clip(x)
        reader.read(x)
    unannounced, announced = sorted(watch.reads, key=lambda read: read.announced)
    assert (unannounced.announced, unannounced.function) == (False, "clip"), "a comprehension is no function"
    assert (announced.announced, announced.source) == (True, "reader.read(x)")
    assert reader.count == 1


def test_layer_of_a_name() -> None:
    assert layer_of("blocks.12.ffn.router") == 12
    assert [layer_of(name) for name in ("", "embedding", "blocks", "blocks.x", "final_norm.0")] == [-1] * 5


def test_as_dict_holds_plain_values() -> None:
    read = HostRead("a.py", 1, "f", "item", "forward")
    assert HostRead(**read.as_dict()) == read
