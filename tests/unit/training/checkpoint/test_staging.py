"""The staged copy: bit-equal, in one buffer that is used again, and behind what the device still has to do."""

from __future__ import annotations

import torch

from megatron_glue.training.checkpoint.parts import Part
from megatron_glue.training.checkpoint.staging import HostStaging
from megatron_glue.training.checkpoint.tensors import NamedPart
from tests.support.simulated_device import SimulatedDevice

CPU = torch.device("cpu")


def named(*tensors: torch.Tensor) -> list[NamedPart]:
    return [NamedPart(str(i), tuple(t.shape), Part((0,) * t.dim(), t)) for i, t in enumerate(tensors)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


SOURCES = (
    torch.tensor([1.5, -0.0, float("nan")]),
    torch.tensor(7.0),
    torch.arange(6.0).view(2, 3).T,
    torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    torch.tensor([2**62]),
    torch.zeros(0, 4),
    torch.arange(5, dtype=torch.uint8),
)


def test_the_copy_is_bitwise_and_keeps_its_values() -> None:
    sources = [tensor.clone() for tensor in SOURCES]
    expected = [bits(tensor) for tensor in sources]
    staging = HostStaging(CPU)
    staged = staging.stage(named(*sources))
    for source in sources:
        source.zero_()
    assert [bits(entry.part.tensor) for entry in staged] == expected
    assert [entry.part.sizes for entry in staged] == [tuple(tensor.shape) for tensor in SOURCES]
    assert len({entry.part.tensor.untyped_storage().data_ptr() for entry in staged}) == 1


def test_one_buffer_serves_all_saves_and_everything_is_counted() -> None:
    staging = HostStaging(CPU)
    first = staging.stage(named(torch.ones(1000), torch.ones(3)))
    held = staging.held_bytes
    assert 4012 <= held <= 4012 + 4096 + 64
    again = staging.stage(named(torch.full((1000,), 2.0), torch.ones(3)))
    assert again[0].part.tensor.data_ptr() == first[0].part.tensor.data_ptr()
    assert first[0].part.tensor[0] == 2, "what was staged before is overwritten"
    assert (staging.num_allocations, staging.num_copies, staging.copied_bytes) == (1, 4, 8024)
    assert staging.copy_seconds > 0
    staging.stage(named(torch.ones(5000)))
    assert staging.num_allocations == 2
    staging.close()
    staging.close()
    assert staging.held_bytes == 0


def test_the_copy_waits_for_the_update_and_the_caller_for_the_copy() -> None:
    device = SimulatedDevice(eager_compute=False)
    weights = device.new_activation(3.0, 8)
    staging = HostStaging(CPU, device)
    staged = staging.stage(named(weights))
    assert (staged[0].part.tensor == 3.0).all(), (
        "on return the copy has ended, behind the kernel that wrote the weights"
    )
    assert ("offload", "compute") in device.edges
    assert device.num_host_blocks == 1
    staging.close()
    assert device.host_bytes == 0


def test_a_copy_that_waited_for_nothing_would_show() -> None:
    device = SimulatedDevice(eager_compute=False, ignored_edges=[("offload", "compute")])
    weights = device.new_activation(3.0, 8)
    staged = HostStaging(CPU, device).stage(named(weights))
    assert not (staged[0].part.tensor == 3.0).all()
