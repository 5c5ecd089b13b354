import dataclasses

import pytest
import torch

from megatron_glue.backends import matmul_onednn, registry
from megatron_glue.backends.apex import layer_norm_apex, rms_norm_apex
from megatron_glue.backends.attention_metadata import METADATA_BUILDERS
from megatron_glue.backends.attention_segments import SegmentsAttention, segments_attention
from megatron_glue.backends.grouped_mm import GroupedMMLoop, GroupedMMWithReads
from megatron_glue.backends.grouped_mm_cpu import GroupedMMOnCpu
from megatron_glue.backends.norm import rms_norm_cpu, rms_norm_torch
from megatron_glue.backends.permutation import TORCH_PERMUTATION
from megatron_glue.backends.registry import resolve
from megatron_glue.backends.transformer_engine import (
    TransformerEngineAttention,
    TransformerEngineMatMul,
    layer_norm_te,
    rms_norm_te,
)
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import BackendConfig
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.matmul import TORCH_MATMUL
from tests.support import libraries


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU; the function sets its compute capability. Nothing may run on it."""

    def with_capability(major, minor=0):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "why_not_triton", lambda role, device: "nothing may run on it")
    with_capability(9)
    return with_capability


# Maker and family of a processor -> what multiplies, and what multiplies the rows of experts.
PROCESSORS = {
    "Intel": (("GenuineIntel", 6), "torch", "cores"),
    "AMD Zen 4": (("AuthenticAMD", 25), "onednn", "cores"),
    "AMD Zen 5": (("AuthenticAMD", 26), "onednn", "onednn"),
    "unknown": (("", 0), "onednn", "onednn"),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_auto_on_a_cpu(monkeypatch, processor):
    facts, matmul, grouped_mm = PROCESSORS[processor]
    monkeypatch.setattr(matmul_onednn, "_processor", lambda: facts)
    backends = resolve(BackendConfig(), "cpu", torch.float32, head_dim=64)
    # Long segments go to oneDNN where it is much faster, not where it only gains some percent.
    assert (backends.attention is segments_attention) is (grouped_mm == "cores")
    assert isinstance(backends.attention, SegmentsAttention)
    assert backends.attention_layout == "segments"
    assert backends.rms_norm is rms_norm_cpu
    assert isinstance(backends.grouped_mm, GroupedMMOnCpu)
    assert {role: name for role, name, _ in backends.choices}["grouped_mm"] == grouped_mm
    assert (backends.matmul is TORCH_MATMUL) is (matmul == "torch")
    reason = "matmul torch (not onednn: MKL is as fast on Intel's processors)"
    assert (reason in backends.describe()) is (matmul == "torch")
    assert (backends.grouping, backends.optimizer) == ("numpy", "fused")
    assert (backends.permutation, backends.router) == (TORCH_PERMUTATION, None)


def test_attention_multiplies_as_everything_else_does(monkeypatch):
    monkeypatch.setattr(matmul_onednn, "_processor", lambda: PROCESSORS["AMD Zen 5"][0])
    plain = resolve(BackendConfig(matmul_backend="torch"), "cpu", torch.float32, head_dim=64)
    assert plain.attention is segments_attention


def test_the_choice_is_one_line_with_reasons():
    line = resolve(BackendConfig(grouped_mm_backend="loop"), "cpu", torch.float32, head_dim=64).describe()
    assert "\n" not in line
    assert "attention segments (not varlen: its kernel runs on CUDA, not on cpu)" in line
    assert "grouped_mm loop (configured)" in line


@pytest.mark.usefixtures("gpu")
def test_auto_on_a_gpu_does_without_what_is_missing():
    backends = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=64)
    assert backends.attention_layout == "varlen"
    assert backends.rms_norm is rms_norm_torch
    assert backends.grouping == "torch"
    assert resolve(BackendConfig(), "cuda", torch.float32, head_dim=64).attention_layout == "segments"
    with_dropout = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=64, attention_dropout=0.1)
    assert with_dropout.attention_layout == "segments"
    assert "not varlen: it has no attention dropout" in with_dropout.describe()


@pytest.mark.parametrize(
    ("capability", "head_dim", "reason"),
    [
        ((8, 0), 64, ""),
        ((9, 0), 256, ""),
        ((12, 0), 8, ""),
        ((7, 5), 64, "compute capability 8.0, this device has 7.5"),
        ((9, 0), 264, "a multiple of 8 up to 256, not of 264"),
        ((9, 0), 60, "a multiple of 8 up to 256, not of 60"),
    ],
)
def test_auto_takes_varlen_only_where_its_kernel_runs(gpu, capability, head_dim, reason):
    gpu(*capability)
    backends = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=head_dim)
    assert backends.attention_layout == ("segments" if reason else "varlen")
    assert reason in backends.describe()
    if reason:
        with pytest.raises(ConfigError, match=reason):
            resolve(BackendConfig(attention_backend="varlen"), "cuda", torch.bfloat16, head_dim=head_dim)


@pytest.mark.parametrize(("capability", "reads"), [((9, 0), False), ((10, 0), False), ((8, 0), True), ((12, 0), True)])
def test_grouped_mm_says_and_counts_that_it_reads_where_torch_does(gpu, capability, reads):
    gpu(*capability)
    reader = HostReader()
    backends = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=64, host_reader=reader)
    assert isinstance(backends.grouped_mm, GroupedMMWithReads) is reads
    note = "torch reads the offsets on the host except in bf16 on SM90 and SM100)"
    assert (note in backends.describe()) is reads


def test_a_build_without_cuda_is_a_reason_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=64)
    assert backends.attention_layout == "segments"
    assert "not varlen: this machine or this build of torch has no CUDA device" in backends.describe()


@pytest.mark.parametrize(
    ("config", "needs", "reason"),
    [
        ({"attention_backend": "varlen"}, {}, "its kernel runs on CUDA, not on cpu"),
        ({"matmul_backend": "onednn"}, {"dtype": torch.bfloat16}, "it computes in fp32"),
        ({"grouped_mm_backend": "onednn"}, {"device": "cuda"}, "it is for a CPU"),
        ({"grouped_mm_backend": "cores"}, {"device": "cuda"}, "it would read device values"),
        ({"attention_backend": "flex"}, {}, "FlexAttention has no backward on a CPU"),
        (
            {"attention_backend": "varlen"},
            {"device": "cuda", "dtype": torch.bfloat16, "attention_dropout": 0.1},
            "no attention dropout",
        ),
        ({"attention_backend": "flex"}, {"device": "cuda", "attention_dropout": 0.1}, "no attention dropout"),
        ({"attention_backend": "varlen"}, {"device": "cuda"}, "bf16 or fp16"),
        ({"norm_backend": "cpu"}, {"dtype": torch.bfloat16}, "it computes in fp32"),
        ({"attention_backend": "te"}, {}, "its kernels run on CUDA, not on cpu"),
        ({"norm_backend": "te"}, {}, "its kernels run on CUDA, not on cpu"),
        ({"norm_backend": "apex"}, {}, "its kernels run on CUDA, not on cpu"),
        ({"matmul_backend": "te"}, {"device": "cuda"}, "fp32 in TF32"),
        ({"optimizer_backend": "te"}, {}, "its kernels run on CUDA, not on cpu"),
        ({"optimizer_backend": "apex"}, {}, "its kernels run on CUDA, not on cpu"),
        ({"grouping_backend": "numpy"}, {"device": "cuda"}, "it would read device values"),
    ],
)
def test_a_named_backend_that_cannot_be_had_is_an_error_with_the_reason(config, needs, reason):
    (field,) = config
    needs = {"device": "cpu", "dtype": torch.float32, "head_dim": 64} | needs
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(BackendConfig(**config), **needs)
    assert caught.value.field == flag_of(field)
    assert caught.value.field.startswith("--")
    assert "use auto or one of" in caught.value.remedy


@pytest.mark.usefixtures("gpu", "stand_ins")
def test_te_and_apex_are_taken_by_name_only():
    by_name = resolve(
        BackendConfig(attention_backend="te", norm_backend="apex", matmul_backend="te", optimizer_backend="apex"),
        "cuda",
        torch.bfloat16,
        head_dim=64,
    )
    assert isinstance(by_name.attention, TransformerEngineAttention)
    assert isinstance(by_name.matmul, TransformerEngineMatMul)
    assert (by_name.rms_norm, by_name.layer_norm) == (rms_norm_apex, layer_norm_apex)
    assert (by_name.attention_layout, by_name.optimizer) == ("te", "apex")
    other = resolve(BackendConfig(norm_backend="te", optimizer_backend="te"), "cuda", torch.bfloat16, head_dim=64)
    assert (other.rms_norm, other.layer_norm, other.optimizer) == (rms_norm_te, layer_norm_te, "te")
    auto = resolve(BackendConfig(), "cuda", torch.bfloat16, head_dim=64)
    assert not {name for _, name, _ in auto.choices} & {"te", "apex"}


@pytest.mark.usefixtures("gpu")
def test_a_library_that_is_not_installed_is_an_error_with_the_reason():
    with libraries.hidden(), pytest.raises(ConfigError, match="not the package apex of PyPI"):
        resolve(BackendConfig(norm_backend="apex"), "cuda", torch.bfloat16, head_dim=64)


def test_a_kernel_that_torch_lacks_is_named(monkeypatch):
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value: query)
    with pytest.raises(ConfigError, match=r"it lacks \['scale', 'window_size'\]"):
        resolve(BackendConfig(attention_backend="varlen"), "cuda", torch.bfloat16, head_dim=64)


def test_the_result_is_frozen_and_kernels_count_with_the_given_reader():
    reader = HostReader()
    backends = resolve(BackendConfig(grouped_mm_backend="loop"), "cpu", torch.float32, head_dim=64, host_reader=reader)
    assert isinstance(backends.grouped_mm, GroupedMMLoop)
    backends.grouped_mm(torch.randn(2, 4), torch.randn(1, 4, 4), torch.tensor([2]))
    assert reader.count == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        backends.optimizer = "foreach"  # pyright: ignore[reportAttributeAccessIssue]


def test_every_choice_of_the_configuration_has_an_entry_and_every_layout_a_builder():
    tables = {
        "attention_backend": registry._ATTENTION,
        "norm_backend": registry._NORM,
        "matmul_backend": registry._MATMUL,
        "grouped_mm_backend": registry._GROUPED_MM,
        "grouping_backend": registry._GROUPING,
        "permutation_backend": registry._PERMUTATION,
        "router_backend": registry._ROUTER,
        "optimizer_backend": registry._OPTIMIZER,
    }
    for field, entries in tables.items():
        annotation = BackendConfig.model_fields[field].annotation
        choices = set(annotation.__args__) - {"auto"}  # pyright: ignore[reportOptionalMemberAccess]
        assert {entry.name for entry in entries} == choices
    assert {entry.name for entry in registry._ATTENTION} == set(METADATA_BUILDERS)
