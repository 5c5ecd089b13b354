"""Which kernel serves each role: a table of entries, and one function that chooses from it at start.

``auto`` takes the first entry of the role that works here and can do what the model needs. A backend that is named and
cannot be had is an error that says why. Layers receive the chosen callables and never ask again.

Optional libraries are imported only in the file of the backend that needs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megatron_glue.backends.apex import layer_norm_apex, rms_norm_apex, why_not_apex_norm, why_not_apex_optimizer
from megatron_glue.backends.attention import AttentionKernel
from megatron_glue.backends.attention_dense import dense_attention
from megatron_glue.backends.attention_flex import flex_attention
from megatron_glue.backends.attention_long import LongSegmentAttention
from megatron_glue.backends.attention_segments import SegmentsAttention, segments_attention
from megatron_glue.backends.attention_varlen import varlen_attention
from megatron_glue.backends.core_pool import shared_pool
from megatron_glue.backends.grouped_mm import (
    GroupedMM,
    GroupedMMLoop,
    GroupedMMWithReads,
    grouped_mm_torch,
    reads_offsets,
)
from megatron_glue.backends.grouped_mm_cpu import GroupedMMOnCpu
from megatron_glue.backends.matmul_onednn import (
    OnednnMatMul,
    is_onednn_much_faster,
    why_not_onednn,
    why_onednn_gains_little,
    why_onednn_gains_nothing,
)
from megatron_glue.backends.norm import (
    LayerNormKernel,
    NormKernels,
    RMSNormKernel,
    layer_norm_torch,
    rms_norm_cpu,
    rms_norm_torch,
)
from megatron_glue.backends.permutation import TORCH_PERMUTATION, RowPermutation
from megatron_glue.backends.router import RouterKernel
from megatron_glue.backends.transformer_engine import (
    TransformerEngineAttention,
    TransformerEngineMatMul,
    layer_norm_te,
    rms_norm_te,
    why_not_te_attention,
    why_not_te_matmul,
    why_not_te_norm,
    why_not_te_optimizer,
)
from megatron_glue.backends.triton.availability import why_not_by_itself, why_not_triton
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import BackendConfig
from megatron_glue.ops.grouping import GroupingImplementation
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.matmul import TORCH_MATMUL, MatMul

Kernel = TypeVar("Kernel")


@dataclass(frozen=True)
class Needs:
    """What a kernel must be able to do in this run.

    Attributes:
        device: Where it runs.
        dtype: Compute dtype.
        head_dim: Width of an attention head.
        attention_dropout: Probability; 0 for none.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    attention_dropout: float = 0.0


def _nothing(_needs: Needs) -> str:
    return ""


@dataclass(frozen=True)
class Entry(Generic[Kernel]):
    """One backend of one role.

    Attributes:
        name: As in the configuration.
        load: Returns the kernel for these needs.
        why_not: Says why the backend cannot serve these needs, or returns an empty string.
        caveat: Says what it does less well here than elsewhere, or returns an empty string.
        why_not_auto: Says why ``auto`` passes it over although it could serve, or returns an empty string.
    """

    name: str
    load: Callable[[Needs, HostReader], Kernel]
    why_not: Callable[[Needs], str]
    caveat: Callable[[Needs], str] = _nothing
    why_not_auto: Callable[[Needs], str] = _nothing


