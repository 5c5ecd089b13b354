"""The second run repeats the first, once, and no more of it than backward needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_glue.activation.recompute import InputInMemory, run_recomputed
from tests.support.activation_blocks import ToyBlock, context_of, gradients_of, toy_blocks


class LoggedInput(InputInMemory):
    """Tells when it was fetched and released."""

    def __init__(self, x):
        super().__init__(x)
        self.log = []

    def fetch(self):
        self.log.append("fetch")
        return super().fetch()

    def release(self):
        self.log.append("release")
        super().release()


def recomputed(block, x, *, preserve_rng=True, context=None):
    kept = LoggedInput(x)
    return run_recomputed(block, [x], context or context_of(), [kept], preserve_rng), kept


class FunctionBlock(nn.Module):
    """A block from a function of (weight, x, context)."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x, context):
        return self.function(self.weight, x, context)


def test_f50_second_run_is_marked_keeps_the_decisions_and_logs_nothing():
    block, log = ToyBlock(4), []
    block.calls = []
    context = context_of(router_log=log)
    y, kept = recomputed(block, torch.randn(8, 4, requires_grad=True), context=context)
    assert kept.log == []
    y.sum().backward()
    first, second = block.calls
    assert (first.is_recompute, second.is_recompute) == (False, True)
    assert first.decisions is second.decisions is not None
    assert first.router_log is log
    assert second.router_log is None
    assert context.decisions is None
    assert kept.log == ["fetch", "release"]


