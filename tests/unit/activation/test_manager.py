"""All variants give the same gradients bit for bit, and the manager says what it chose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_glue.activation import ActivationManager, ActivationPlan, ActivationStats
from megatron_glue.activation import manager as manager_module
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import ToyBlock, context_of, gradients_of, no_new_threads, run_forward, toy_blocks
from tests.support.activation_variants import OFFLOADING, VARIANTS, assert_same, inputs, managed, plain_gradients
from tests.support.simulated_device import SimulatedDevice


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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("num_recomputed", "expected"), [(1, 1), (3, 3), (9, 5), (None, 5)])
def test_only_the_first_blocks_are_recomputed(num_recomputed, expected, offload, tmp_path):
    blocks, (x,) = toy_blocks(5), inputs(1)
    expected_gradients = plain_gradients(blocks, [x])
    plan = ActivationPlan(recompute=True, num_recomputed=num_recomputed, offload=offload, offload_dir=tmp_path)
    manager = ActivationManager(plan, "cpu")
    assert ("in the first" in manager.describe()) == (num_recomputed is not None)
    for block in blocks:
        block.calls = []
    loss = run_forward(manager, blocks, x).square().sum()
    assert manager.num_tracked_inputs == (expected if offload else 0)
    loss.backward()
    assert [len(block.calls) for block in blocks] == [2] * expected + [1] * (5 - expected)
    assert_same(gradients_of(blocks), expected_gradients)
    manager.close()
