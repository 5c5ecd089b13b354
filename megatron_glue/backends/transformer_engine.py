"""NVIDIA Transformer Engine as a backend: attention over packed documents, norms, matrix products, fused AdamW.

Written against Transformer Engine 2.10 to 2.19; before 2.10 ``general_gemm`` took its workspace from the caller. This
file is the only one that imports the library, and only inside functions. Nothing here uses its FP8 recipes, its modules
with weights, or its communication: layers keep their own weights and splits, the library computes.

``auto`` never takes it. torch's own kernels need no further installation and are the ones this project is measured
with; the library's import takes seconds and sets process-wide state.

Shape suffixes: T tokens, V valid tokens, H query heads, G kv heads, C head dim, D normalised width, R rows, M rows, N
columns, K what is summed over.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_glue.backends.attention import AttentionDropout, attend_to_nothing, cut_padding, restore_padding
from megatron_glue.backends.attention_metadata import VarlenMetadata
from megatron_glue.backends.norm import layer_norm_torch, rms_norm_torch
from megatron_glue.ops.matmul import TORCH_MATMUL

OLDEST_VERSION = (2, 10)
INSTALL_COMMAND = "pip install --no-build-isolation 'transformer-engine[pytorch]'"

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF_DTYPES, torch.float32)


def why_not_te_attention(device: torch.device, dtype: torch.dtype, head_dim: int, attention_dropout: float) -> str:
    """Say why the library's attention cannot serve, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
        head_dim: Width of an attention head.
        attention_dropout: Probability; 0 for none.
    """
    if device.type == "cuda" and dtype not in _HALF_DTYPES:
        return f"its kernels compute in bf16 or fp16, not in {dtype}"
    if device.type == "cuda" and attention_dropout > 0:
        return "its attention dropout does not depend on positions alone, so layouts and recompute would differ"
    if device.type == "cuda" and (head_dim % 8 or head_dim > 256):
        return f"its kernels take heads of a multiple of 8 up to 256, not of {head_dim}"
    return _why_not_te(device)


def why_not_te_norm(device: torch.device, dtype: torch.dtype) -> str:
    """Say why the library's norms cannot serve, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
    """
    if device.type == "cuda" and dtype not in _DTYPES:
        return f"its kernels compute in bf16, fp16 or fp32, not in {dtype}"
    return _why_not_te(device)


def why_not_te_matmul(device: torch.device, dtype: torch.dtype) -> str:
    """Say why the library's products cannot serve, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
    """
    if device.type == "cuda" and dtype not in _HALF_DTYPES:
        return f"it multiplies fp32 in TF32; it serves bf16 and fp16, not {dtype}"
    return _why_not_te(device)


def why_not_te_optimizer(device: torch.device) -> str:
    """Say why the library's fused AdamW cannot serve, or return an empty string.

    Args:
        device: Where the parameters live.
    """
    return _why_not_te(device)


def _why_not_te(device: torch.device) -> str:
    if device.type != "cuda":
        return f"its kernels run on CUDA, not on {device.type}"
    return why_not_importable()


@cache
def why_not_importable() -> str:
    """Say why the library cannot be used, or return an empty string. Imports it, once per process."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed ({INSTALL_COMMAND}, needs the CUDA toolkit)"
    try:
        version = importlib.import_module("transformer_engine").__version__
        importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine_torch")
    except Exception as error:  # Without a fitting wheel it raises what its loader meets: missing files, other CUDA.
        lines = str(error).strip().splitlines() or [""]
        return f"Transformer Engine cannot be imported: {type(error).__name__}: {lines[0]}"
    if _release(version) < OLDEST_VERSION:
        return f"Transformer Engine {version} is too old: it must be {'.'.join(map(str, OLDEST_VERSION))} or newer"
    return ""


def _release(version: str) -> tuple[int, int]:
    """Return major and minor of ``2.11.0+abc``."""
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in f"{version}.0".split(".")[:2])
    return major, minor


