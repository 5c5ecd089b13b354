"""Device values are followed through everything a step does, and nothing that is none is taken for one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.proofs.sync_watch import SyncWatch
from megatron_glue.training.optimizer import build_optimizer


def counted(watch: SyncWatch) -> dict[str, int]:
    return {f"{read.phase}: {read.kind}": count for read, count in watch.reads.items()}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x.sum().item()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.tolist()
        return 2 * grads[0]


def test_parameters_and_what_is_computed_from_them() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(4))
    model.plain = torch.ones(4)  # pyright: ignore[reportAttributeAccessIssue]
    watch = SyncWatch(model)
    with watch:
        model(torch.zeros(2, 4)).sum().item()
        model.scale.sum().item()
        model.plain.sum().item()
        torch.zeros(2, 4).sum().item()
    assert sum(watch.reads.values()) == 3


def test_backward_and_custom_functions() -> None:
    model, watch = nn.Linear(4, 4), SyncWatch(nn.Module())
    with watch:
        watch.put_on_device([*model.parameters()])
        loss = Doubled.apply(model(torch.zeros(2, 4))).sum()
        loss.backward()
        model.weight.grad.norm().item()
    kinds = sorted(read.kind for read in watch.reads.elements())
    assert kinds == ["item", "item", "tolist"]
    assert counted(watch)["backward: tolist"] == 1


def test_the_recompute_of_torch_too() -> None:
    model, watch = nn.Linear(4, 4), SyncWatch(nn.Module())
    watch.put_on_device([*model.parameters()])
    with watch:
        checkpoint(lambda x: Doubled.apply(model(x)), torch.zeros(2, 4), use_reentrant=False).sum().backward()
    assert sorted(read.kind for read in watch.reads.elements()) == ["item", "item", "tolist"], "forward runs twice"


def test_writes_in_place_carry_on() -> None:
    x, watch = torch.ones(3), SyncWatch(nn.Module())
    unknown, listed = torch.zeros(3), [torch.zeros(3), torch.zeros(3)]
    watch.put_on_device(x)
    with watch:
        unknown.add_(x)
        torch._foreach_add_(listed, [x, x])
        torch.mul(x, 2, out=(out := torch.empty_like(x)))
        for tensor in (unknown, *listed, out):
            tensor.sum().item()
    assert sum(watch.reads.values()) == 4


def test_a_late_read_through_a_started_copy_is_none() -> None:
    flag, x, watch = torch.zeros(()), torch.ones(()), SyncWatch(nn.Module())
    watch.put_on_device(x)
    with watch:
        flag.copy_(x, non_blocking=True)
        assert flag.item() == 1.0
    assert not watch.reads


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_an_update_reads_nothing_but_the_announced_flag(implementation: str) -> None:
    model, watch = nn.Linear(4, 4), SyncWatch(nn.Module())
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(), implementation, torch.device("cpu"))
    norm = torch.ones(())
    watch.put_on_device([*model.parameters(), norm])
    with watch:
        model(torch.zeros(2, 4)).sum().backward()
        optimizer.step(0.1, norm)
        optimizer.step(0.1, norm)
    kinds = [(read.kind, read.announced) for read in watch.reads.elements()]
    assert kinds == ([] if implementation == "fused" else [("tolist", True)] * 2), "step counters stand on the host"


def test_other_threads_are_not_watched() -> None:
    x, watch = torch.ones(3), SyncWatch(nn.Module())
    watch.put_on_device(x)

    def read() -> None:
        x.tolist()
        x.sum().item()
        torch.zeros(1, device=x.device)

    with watch:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert not watch.reads


def test_hooks_and_modes_are_gone_behind_it() -> None:
    model = nn.Linear(4, 4)
    watch = SyncWatch(model)
    with watch:
        pass
    model(torch.zeros(1, 4)).sum().item()
    assert not watch.reads
