"""The input of the last block of a pass stays on the device: backward wants it first, so nothing hides its copies."""

from __future__ import annotations

import pytest
import torch

from megatron_glue.activation import ActivationManager, ActivationPlan
from tests.support.activation_blocks import SlowTier, context_of, gradients_of, run_forward, toy_blocks
from tests.support.activation_variants import OFFLOADING, assert_same, inputs, managed, plain_gradients


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("variant", OFFLOADING)
def test_all_but_the_last_leave_and_gradients_are_the_same(variant, num_layers, tmp_path):
    blocks, micro_batches = toy_blocks(num_layers, dropout="global"), inputs(3)
    expected = plain_gradients_of_steps(blocks, micro_batches, num_steps=2)
    with managed(variant, tmp_path) as manager:
        for step in range(2):
            manager.begin_step()
            for index, x in enumerate(micro_batches):
                loss = run_forward(manager, blocks, x, index, knows_last=True).square().sum()
                assert manager.num_tracked_inputs == num_layers - 1
                loss.backward()
            assert_same(gradients_of(blocks), expected[step])
        stats = manager.stats()
        assert (stats.num_offloads, stats.num_residents) == (6 * (num_layers - 1), 6)
        assert stats.num_reloads == stats.num_offloads
        assert stats.resident_bytes == micro_batches[0].nbytes, "one at a time"


def plain_gradients_of_steps(blocks, micro_batches, num_steps):
    torch.manual_seed(11)
    expected = [plain_gradients(blocks, micro_batches) for _ in range(num_steps)]
    torch.manual_seed(11)
    return expected


@pytest.mark.parametrize("num_layers", [1, 3])
def test_with_several_micro_batches_in_flight_one_input_stays_at_most(num_layers, tmp_path):
    """Backward of another micro-batch hides the copies then, and a pipeline's first stage would keep one for each."""
    blocks, micro_batches = toy_blocks(num_layers), inputs(3)
    expected = plain_gradients(blocks, micro_batches)
    with managed("disk-double", tmp_path) as manager:
        manager.begin_step()
        losses = [
            run_forward(manager, blocks, x, index, knows_last=True).square().sum()
            for index, x in enumerate(micro_batches)
        ]
        assert manager.num_tracked_inputs == 3 * num_layers - 1
        for loss in losses:
            loss.backward()
        assert_same(gradients_of(blocks), expected)
        assert manager.stats().resident_bytes == micro_batches[0].nbytes


def test_the_first_copy_of_a_backward_runs_under_the_last_block(tmp_path):
    """The timeline has the last block's backward, with no copy and no wait of its own."""
    blocks, (x,) = toy_blocks(4), inputs(1)
    for block in blocks:
        block.backward_s = 0.03
    plan = ActivationPlan(recompute=True, offload=True, double_buffer=True, record_timeline=True)
    manager = ActivationManager(plan, "cpu", tier=SlowTier(tmp_path, read_s=0.01))
    run_forward(manager, blocks, x, knows_last=True).sum().backward()
    bars = {(bar.name, bar.call.block): bar for bar in manager.timeline()}
    assert bars["reload", 2].start_ms < bars["backward", 3].end_ms
    assert not {("offload", 3), ("reload", 3), ("wait", 3)} & bars.keys()
    assert ("forward", 3) in bars
    stats = manager.stats()
    assert stats.compute_ms >= 4 * 30, "the last block's compute counts, it hides a copy"
    manager.close()


def test_backward_fetches_ahead_without_the_end_of_forward_being_told(tmp_path):
    blocks, (x,) = toy_blocks(3), inputs(1)
    with managed("disk-double", tmp_path) as manager:
        y = run_forward_silently(manager, blocks, x)
        started = []
        prefetch = manager._offloader._buffers.prefetch
        manager._offloader._buffers.prefetch = lambda stored: started.append(stored) or prefetch(stored)
        y.sum().backward()
        assert len(started) == 2, "from the last block on, and from the one before it on"


def run_forward_silently(manager, blocks, x):
    for position, block in enumerate(blocks):
        x = manager.run_block(block, x, context_of(), position=position, is_last=position == len(blocks) - 1)
    return x


def test_f40_a_step_that_never_ran_backward_keeps_nothing(tmp_path):
    blocks, (x,) = toy_blocks(2), inputs(1)
    with managed("disk-double", tmp_path) as manager:
        y = run_forward(manager, blocks, x, knows_last=True)
        manager.begin_step()
        with pytest.raises(RuntimeError, match="before the next begin_step"):
            y.sum().backward()
        run_forward(manager, blocks, x, knows_last=True).sum().backward()
        assert manager.num_tracked_inputs == 0