class TransformerEngineAttention:
    """``DotProductAttention`` in its packed layout ``thd``: boundaries as cumulative lengths, no mask.

    The library chooses among flash-attention, cuDNN and its own kernels; ``NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1`` shows
    which, ``NVTE_FLASH_ATTN``, ``NVTE_FUSED_ATTN`` and ``NVTE_UNFUSED_ATTN`` rule some out. Gradients of its faster
    kernels are not the same bits in every run; ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` makes it choose those whose are.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[int, int, int, int, float], Any] = {}

    def __call__(
        self,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        metadata: VarlenMetadata,
        *,
        window: int,
        scale: float,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend inside each segment. See :class:`~megatron_glue.backends.attention.AttentionKernel`."""
        assert dropout is None, "the registry does not choose this kernel for a model with attention dropout"
        q_VHC, k_VGC, v_VGC = (cut_padding(x, metadata.num_valid_tokens) for x in (q_THC, k_TGC, v_TGC))
        if metadata.num_valid_tokens == 0:
            return restore_padding(attend_to_nothing(q_VHC, k_VGC, v_VGC), metadata.num_tokens)
        attend = self._module(q_VHC, k_VGC, window, scale)
        # The longest length is given: the library would read it from the device. Nothing stands between documents.
        out = attend(
            q_VHC.contiguous(),
            k_VGC.contiguous(),
            v_VGC.contiguous(),
            cu_seqlens_q=metadata.cu_seqlens,
            cu_seqlens_kv=metadata.cu_seqlens,
            max_seqlen_q=metadata.max_seqlen,
            max_seqlen_kv=metadata.max_seqlen,
            pad_between_seqs=False,
        )
        return restore_padding(out.view(q_VHC.shape), metadata.num_tokens)

    def _module(self, q_VHC: Tensor, k_VGC: Tensor, window: int, scale: float) -> Any:
        """Return the library's module for these sizes; it has no weights, so all layers of a kind share it."""
        num_heads, head_dim = q_VHC.shape[1:]
        key = (num_heads, k_VGC.shape[1], head_dim, window, scale)
        if key not in self._modules:
            self._modules[key] = _pytorch().DotProductAttention(
                num_heads,
                head_dim,
                num_gqa_groups=k_VGC.shape[1],
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                # The library counts the tokens to the left of the query, ours includes the query.
                window_size=(window - 1 if window else -1, 0),
                softmax_scale=scale,
            )
        return self._modules[key]


