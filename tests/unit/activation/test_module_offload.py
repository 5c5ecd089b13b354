"""Chosen saved tensors leave the device and come back bit for bit; weights, small tensors and second views do not."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.disk_tier import DiskTier
from megatron_glue.activation.pinned_tier import PinnedTier
from tests.support.activation_blocks import SlowTier, context_of, gradients_of, run_forward
from tests.support.activation_variants import assert_same, inputs, plain_gradients
from tests.support.simulated_device import SimulatedDevice

TOKENS, DIM = 8, 16  # those of inputs()
INPUT_BYTES = 4 * TOKENS * DIM


class Attentive(nn.Module):
    """Three views of one product are saved by a product of them, and its result by the next; a weight is used as such,
    as a view and as a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.stacked = nn.Parameter(torch.randn(2, 1, DIM // 2, DIM) / DIM)

    def forward(self, x_TD, context):
        qkv = self.qkv(x_TD)
        with context.region("attn_core", self.out):
            q, k, v = qkv.unflatten(1, (3, DIM)).unbind(1)
            y_TD = (q * k * v).sigmoid() @ self.out.t()
            stacked = self.stacked.double().flatten(1, 2).transpose(1, 2)
            y_TD = y_TD + torch.bmm(y_TD.double().expand(2, -1, -1), stacked).transpose(0, 1).flatten(1).float()
        return x_TD + torch.tanh(y_TD)


def blocks_of(num: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Attentive() for _ in range(num))


@contextmanager
def offloading(folder: Path, *, kind="disk", least_bytes=0, modules=("attn_core",), **fields):
    device = SimulatedDevice(eager_compute=True)
    plan = ActivationPlan(
        offload=True,
        offload_modules=frozenset(modules),
        least_offload_bytes=least_bytes,
        poison=True,
        offload_dir=folder,
        **fields,
    )
    tier = PinnedTier(device, poison=True) if kind == "pinned" else None
    manager = ActivationManager(plan, "cpu", tier=tier)
    try:
        yield manager
    finally:
        manager.close()
        assert device.violations == []


@pytest.mark.parametrize("kind", ["disk", "pinned"])
@pytest.mark.parametrize("fields", [{}, {"double_buffer": True}, {"recompute": True, "num_recomputed": 2}])
def test_gradients_are_equal_bit_for_bit(kind, fields, tmp_path):
    blocks, micro_batches = blocks_of(5), inputs(3)
    expected = plain_gradients(blocks, micro_batches)
    with offloading(tmp_path, kind=kind, **fields) as manager:
        for _ in range(2):
            manager.begin_step()
            losses = [run_forward(manager, blocks, x, index).square().sum() for index, x in enumerate(micro_batches)]
            assert manager.num_tracked_inputs == 15
            for loss in losses:
                loss.backward()
            assert manager.num_tracked_inputs == 0
            assert_same(gradients_of(blocks), expected)


def moved_storages(manager, monkeypatch) -> list:
    moved = []
    store = DiskTier.store
    monkeypatch.setattr(DiskTier, "store", lambda tier, x: moved.append(x) or store(tier, x))
    return moved


def test_weights_stay_and_a_storage_moves_once(tmp_path, monkeypatch):
    (block,), (x,) = blocks_of(1), inputs(1)
    with offloading(tmp_path) as manager:
        moved = moved_storages(manager, monkeypatch)
        loss = manager.run_block(block, x, context_of()).sum()
        weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
        assert all(content.untyped_storage().data_ptr() not in weights for content in moved)
        sizes = [content.nbytes for content in moved]
        assert sizes.count(3 * INPUT_BYTES) == 1, "q, k and v view one storage"
        assert 8 * block.stacked.numel() not in sizes, "nor does the cast of the stacked weight leave"
        loss.backward()
        manager.reset()


def test_small_tensors_and_other_regions_stay(tmp_path):
    (block,), (x,) = blocks_of(1), inputs(1)
    for fields in ({"least_bytes": 3 * INPUT_BYTES + 1}, {"modules": ("mlp_act",)}):
        with offloading(tmp_path, **fields) as manager:
            manager.run_block(block, x, context_of()).sum().backward()
            assert manager.stats().num_offloads == 0


def test_moved_tensors_leave_memory(tmp_path, monkeypatch):
    (block,), (x,) = blocks_of(1), inputs(1)
    alive = []
    store = DiskTier.store

    def watched(tier, content):
        alive.append(StorageWeakRef(content.untyped_storage()))
        return store(tier, content)

    monkeypatch.setattr(DiskTier, "store", watched)
    with offloading(tmp_path) as manager:
        loss = manager.run_block(block, x, context_of()).sum()
        manager._offloader._tier.settle()
        assert len(alive) >= 3
        assert all(storage.expired() for storage in alive)
        assert manager.stats().offloaded_bytes >= 5 * INPUT_BYTES
        loss.backward()


def test_evaluation_and_unused_blocks_leave_nothing(tmp_path):
    blocks, (x,) = blocks_of(2), inputs(1)
    with offloading(tmp_path) as manager:
        with torch.no_grad():
            run_forward(manager, blocks, x)
        assert manager.num_tracked_inputs == 0
        run_forward(manager, blocks, x)
        assert manager.num_tracked_inputs == 2
        manager.begin_step()
        assert manager.num_tracked_inputs == 0


def test_a_block_that_fails_leaves_no_pieces_behind(tmp_path):
    (block,), (x,) = blocks_of(1), inputs(1)
    with offloading(tmp_path) as manager:
        handle = block.qkv.register_forward_hook(lambda *_: None)
        block.out.data = block.out.data[:, :4]
        with pytest.raises(RuntimeError):
            manager.run_block(block, x, context_of())
        handle.remove()
        manager.reset()
        assert manager._offloader._pieces == []
        assert manager._offloader._tier._tier._extents.taken_bytes == 0


def test_second_backward_is_refused(tmp_path):
    (block,), (x,) = blocks_of(1), inputs(1)
    with offloading(tmp_path) as manager:
        loss = manager.run_block(block, x, context_of()).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="retain_graph"):
            loss.backward()


def test_failed_read_of_any_piece_reaches_the_training_thread(tmp_path, monkeypatch):
    (block,), (x,) = blocks_of(1), inputs(1)
    with offloading(tmp_path) as manager:
        loss = manager.run_block(block, x, context_of()).sum()
        tier = manager._offloader._tier._tier
        tier.settle()
        read, calls = tier._file.read, []

        def fail_first(destination, offset):
            calls.append(offset)
            if len(calls) == 1:
                raise OSError(5, "the disk failed")
            read(destination, offset)

        monkeypatch.setattr(tier._file, "read", fail_first)
        with pytest.raises(OSError, match="the disk failed"):
            loss.backward()


def test_slow_copies_come_back_in_reverse_order(tmp_path):
    blocks, (x,) = blocks_of(4), inputs(1)
    plan = ActivationPlan(
        offload=True,
        double_buffer=True,
        offload_modules=frozenset({"attn_core"}),
        least_offload_bytes=0,
        record_timeline=True,
    )
    manager = ActivationManager(plan, "cpu", tier=SlowTier(tmp_path, read_s=0.001))
    loss = run_forward(manager, blocks, x).sum()
    manager.end_forward()
    loss.backward()
    assert [event.call.block for event in manager.timeline() if event.name == "reload"] == [3, 2, 1, 0]
    manager.close()
