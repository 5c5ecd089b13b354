"""All variants give the same gradients bit for bit, whatever the order of micro-batches, and nothing stays behind."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_glue.activation import ActivationManager, ActivationPlan, ActivationStats
from megatron_glue.activation import manager as manager_module
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import (
    SlowTier,
    ToyBlock,
    context_of,
    gradients_of,
    no_new_threads,
    run_forward,
    toy_blocks,
)
from tests.support.resident_memory import resident_bytes
from tests.support.simulated_device import SimulatedDevice

OFFLOAD = {"recompute": True, "offload": True, "poison": True}
VARIANTS = {
    "none": {},
    "recompute": {"recompute": True},
    "disk-single": OFFLOAD,
    "disk-double": {**OFFLOAD, "double_buffer": True},
    "disk-double-room-for-one": {**OFFLOAD, "double_buffer": True, "buffer_size_bytes": 4096},
    "disk-double-no-room": {**OFFLOAD, "double_buffer": True, "buffer_size_bytes": 1},
    "pinned-single": OFFLOAD,
    "pinned-double": {**OFFLOAD, "double_buffer": True},
}
OFFLOADING = [name for name in VARIANTS if "-" in name]


@contextlib.contextmanager
def managed(variant, folder):
    plan = ActivationPlan(**VARIANTS[variant], offload_dir=folder)
    device = SimulatedDevice(eager_compute=True)
    tier = PinnedTier(device, poison=True) if variant.startswith("pinned") else None
    manager = ActivationManager(plan, "cpu", tier=tier)
    try:
        yield manager
    finally:
        manager.close()
        assert device.violations == []


def inputs(num, num_tokens=8, dim=16):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(num_tokens, dim, generator=generator) for _ in range(num)]


def plain_gradients(blocks, micro_batches):
    """The oracle: no manager, one micro-batch after another."""
    for index, x in enumerate(micro_batches):
        for block in blocks:
            x = block(x, context_of(index, x.shape[0]))
        x.square().sum().backward()
    return gradients_of(blocks)


def assert_same(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


@pytest.mark.parametrize("dropout", ["none", "context", "global"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_equal_bit_for_bit(variant, dropout, tmp_path):
    """Odd number of layers, gradient accumulation 3, two steps."""
    blocks, micro_batches = toy_blocks(5, dropout=dropout), inputs(3)
    torch.manual_seed(11)
    expected = [plain_gradients(blocks, micro_batches) for _ in range(2)]
    torch.manual_seed(11)
    with managed(variant, tmp_path) as manager:
        for step in range(2):
            manager.begin_step()
            for index, x in enumerate(micro_batches):
                run_forward(manager, blocks, x, index).square().sum().backward()
            assert manager.num_tracked_inputs == 0
            assert_same(gradients_of(blocks), expected[step])


@pytest.mark.parametrize("variant", OFFLOADING)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_f41_several_micro_batches_in_flight(variant, num_layers, tmp_path):
    """Forward 0, forward 1, backward 0, forward 2, backward 1, backward 2, as a pipeline stage does."""
    blocks, micro_batches = toy_blocks(num_layers), inputs(3)
    expected = plain_gradients(blocks, micro_batches)
    with managed(variant, tmp_path) as manager:
        manager.begin_step()
        losses = {index: run_forward(manager, blocks, micro_batches[index], index).square().sum() for index in (0, 1)}
        losses[0].backward()
        losses[2] = run_forward(manager, blocks, micro_batches[2], 2).square().sum()
        assert manager.num_tracked_inputs == 2 * num_layers
        losses[1].backward()
        losses[2].backward()
        assert manager.num_tracked_inputs == 0
        assert_same(gradients_of(blocks), expected)


def test_f41_two_models_do_not_share_state(tmp_path):
    blocks, micro_batches = [toy_blocks(3), toy_blocks(3)], inputs(2)
    expected = [plain_gradients(blocks[part], micro_batches[part : part + 1]) for part in range(2)]
    with managed("disk-double", tmp_path) as first, managed("disk-double", tmp_path) as second:
        losses = [
            run_forward(manager, blocks[part], micro_batches[part]).square().sum()
            for part, manager in enumerate((first, second))
        ]
        first.reset_stats()
        (losses[0] + losses[1]).backward()
        for part in range(2):
            assert_same(gradients_of(blocks[part]), expected[part])
        assert first.stats().num_reloads == second.stats().num_reloads == 3


@pytest.mark.parametrize("variant", ["disk-double", "pinned-double"])
def test_f41_skipped_block_and_block_without_gradient(variant, tmp_path):
    blocks, (x,) = toy_blocks(5), inputs(1)

    def forward(run):
        h = run(blocks[0], x)
        run(blocks[1], h)  # its output is not used: backward never asks for its input
        for index in (2, 4):
            h = run(blocks[index], h)
        return h.square().sum()

    forward(lambda block, h: block(h, context_of())).backward()
    expected = gradients_of(blocks)
    with managed(variant, tmp_path) as manager:
        forward(lambda block, h: manager.run_block(block, h, context_of())).backward()
        assert_same(gradients_of(blocks), expected)
        assert manager.num_tracked_inputs == 1
        manager.reset()
        assert manager.num_tracked_inputs == 0


@pytest.mark.parametrize("variant", ["recompute", "disk-double"])
def test_f41_block_inside_a_block_belongs_to_the_outer_one(variant, tmp_path):
    class Outer(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.inner, self.run = toy_blocks(2), run

        def forward(self, x, context):
            for block in self.inner:
                x = self.run(block, x, context)
            return x

    (x,) = inputs(1)
    plain = Outer(lambda block, x, context: block(x, context))
    plain(x, context_of()).square().sum().backward()
    with managed(variant, tmp_path) as manager:
        outer = Outer(manager.run_block)
        y = manager.run_block(outer, x, context_of())
        assert manager.num_tracked_inputs == (variant == "disk-double")
        y.square().sum().backward()
        assert_same(gradients_of(outer), gradients_of(plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_f45_shared_weights_over_two_micro_batches(variant, tmp_path):
    """One weight is used by two blocks and by the head outside them."""

    def build():
        blocks = toy_blocks(3)
        blocks[2].up.weight = blocks[0].up.weight
        return blocks

    def loss_of(blocks, y):
        return (y @ blocks[0].up.weight.t()).square().sum()

    plain, micro_batches = build(), inputs(2)
    for x in micro_batches:
        for block in plain:
            x = block(x, context_of())
        loss_of(plain, x).backward()
    with managed(variant, tmp_path) as manager:
        blocks = build()
        for index, x in enumerate(micro_batches):
            loss_of(blocks, run_forward(manager, blocks, x, index)).backward()
        assert_same(gradients_of(blocks), gradients_of(plain))


@pytest.mark.parametrize("variant", OFFLOADING)
def test_blocks_of_different_shapes_and_dtypes(variant, tmp_path):
    """Inputs grow, shrink and change dtype along the way; so do micro-batches."""

    class Widen(ToyBlock):
        def forward(self, x, context):
            return super().forward(torch.cat([x, x]).double(), context).float()

    class Narrow(ToyBlock):
        def forward(self, x, context):
            return super().forward(x[: x.shape[0] // 4].contiguous(), context).to(torch.bfloat16)

    class Back(ToyBlock):
        def forward(self, x, context):
            return super().forward(x.float(), context)

    torch.manual_seed(0)
    blocks = nn.ModuleList([Widen(16).double(), Narrow(16), Back(16), ToyBlock(16)])
    micro_batches = [*inputs(1, 64), *inputs(1, 400)]
    expected = plain_gradients(blocks, micro_batches)
    with managed(variant, tmp_path) as manager:
        for index, x in enumerate(micro_batches):
            run_forward(manager, blocks, x, index).square().sum().backward()
        assert_same(gradients_of(blocks), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_first_keeps_nothing(variant, mode, tmp_path):
    blocks, micro_batches = toy_blocks(3), inputs(1)
    expected = plain_gradients(blocks, micro_batches)
    with managed(variant, tmp_path) as manager:
        with mode():
            run_forward(manager, blocks, micro_batches[0])
        assert manager.num_tracked_inputs == 0
        assert manager.stats() == ActivationStats()
        manager.begin_step()
        run_forward(manager, blocks, micro_batches[0]).square().sum().backward()
        assert_same(gradients_of(blocks), expected)


@pytest.mark.parametrize("variant", ["recompute", "disk-double"])
def test_block_without_any_gradient_is_a_plain_call(variant, tmp_path):
    blocks, (x,) = toy_blocks(2).requires_grad_(False), inputs(1)
    with managed(variant, tmp_path) as manager:
        assert not run_forward(manager, blocks, x).requires_grad
        assert manager.num_tracked_inputs == 0


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError("mid-backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("variant", OFFLOADING)
def test_f40_exception_leaves_nothing_behind(variant, where, tmp_path):
    blocks, micro_batches = toy_blocks(5), inputs(1)
    expected = plain_gradients(blocks, micro_batches)

    def explode(module, args, y):
        if where == "forward":
            raise FloatingPointError("mid-forward")
        return Explode.apply(y)

    with managed(variant, tmp_path) as manager:
        manager.begin_step()
        hook = blocks[2].norm.register_forward_hook(explode)
        with pytest.raises(FloatingPointError):
            run_forward(manager, blocks, micro_batches[0]).square().sum().backward()
        hook.remove()
        gradients_of(blocks)
        assert manager.num_tracked_inputs > 0
        manager.reset()
        assert manager.num_tracked_inputs == 0
        manager.begin_step()
        run_forward(manager, blocks, micro_batches[0]).square().sum().backward()
        assert_same(gradients_of(blocks), expected)


@pytest.mark.parametrize("variant", ["disk-double", "pinned-double"])
def test_f40_fifty_steps_with_a_branch_that_backward_never_takes(variant, tmp_path):
    blocks, (x,) = toy_blocks(3, dim=64), inputs(1, 1024, 64)
    held, resident = set(), []
    with managed(variant, tmp_path) as manager:
        for step in range(50):
            manager.begin_step()
            assert manager.num_tracked_inputs == 0
            h = manager.run_block(blocks[0], x, context_of())
            manager.run_block(blocks[1], h, context_of())
            manager.run_block(blocks[2], h, context_of()).sum().backward()
            if step >= 10:
                held.add((manager.stats().held_bytes, manager.stats().buffer_bytes))
                resident.append(resident_bytes())
        assert manager.num_tracked_inputs == 1
    assert len(held) == 1, "neither storage nor buffers grow"
    assert resident[-1] - resident[0] < 20 * x.nbytes, "40 forgotten inputs would show"


def test_backward_after_its_step_ended_is_an_error(tmp_path):
    with managed("disk-double", tmp_path) as manager:
        y = run_forward(manager, toy_blocks(2), inputs(1)[0])
        manager.begin_step()
        with pytest.raises(RuntimeError, match="before the next begin_step"):
            y.sum().backward()


@pytest.mark.parametrize("variant", ["recompute", "disk-single", "disk-double"])
def test_offloaded_inputs_leave_memory(variant, tmp_path):
    blocks, (x,) = toy_blocks(4), inputs(1)
    storages = []
    with managed(variant, tmp_path) as manager:
        for block in blocks:
            x = x.requires_grad_() * 1.0
            storages.append(StorageWeakRef(x.untyped_storage()))
            x = manager.run_block(block, x, context_of())
        manager._offloader and manager._offloader._tier.settle()
        assert [storage.expired() for storage in storages] == [variant != "recompute"] * 4
        x.sum().backward()


def test_two_buffers_hide_a_slow_tier_behind_backward_and_one_does_not(tmp_path):
    blocks, (x,) = toy_blocks(6), inputs(1)
    for block in blocks:
        block.backward_s = 0.03
    figures = {}
    for double_buffer in (False, True):
        plan = ActivationPlan(recompute=True, offload=True, double_buffer=double_buffer, record_timeline=True)
        manager = ActivationManager(plan, "cpu", tier=SlowTier(tmp_path, read_s=0.02))
        loss = run_forward(manager, blocks, x).sum()
        start = time.perf_counter()
        loss.backward()
        figures[double_buffer] = (time.perf_counter() - start, manager.stats())
        bars = manager.timeline()
        copies = [bar for bar in bars if bar.lane == "reload"]
        computing = [bar for bar in bars if bar.name == "block"]
        hidden_ms = sum(
            max(0.0, min(copy.end_ms, block.end_ms) - max(copy.start_ms, block.start_ms))
            for copy in copies
            for block in computing
        )
        assert len(copies) == len(computing) == 6
        assert hidden_ms > 4 * 20 if double_buffer else hidden_ms < 1
        manager.close()
    (serial_s, serial), (overlapped_s, overlapped) = figures[False], figures[True]
    assert serial.num_reloads == overlapped.num_reloads == 6
    assert serial.reload_wait_ms >= 6 * 20 * 0.95
    assert serial.overlap_efficiency < 0.1
    assert overlapped.overlap_efficiency > 0.6, "all but the first copy, which nothing can hide"
    assert overlapped_s < serial_s - 0.05, "what is hidden is won in wall-clock time"


def test_failed_disk_surfaces_once_in_the_training_thread(tmp_path, monkeypatch):
    blocks, (x,) = toy_blocks(3), inputs(1)
    with managed("disk-double", tmp_path) as manager:

        def fail(source, offset):
            raise OSError(28, "activations cannot be offloaded to this folder (No space left on device)", str(tmp_path))

        monkeypatch.setattr(manager._offloader._tier._file, "write", fail)
        with pytest.raises(OSError, match=r"No space left.*" + str(tmp_path)):
            run_forward(manager, blocks, x).sum().backward()
        monkeypatch.undo()
        manager.reset()
        run_forward(manager, blocks, x).sum().backward()


@pytest.mark.parametrize(
    ("is_integrated", "override", "num_buffers"),
    [(False, None, 2), (True, None, 1), (True, False, 2), (False, True, 1)],
)
def test_f42_integrated_memory_uses_one_buffer_unless_overruled(monkeypatch, is_integrated, override, num_buffers):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=int(is_integrated))
    )
    plan = ActivationPlan(recompute=True, offload=True, double_buffer=True, integrated_memory=override)
    manager = ActivationManager(plan, "cuda:0", tier=PinnedTier(SimulatedDevice(eager_compute=True)))
    assert {2: "two reload buffers", 1: "one reload buffer"}[num_buffers] in manager.describe()
    assert ("no copy to hide" in manager.describe()) == (num_buffers == 1)
    blocks = toy_blocks(3)
    run_forward(manager, blocks, inputs(1)[0]).sum().backward()
    assert manager.stats().buffer_bytes == num_buffers * 4096
    manager.close()


def test_describe_says_what_was_chosen(tmp_path):
    words = {
        "none": "kept",
        "recompute": "block inputs kept on the device",
        "disk-single": "one reload buffer",
        "disk-double": str(tmp_path),
        "pinned-double": "pinned host memory of a simulated device, two reload buffers",
    }
    for variant, word in words.items():
        with managed(variant, tmp_path) as manager:
            assert word in manager.describe()


def test_stats_count_bytes_and_reset(tmp_path):
    blocks, (x,) = toy_blocks(3), inputs(1)
    with managed("disk-double", tmp_path) as manager:
        run_forward(manager, blocks, x).sum().backward()
        stats = manager.stats()
        assert (stats.num_offloads, stats.num_reloads, stats.offloaded_bytes) == (3, 3, 3 * x.nbytes)
        assert (stats.requested_bytes, stats.held_bytes, stats.buffer_bytes) == (3 * x.nbytes, 3 * 4096, 2 * 4096)
        assert stats.copy_ms > 0
        assert 0.0 <= stats.overlap_efficiency <= 1.0
        manager.reset_stats()
        assert manager.stats().num_offloads == manager.stats().num_reloads == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload": True}, "set recompute"),
        ({"recompute": True, "double_buffer": True}, "set offload"),
        ({"buffer_size_bytes": -1}, "must not be negative"),
    ],
)
def test_contradicting_plans_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ActivationPlan(**fields)


def test_missing_folder_and_unknown_device_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a folder"):
        ActivationManager(ActivationPlan(recompute=True, offload=True), "cpu")
    with pytest.raises(ValueError, match="no tier for device meta"):
        ActivationManager(ActivationPlan(recompute=True, offload=True, offload_dir=tmp_path), "meta")


def test_cuda_takes_the_pinned_tier_of_the_current_device(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        manager_module, "CudaDevice", lambda device: made.append(device) or SimulatedDevice(eager_compute=True)
    )
    plan = ActivationPlan(recompute=True, offload=True, integrated_memory=False)
    ActivationManager(plan, "cuda").close()
    ActivationManager(plan, "cuda:1").close()
    assert made == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_close_ends_threads_and_is_idempotent(tmp_path):
    with no_new_threads():
        manager = ActivationManager(ActivationPlan(recompute=True, offload=True, offload_dir=tmp_path), "cpu")
        run_forward(manager, toy_blocks(2), inputs(1)[0])
        manager.close()
        manager.close()
    assert list(tmp_path.iterdir()) == []