def rms_norm_te(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """The library's RMSNorm. See :class:`~megatron_glue.backends.norm.RMSNormKernel`."""
    if x.numel() == 0:
        return rms_norm_torch(x, weight_D, epsilon)
    return _RMSNorm.apply(x, weight_D, epsilon)


def layer_norm_te(x: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
    """The library's LayerNorm. See :class:`~megatron_glue.backends.norm.LayerNormKernel`."""
    if x.numel() == 0:
        return layer_norm_torch(x, weight_D, bias_D, epsilon)
    return _LayerNorm.apply(x, weight_D, bias_D, epsilon)


class _RMSNorm(torch.autograd.Function):
    """The functions below the library's module ``RMSNorm``, called as it calls them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        rows_RD, weight_D = x.contiguous().view(-1, x.shape[-1]), weight_D.contiguous()
        out_RD, _, rstd_R = _extension().rmsnorm_fwd(
            rows_RD, weight_D, epsilon, None, None, _library_dtype(x.dtype), 0, False
        )
        ctx.save_for_backward(rows_RD, weight_D, rstd_R)
        return out_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, weight_D, rstd_R = ctx.saved_tensors
        grad_RD = grad_outputs[0].contiguous().view(rows_RD.shape)
        grad_rows_RD, grad_weight_D = _extension().rmsnorm_bwd(grad_RD, rows_RD, rstd_R, weight_D, 0, False)
        return grad_rows_RD.view(grad_outputs[0].shape), grad_weight_D, None


class _LayerNorm(torch.autograd.Function):
    """The functions below the library's module ``LayerNorm``, called as it calls them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
        rows_RD, weight_D = x.contiguous().view(-1, x.shape[-1]), weight_D.contiguous()
        out_RD, mean_R, rstd_R = _extension().layernorm_fwd(
            rows_RD, weight_D, bias_D.contiguous(), epsilon, None, None, _library_dtype(x.dtype), 0, False
        )
        ctx.save_for_backward(rows_RD, weight_D, mean_R, rstd_R)
        return out_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows_RD, weight_D, mean_R, rstd_R = ctx.saved_tensors
        grad_RD = grad_outputs[0].contiguous().view(rows_RD.shape)
        grad_rows_RD, grad_weight_D, grad_bias_D = _extension().layernorm_bwd(
            grad_RD, rows_RD, mean_R, rstd_R, weight_D, 0, False
        )
        return grad_rows_RD.view(grad_outputs[0].shape), grad_weight_D, grad_bias_D, None


class TransformerEngineMatMul:
    """``general_gemm``, the product below the library's linear layers. See :class:`megatron_glue.ops.matmul.MatMul`.

    It reads memory as BLAS does, column by column, so operands change places, and it takes no strides. What it adds to
    torch's products is a sum in fp32 of bf16 operands without a temporary (:meth:`add_tn_`).
    """

    def nt(self, a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if not _can_multiply(a_MK, b_NK):
            return TORCH_MATMUL.nt(a_MK, b_NK, bias_N)
        return _gemm(b_NK, a_MK, layout="TN", out_dtype=a_MK.dtype, bias=bias_N)

    def nn(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if not _can_multiply(a_MK, b_KN):
            return TORCH_MATMUL.nn(a_MK, b_KN)
        return _gemm(b_KN, a_MK, layout="NN", out_dtype=a_MK.dtype)

    def tn(self, a_KM: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if not _can_multiply(a_KM, b_KN):
            return TORCH_MATMUL.tn(a_KM, b_KN)
        return _gemm(b_KN, a_KM, layout="NT", out_dtype=a_KM.dtype)

    def add_tn_(self, sum_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        can_add = sum_MN.is_contiguous() and sum_MN.dtype in (torch.float32, a_KM.dtype)
        if not (can_add and _can_multiply(a_KM, b_KN)):
            TORCH_MATMUL.add_tn_(sum_MN, a_KM, b_KN)
        else:
            _gemm(b_KN, a_KM, layout="NT", out_dtype=sum_MN.dtype, out=sum_MN, accumulate=True)


def _can_multiply(a: Tensor, b: Tensor) -> bool:
    """Whether the library takes these; fp32, which it would round to TF32, and empty products go to torch."""
    return a.dtype == b.dtype and a.dtype in _HALF_DTYPES and a.numel() > 0 and b.numel() > 0


def _gemm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return _general_gemm()(a.contiguous(), b.contiguous(), **options)[0]


def fused_adam_te() -> Callable[..., torch.optim.Optimizer]:
    """Return the library's class ``FusedAdam``, for :class:`~megatron_glue.backends.fused_adam.LibraryAdamW`."""
    return _pytorch().optimizers.FusedAdam


@cache
def _pytorch() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


@cache
def _extension() -> Any:
    """The compiled functions; the library has to be imported first, it loads them."""
    _pytorch()
    return importlib.import_module("transformer_engine_torch")


@cache
def _general_gemm() -> Callable[..., tuple[Tensor, ...]]:
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm


def _library_dtype(dtype: torch.dtype) -> Any:
    return _dtypes()[dtype]


@cache
def _dtypes() -> dict[torch.dtype, Any]:
    return importlib.import_module("transformer_engine.pytorch.constants").TE_DType
