"""Reads that are counted, and reads that are started before they are awaited."""

import pytest
import torch

from megatron_glue.ops.host_reader import HostReader


def test_every_read_is_counted():
    reader = HostReader()
    assert reader.read(torch.tensor([1, 2])) == [1, 2]
    assert reader.read(torch.tensor(3)) == 3
    assert reader.where(torch.tensor([False, True]))[0].tolist() == [1]
    reader.count_reads_of_library(4)
    assert reader.count == 7


def test_on_a_cpu_a_started_read_is_made_when_it_is_awaited():
    """A collective that the value waits for must not be awaited before then."""
    reader, value = HostReader(), torch.zeros(2)
    pending = reader.start_read(lambda: value + 1, value.device)
    value.fill_(5)
    assert reader.count == 0
    assert pending.wait() == [6.0, 6.0]
    assert reader.count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_a_started_read_waits_for_what_was_queued_before_it_and_for_nothing_else():
    """The value is that of the moment of the start, and starting makes the host wait for nothing."""
    reader, device = HostReader(), torch.device("cuda", torch.cuda.current_device())
    value = torch.arange(4, device=device)
    total = value.new_zeros(())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10_000_000)
        total.copy_(value.sum())
        pending = reader.start_read(lambda: torch.stack([total, total * 2]), device)
        after = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        after.record()
        assert pending.wait() == [6, 12]
        assert not after.query(), "the host did not wait for what was queued later"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reader.count == 1