@dataclass(frozen=True)
class Backends:
    """The kernels of one run.

    Attributes:
        attention: Packed attention.
        attention_layout: Layout of the metadata it takes, also its name.
        rms_norm: RMSNorm.
        layer_norm: LayerNorm.
        matmul: Products of linear layers and of the loss.
        grouped_mm: Product of grouped rows and expert weights.
        grouping: ``numpy``, ``torch`` or a function, for ``ops.grouping.group_tokens``.
        permutation: Rows into expert order and back.
        router: Choice and weights from logits; ``None`` for the router's own operators.
        optimizer: ``fused``, ``foreach``, ``apex`` or ``te``.
        choices: (role, name, reason) of each choice.
        context_layout: How attention meets the tokens of other context-parallel ranks, ``gather`` or ``ring``; empty if
            no sequence is split. ``attention_context.py`` sets it.
    """

    attention: AttentionKernel
    attention_layout: str
    rms_norm: RMSNormKernel
    layer_norm: LayerNormKernel
    matmul: MatMul
    grouped_mm: GroupedMM
    grouping: GroupingImplementation
    permutation: RowPermutation
    router: RouterKernel | None
    optimizer: str
    choices: tuple[tuple[str, str, str], ...]
    context_layout: str = ""

    def describe(self) -> str:
        """Say in one line what was chosen and why."""
        return ", ".join(f"{role} {name} ({reason})" for role, name, reason in self.choices)


