"""What the profiler's events become, on a CPU (recorded) and on a GPU (synthetic)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_glue.proofs.profile_events import phase_times_ms, spans_of


def event(
    name: str, device: DeviceType = DeviceType.CPU, *, is_range: bool = False, length: float = 1.0
) -> SimpleNamespace:
    """An event as the profiler would return it."""
    return SimpleNamespace(
        name=name,
        device_type=device,
        is_user_annotation=is_range,
        cpu_children=[],
        cpu_parent=None,
        time_range=SimpleNamespace(start=2.0, end=2.0 + length),
    )


def test_events_of_a_cpu() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        with record_function("data wait"):
            torch.ones(2)
        (x @ x).relu().sum().backward()
        (x > 0).nonzero()
        x.sum().item()
        with record_function("optimizer"):
            x.detach().add_(1)
    spans = spans_of(profiler.events(), "cpu")
    found = {kind: [span.name for span in spans if span.kind == kind] for kind in {span.kind for span in spans}}
    assert found["step"] == ["step"]
    assert found["input"] == ["data wait"]
    assert found["optimizer"] == ["optimizer"]
    assert found["product"] == ["aten::mm"] * 3, "one forward, two backward; what they call is part of them"
    assert found["sync"] == ["aten::nonzero", "aten::_local_scalar_dense"]
    assert "aten::clamp_min" in found["operator"], "a leaf"
    assert not {"aten::relu", "aten::resolve_conj", "ReluBackward0"} & set(found["operator"])
    assert list(phase_times_ms(profiler.events(), 1)) == ["data wait", "optimizer"], "in the order of a step"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "product"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "product"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "product"),
        ("void at::native::vectorized_elementwise_kernel<4>", "operator"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("Memcpy DtoD (Device -> Device)", "operator"),
    ],
)
def test_kernels_of_a_gpu(name: str, kind: str) -> None:
    assert [span.kind for span in spans_of([event(name, DeviceType.CUDA)], "cuda")] == [kind]


def test_the_host_side_of_a_gpu() -> None:
    events = [
        event("step", is_range=True),
        event("step", DeviceType.CUDA, is_range=True),
        event("optimizer", is_range=True),
        event("optimizer", DeviceType.CUDA, is_range=True, length=3.0),
        event("data wait", is_range=True),
        event("aten::mm"),
        event("aten::_local_scalar_dense"),
        event("cudaStreamSynchronize"),
        event("cudaLaunchKernel"),
    ]
    spans = spans_of(events, "cuda")
    assert [(span.kind, span.duration_us) for span in spans] == [
        ("step", 1.0),
        ("optimizer", 3.0),
        ("input", 1.0),
        ("sync", 1.0),
    ], "kernels count, not their launches; a range counts where its kernels ran; a read waits once"
