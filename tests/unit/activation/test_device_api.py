"""Host memory of exact size, and the real device where there is one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from megatron_glue.activation import ActivationManager, ActivationPlan
from megatron_glue.activation.device_api import CudaDevice, device_name, has_integrated_memory, room_bytes
from megatron_glue.activation.extents import ALIGNMENT_BYTES
from tests.support.activation_blocks import context_of, gradients_of, toy_blocks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_f47_host_memory_is_registered_at_its_exact_size(monkeypatch):
    registered = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: registered.update({address: num_bytes}) or 0,
        cudaHostUnregister=lambda address: registered.pop(address) and 0,
    )
    codes = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", codes.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    device = CudaDevice(torch.device("cuda", 0))
    block = device.allocate_host(9 * ALIGNMENT_BYTES)
    assert registered == {block.data_ptr(): block.nbytes} == {block.data_ptr(): 9 * ALIGNMENT_BYTES}
    assert block.data_ptr() % ALIGNMENT_BYTES == 0
    device.free_host(block)
    assert registered == {}
    assert codes == [0, 0]


def test_f47_refused_registration_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def check_error(code):
        raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        CudaDevice(torch.device("cuda", 0)).allocate_host(ALIGNMENT_BYTES)


@pytest.mark.parametrize("flag", [0, 1])
def test_f42_integrated_memory_is_read_from_the_device(monkeypatch, flag):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=flag))
    assert has_integrated_memory(torch.device("cuda", 0)) is bool(flag)
    assert has_integrated_memory(torch.device("cpu")) is False


def test_room_is_what_was_left_at_the_peak(monkeypatch):
    """Of 100 bytes 30 are free and 60 are torch's, of which 45 were in use at the peak."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 45)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert room_bytes(torch.device("cuda", 0)) == 45.0
    assert room_bytes(torch.device("cpu")) == float("inf")
    assert [device_name(torch.device(name)) for name in ("cpu", "cuda")] == ["cpu", "a GPU"]


@pytest.mark.gpu
@needs_gpu
def test_host_memory_is_pinned():
    device = CudaDevice(torch.device("cuda", 0))
    block = device.allocate_host(3 * ALIGNMENT_BYTES)
    assert block.is_pinned()
    device.free_host(block)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("double_buffer", [False, True])
def test_f38_gradients_on_the_device_are_equal_bit_for_bit(double_buffer):
    """Large inputs and small blocks: copies take longer than compute, and freed memory is NaN on both sides."""
    blocks = toy_blocks(5, dim=1024).cuda()
    x = torch.randn(16384, 1024, device="cuda")
    results = []
    for plan in (
        ActivationPlan(),
        ActivationPlan(recompute=True, offload=True, double_buffer=double_buffer, poison=True, integrated_memory=False),
    ):
        manager = ActivationManager(plan, "cuda")
        for micro_batch in range(3):
            manager.begin_step()
            h = x
            for block in blocks:
                h = manager.run_block(block, h, context_of(micro_batch))
            manager.end_forward()
            h.square().mean().backward()
        results.append(gradients_of(blocks))
        stats = manager.stats()
        assert stats.num_reloads == (15 if plan.offload else 0)
        assert stats.held_bytes <= 1.1 * stats.requested_bytes + x.nbytes
        manager.close()
    assert all(torch.equal(plain, moved) for plain, moved in zip(*results, strict=True))