def _why_not_varlen(needs: Needs) -> str:
    if needs.device.type != "cuda":
        return f"its kernel runs on CUDA, not on {needs.device.type}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel computes in bf16 or fp16, not in {needs.dtype}"
    if needs.attention_dropout > 0:
        return "it has no attention dropout"
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"its kernel takes heads of a multiple of 8 up to 256, not of {needs.head_dim}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"torch {torch.__version__} cannot import it: {error}"
    missing = {"scale", "window_size"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        return f"in torch {torch.__version__} it lacks {sorted(missing)}"
    if not torch.cuda.is_available():
        return "this machine or this build of torch has no CUDA device"
    major, minor = torch.cuda.get_device_capability(needs.device)
    return "" if major >= 8 else f"its kernel needs compute capability 8.0, this device has {major}.{minor}"


def _why_not_te_attention(needs: Needs) -> str:
    return why_not_te_attention(needs.device, needs.dtype, needs.head_dim, needs.attention_dropout)


def _why_not_flex(needs: Needs) -> str:
    if needs.device.type == "cpu":
        return "FlexAttention has no backward on a CPU"
    return "it has no attention dropout" if needs.attention_dropout > 0 else ""


def _why_not_norm_cpu(needs: Needs) -> str:
    if needs.device.type != "cpu":
        return f"it is for a CPU, not for {needs.device.type}"
    return "" if needs.dtype in (torch.float32, torch.float64) else f"it computes in fp32, not in {needs.dtype}"


def _load_grouped_mm_torch(needs: Needs, reader: HostReader) -> GroupedMM:
    return GroupedMMWithReads(reader) if reads_offsets(needs.device, needs.dtype) else grouped_mm_torch


def _caveat_of_grouped_mm_torch(needs: Needs) -> str:
    if not reads_offsets(needs.device, needs.dtype):
        return ""
    return "torch reads the offsets on the host except in bf16 on SM90 and SM100"


def _why_not_onednn(needs: Needs) -> str:
    return why_not_onednn(needs.device, needs.dtype)


def _why_not_on_host(needs: Needs) -> str:
    return "" if needs.device.type == "cpu" else "it would read device values"


def _why_not_fused(needs: Needs) -> str:
    return "" if needs.device.type in ("cpu", "cuda") else f"no fused AdamW on {needs.device.type}"


def _load_triton_grouping(_needs: Needs, _reader: HostReader) -> GroupingImplementation:
    from megatron_glue.backends.triton.grouping import group_pairs

    return group_pairs


def _load_triton_permutation(_needs: Needs, _reader: HostReader) -> RowPermutation:
    from megatron_glue.backends.triton.permute import permute_rows, unpermute_rows

    return RowPermutation(permute_rows, unpermute_rows)


def _load_triton_router(_needs: Needs, _reader: HostReader) -> RouterKernel:
    from megatron_glue.backends.triton.router import route

    return route


def _triton_entry(role: str, load: Callable[[Needs, HostReader], Kernel]) -> Entry[Kernel]:
    return Entry(
        "triton",
        load,
        lambda needs: why_not_triton(role, needs.device),
        why_not_auto=lambda needs: why_not_by_itself(needs.device),
    )


def _only_by_name(_needs: Needs) -> str:
    return "taken only by name"


# In the order in which ``auto`` tries them. It does not try te and apex: no measurement of this project says that they
# are faster, and even asking means importing them, which takes seconds.
_ATTENTION: tuple[Entry[AttentionKernel], ...] = (
    Entry("varlen", lambda *_: varlen_attention, _why_not_varlen),
    Entry("segments", lambda *_: segments_attention, _nothing),
    Entry("flex", lambda *_: flex_attention, _why_not_flex),
    Entry("dense", lambda *_: dense_attention, _nothing),
    Entry("te", lambda *_: TransformerEngineAttention(), _why_not_te_attention, why_not_auto=_only_by_name),
)
_NORM: tuple[Entry[NormKernels], ...] = (
    Entry("cpu", lambda *_: NormKernels(rms_norm_cpu, layer_norm_torch), _why_not_norm_cpu),
    Entry("torch", lambda *_: NormKernels(rms_norm_torch, layer_norm_torch), _nothing),
    Entry(
        "te",
        lambda *_: NormKernels(rms_norm_te, layer_norm_te),
        lambda needs: why_not_te_norm(needs.device, needs.dtype),
        why_not_auto=_only_by_name,
    ),
    Entry(
        "apex",
        lambda *_: NormKernels(rms_norm_apex, layer_norm_apex),
        lambda needs: why_not_apex_norm(needs.device, needs.dtype),
        why_not_auto=_only_by_name,
    ),
)
_MATMUL: tuple[Entry[MatMul], ...] = (
    Entry(
        "onednn",
        lambda *_: OnednnMatMul(transposes=is_onednn_much_faster()),
        _why_not_onednn,
        why_not_auto=lambda _: why_onednn_gains_nothing(),
    ),
    Entry("torch", lambda *_: TORCH_MATMUL, _nothing),
    Entry(
        "te",
        lambda *_: TransformerEngineMatMul(),
        lambda needs: why_not_te_matmul(needs.device, needs.dtype),
        why_not_auto=_only_by_name,
    ),
)
_GROUPED_MM: tuple[Entry[GroupedMM], ...] = (
    Entry(
        "onednn",
        lambda *_: GroupedMMOnCpu(OnednnMatMul()),
        _why_not_onednn,
        why_not_auto=lambda _: why_onednn_gains_little(),
    ),
    Entry("cores", lambda *_: GroupedMMOnCpu(TORCH_MATMUL), _why_not_on_host),
    Entry("torch", _load_grouped_mm_torch, _nothing, _caveat_of_grouped_mm_torch),
    Entry("loop", lambda _, reader: GroupedMMLoop(reader), _nothing),
)
_GROUPING: tuple[Entry[GroupingImplementation], ...] = (
    Entry("numpy", lambda *_: "numpy", _why_not_on_host),
    _triton_entry("grouping", _load_triton_grouping),
    Entry("torch", lambda *_: "torch", _nothing),
)
_PERMUTATION: tuple[Entry[RowPermutation], ...] = (
    _triton_entry("permutation", _load_triton_permutation),
    Entry("torch", lambda *_: TORCH_PERMUTATION, _nothing),
)
_ROUTER: tuple[Entry[RouterKernel | None], ...] = (
    _triton_entry("router", _load_triton_router),
    Entry("torch", lambda *_: None, _nothing),
)
_OPTIMIZER: tuple[Entry[str], ...] = (
    Entry("fused", lambda *_: "fused", _why_not_fused),
    Entry("foreach", lambda *_: "foreach", _nothing),
    Entry("te", lambda *_: "te", lambda needs: why_not_te_optimizer(needs.device), why_not_auto=_only_by_name),
    Entry("apex", lambda *_: "apex", lambda needs: why_not_apex_optimizer(needs.device), why_not_auto=_only_by_name),
)


def _with_products(kernel: AttentionKernel, matmul_name: str) -> AttentionKernel:
    """Let oneDNN take the long segments too, where it is the choice for all other products and much faster."""
    if kernel is segments_attention and matmul_name == "onednn" and is_onednn_much_faster():
        return SegmentsAttention(LongSegmentAttention(OnednnMatMul(), shared_pool()))
    return kernel


def _choose(field: str, wanted: str, entries: tuple[Entry[Kernel], ...], needs: Needs) -> tuple[Entry[Kernel], str]:
    """Return the entry and the reason for it.

    Raises:
        ConfigError: If the named backend cannot be had.
    """
    rejected = []
    for entry in entries:
        if wanted not in ("auto", entry.name):
            continue
        obstacle = (wanted == "auto" and entry.why_not_auto(needs)) or entry.why_not(needs)
        if not obstacle:
            why = "; ".join(rejected) or ("configured" if wanted != "auto" else "first choice")
            return entry, "; ".join(filter(None, (why, entry.caveat(needs))))
        rejected.append(f"not {entry.name}: {obstacle}")
    usable = [entry.name for entry in entries if not entry.why_not(needs)]
    reason = "; ".join(rejected) or "no such backend"
    raise ConfigError(flag_of(field), wanted, reason, f"use auto or one of {usable}")


def resolve(
    config: BackendConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    head_dim: int,
    attention_dropout: float = 0.0,
    host_reader: HostReader | None = None,
) -> Backends:
    """Choose a kernel for every role, once at start.

    Args:
        config: What the user named.
        device: Where the model computes.
        dtype: Compute dtype.
        head_dim: Width of the model's attention heads; not every attention kernel takes every width.
        attention_dropout: The model's; not every attention kernel has it.
        host_reader: Counts reads of device values by kernels; ``None`` makes a new one.

    Returns:
        The kernels.

    Raises:
        ConfigError: If a named backend is unknown here or cannot do what is needed, with the reason.
    """
    needs = Needs(torch.device(device), dtype, head_dim, attention_dropout)
    reader = host_reader or HostReader()
    attention, attention_reason = _choose("attention_backend", config.attention_backend, _ATTENTION, needs)
    norm, norm_reason = _choose("norm_backend", config.norm_backend, _NORM, needs)
    matmul, matmul_reason = _choose("matmul_backend", config.matmul_backend, _MATMUL, needs)
    grouped_mm, grouped_mm_reason = _choose("grouped_mm_backend", config.grouped_mm_backend, _GROUPED_MM, needs)
    grouping, grouping_reason = _choose("grouping_backend", config.grouping_backend, _GROUPING, needs)
    permutation, permutation_reason = _choose("permutation_backend", config.permutation_backend, _PERMUTATION, needs)
    router, router_reason = _choose("router_backend", config.router_backend, _ROUTER, needs)
    optimizer, optimizer_reason = _choose("optimizer_backend", config.optimizer_backend, _OPTIMIZER, needs)
    norms = norm.load(needs, reader)
    return Backends(
        attention=_with_products(attention.load(needs, reader), matmul.name),
        attention_layout=attention.name,
        rms_norm=norms.rms_norm,
        layer_norm=norms.layer_norm,
        matmul=matmul.load(needs, reader),
        grouped_mm=grouped_mm.load(needs, reader),
        grouping=grouping.load(needs, reader),
        permutation=permutation.load(needs, reader),
        router=router.load(needs, reader),
        optimizer=optimizer.load(needs, reader),
        choices=(
            ("attention", attention.name, attention_reason),
            ("norm", norm.name, norm_reason),
            ("matmul", matmul.name, matmul_reason),
            ("grouped_mm", grouped_mm.name, grouped_mm_reason),
            ("grouping", grouping.name, grouping_reason),
            ("permutation", permutation.name, permutation_reason),
            ("router", router.name, router_reason),
            ("optimizer", optimizer.name, optimizer_reason),
        ),
    )
