"""What is off the device comes back in any order, is hidden behind compute, and is gone after the step."""

from __future__ import annotations

import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.disk_tier import DiskTier
from megatron_glue.activation.double_buffer import ReloadBuffers
from tests.support.activation_blocks import SlowTier, context_of, gradients_of, run_forward, toy_blocks
from tests.support.activation_variants import OFFLOADING, assert_same, inputs, managed, plain_gradients
from tests.support.resident_memory import resident_bytes


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


@pytest.mark.parametrize(
    "order", ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1"], ids=["1f1b", "gpipe", "last stage"]
)
def test_in_the_order_of_a_pipeline_every_input_is_fetched_ahead_and_once(order, tmp_path, monkeypatch):
    ahead, asked, loads = set(), [], []
    prefetch, acquire, load = ReloadBuffers.prefetch, ReloadBuffers.acquire, DiskTier.load

    def watched_prefetch(buffers, stored):
        ahead.add(stored)
        prefetch(buffers, stored)

    def watched_acquire(buffers, stored, upcoming):
        asked.append(stored in ahead)
        return acquire(buffers, stored, upcoming)

    def watched_load(tier, stored, *args):
        loads.append(stored)
        return load(tier, stored, *args)

    monkeypatch.setattr(ReloadBuffers, "prefetch", watched_prefetch)
    monkeypatch.setattr(ReloadBuffers, "acquire", watched_acquire)
    monkeypatch.setattr(DiskTier, "load", watched_load)
    blocks, micro_batches = toy_blocks(3), inputs(4)
    with managed("disk-double", tmp_path) as manager:
        manager.begin_step()
        losses = {}
        for action, micro_batch in ((word[0], int(word[1:])) for word in order.split()):
            if action == "F":
                losses[micro_batch] = run_forward(manager, blocks, micro_batches[micro_batch], micro_batch).sum()
            else:
                losses[micro_batch].backward()
    assert asked == [True] * 3 * len(losses)
    assert len(loads) == len(set(loads)) == 3 * len(losses), "a wrong guess costs a second load"


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
        computing = [bar for bar in bars if bar.name == "backward"]
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

        monkeypatch.setattr(manager._offloader._tier._tier._file, "write", fail)
        with pytest.raises(OSError, match=r"No space left.*" + str(tmp_path)):
            run_forward(manager, blocks, x).sum().backward()
        monkeypatch.undo()
        manager.reset()
        run_forward(manager, blocks, x).sum().backward()