def test_last_product_is_not_repeated():
    block, calls = ToyBlock(4), []
    for name in ("norm", "up", "down"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    y, _ = recomputed(block, torch.randn(8, 4, requires_grad=True))
    assert calls == ["norm", "up", "down"]
    calls.clear()
    y.sum().backward()
    assert calls == ["norm", "up"], "the second run ends inside the last linear layer"


def test_input_is_released_after_its_last_reader():
    """The node that multiplies by x does not lead to x's gradient, and must still run before the release."""
    kept_log = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            ctx.save_for_backward(x)
            return weight * 1.0

        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors  # noqa: B018 (unpacks)
            kept_log.append("read")
            return grad, None

    block = FunctionBlock(lambda weight, x, _: torch.tanh(x) @ Watch.apply(weight, x.detach()))
    x = torch.randn(8, 4, requires_grad=True)
    kept = LoggedInput(x)
    kept.log = kept_log
    run_recomputed(block, [x], context_of(), [kept], True).sum().backward()
    assert kept_log == ["fetch", "read", "release"]


def test_graph_keeps_neither_the_input_nor_intermediate_results():
    class Forgetful(LoggedInput):
        def __init__(self, x):
            self.log = []

    block, storages = ToyBlock(4), []
    block.up.register_forward_hook(lambda module, args, y: storages.append(StorageWeakRef(y.untyped_storage())))
    x = torch.randn(8, 4).requires_grad_() * 1.0
    storages.append(StorageWeakRef(x.untyped_storage()))
    y = run_recomputed(block, [x], context_of(), [Forgetful(x)], True)
    del x
    assert y.requires_grad
    assert [storage.expired() for storage in storages] == [True, True]


@pytest.mark.parametrize("x_needs_grad", [True, False])
@pytest.mark.parametrize("frozen", [(), ("up",), ("norm", "up", "down")])
def test_gradients_arrive_where_they_are_required_and_only_there(x_needs_grad, frozen):
    results = []
    for recompute in (False, True):
        block = toy_blocks(1, 4)[0]
        for name in frozen:
            block.get_submodule(name).requires_grad_(False)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(x_needs_grad)
        if not x_needs_grad and len(frozen) == 3:
            return
        y = recomputed(block, x)[0] if recompute else block(x, context_of())
        y.square().sum().backward()
        results.append([x.grad, *gradients_of(block)])
    for plain, again in zip(*results, strict=True):
        assert (plain is None and again is None) or torch.equal(plain, again)


def test_unused_parameters_get_no_gradient():
    block = ToyBlock(4)
    block.unused = nn.Parameter(torch.ones(3))
    recomputed(block, torch.randn(8, 4))[0].sum().backward()
    assert block.unused.grad is None
    assert block.up.weight.grad is not None


def test_f48_global_generator_is_repeated_and_left_as_forward_left_it():
    results = {}
    for kind in ("plain", "recompute", "careless"):
        block = toy_blocks(1, 4, "global")[0]
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(7)
        if kind == "plain":
            y = block(x, context_of())
        else:
            y, _ = recomputed(block, x, preserve_rng=kind == "recompute")
        torch.rand(3)  # something else draws between forward and backward
        y.square().sum().backward()
        results[kind] = [*gradients_of(block), torch.rand(3)]
    for index, expected in enumerate(results["plain"]):
        assert torch.equal(results["recompute"][index], expected)
    assert not torch.equal(results["careless"][0], results["plain"][0]), "the flag is what repeats the draws"


def test_autocast_of_forward_holds_in_the_second_run():
    results = []
    for recompute in (False, True):
        block = toy_blocks(1, 4)[0]
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = recomputed(block, x)[0] if recompute else block(x, context_of())
        y.float().square().sum().backward()
        results.append(gradients_of(block))
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


def test_output_without_gradient_releases_at_once():
    block = FunctionBlock(lambda weight, x, _: x.detach() + 1)
    y, kept = recomputed(block, torch.randn(2, 4, requires_grad=True))
    assert not y.requires_grad
    assert kept.log == ["release"]


def test_block_that_saves_nothing_releases_in_backward():
    block = FunctionBlock(lambda weight, x, _: x + 1)
    x = torch.randn(2, 4, requires_grad=True)
    y, kept = recomputed(block, x)
    y.sum().backward()
    assert kept.log == ["release"]
    assert torch.equal(x.grad, torch.ones(2, 4))


def test_block_that_runs_other_operators_the_second_time_is_an_error():
    block = FunctionBlock(lambda w, x, context: torch.tanh(x @ w) if context.is_recompute else (x @ w).sin().cos())
    y, _ = recomputed(block, torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="saved 3 tensors for backward, 4 in forward"):
        y.sum().backward()


def test_block_that_decides_otherwise_the_second_time_is_an_error():
    block = FunctionBlock(lambda w, x, context: F.gelu((x[:1] if context.is_recompute else x) @ w))
    y, _ = recomputed(block, torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"was torch.float32 \(2, 4\) in forward and is torch.float32 \(1, 4\)"):
        y.sum().backward()


def test_second_backward_is_an_error_that_says_why():
    y, _ = recomputed(ToyBlock(4), torch.randn(2, 4, requires_grad=True))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.sum().backward()


def test_input_modified_in_place_is_an_error():
    x = torch.randn(2, 4)
    y, _ = recomputed(ToyBlock(4), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_error_of_the_block_in_the_second_run_is_its_own():
    def function(weight, x, context):
        if context.is_recompute:
            raise FloatingPointError("from the block")
        return x @ weight

    y, _ = recomputed(FunctionBlock(function), torch.randn(2, 4))
    with pytest.raises(FloatingPointError, match="from the block"):
        y.sum().backward()


def test_cuda_generator_is_restored_with_the_cpu_one(monkeypatch):
    """The device's generator is saved before forward, set for the second run, and put back after it."""
    from megatron_glue.activation import recompute

    state = SimpleNamespace(value=torch.tensor([1]))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state.value)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: setattr(state, "value", value))
    device = torch.device("cuda", 0)
    saved = recompute._read_rng_state(device)
    state.value = torch.tensor([2])
    with recompute._restored_rng(device, saved):
        assert state.value.item() == 1
        state.value = torch.tensor([3])
    assert state.value.item() == 2
