"""Torch's warnings about synchronisation become reads at the line that led to them; other warnings stay warnings."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from megatron_glue.proofs.cuda_sync_watch import CudaSyncWatch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The debug modes that were set, on a machine without CUDA."""
    set_modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    return set_modes


def synchronise() -> None:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally at somewhere.cpp:1.)", stacklevel=1)


def read_twice() -> None:
    for _ in range(2):
        synchronise()


def test_each_warning_is_a_read(modes: list[object]) -> None:
    watch = CudaSyncWatch(nn.Module(), frozenset({test_each_warning_is_a_read.__code__}))
    with watch:
        read_twice()
    ((read, count),) = watch.reads.items()
    assert (read.kind, read.phase, read.function, count) == ("synchronisation", "read_twice", "synchronise", 2)
    assert read.file == "tests/unit/proofs/test_cuda_sync_watch.py"
    assert modes == ["warn", 0]


def test_other_warnings_are_passed_on(modes: list[object]) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with CudaSyncWatch(nn.Module()) as watch:
            warnings.warn("something else", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert [str(warning.message) for warning in shown] == [
        "something else",
        "called a synchronizing CUDA operation",
    ], "the second came behind the watch"
    assert not watch.reads


def test_threads_that_python_started_are_left_out(modes: list[object]) -> None:
    with CudaSyncWatch(nn.Module()) as watch:
        thread = threading.Thread(target=read_twice)
        thread.start()
        thread.join()
    assert not watch.reads


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()
        return grad


@pytest.mark.gpu
@needs_gpu
def test_reads_of_a_real_device() -> None:
    x = torch.ones(8, device="cuda", requires_grad=True)
    mask, counts = x > 0, torch.ones(8, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with CudaSyncWatch(nn.Module()) as free:
        counts.scatter_add_(0, counts, counts)
        torch.repeat_interleave(x, counts, output_size=8)
        x.detach().clone()[mask] = 0.0
    assert not free.reads
    with CudaSyncWatch(nn.Module()) as watch:
        x.sum().item()
        torch.bincount(counts, minlength=9)
        x.detach()[mask]
        torch.tensor([1, 2], device="cuda")
        ReadsInBackward.apply(x).sum().backward()
    assert len(watch.reads) >= 5
    assert any(read.phase == "backward" for read in watch.reads)
