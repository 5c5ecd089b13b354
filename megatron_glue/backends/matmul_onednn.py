"""Products by oneDNN, for fp32 on a CPU.

torch sends fp32 products on x86 to MKL, which on processors of other makers than Intel keeps to AVX2. oneDNN comes with
torch and uses AVX-512 on all of them, which is up to twice as fast where vector units are that wide (docs/peers.md).
Sums are in another order than MKL's, so results differ by rounding, and are the same in every run.

The operator is the one that torch's compiler emits for linear layers. It takes a second operand that is contiguous or
the transpose of one that is, and copies a first one that is not contiguous.

Shape suffixes: M rows, N columns, K what is summed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_glue.backends.processor import processor_facts
from megatron_glue.ops.matmul import TORCH_MATMUL

_FIRST_WIDE_FAMILY_OF_AMD = 26


class OnednnMatMul:
    """oneDNN's products. See :class:`megatron_glue.ops.matmul.MatMul`.

    Args:
        transposes: Whether it also computes ``a^T @ b``, for which it has to copy an operand; torch does otherwise.
    """

    def __init__(self, *, transposes: bool = True) -> None:
        self._transposes = transposes
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise

    def nt(self, a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if not _can_multiply(a_MK, b_NK):
            return TORCH_MATMUL.nt(a_MK, b_NK, bias_N)
        # A second operand with gaps between its rows would go to oneDNN's reference code, a thousand times slower.
        if not (b_NK.is_contiguous() or b_NK.t().is_contiguous()):
            b_NK = b_NK.contiguous()
        return self._linear(a_MK, b_NK, bias_N, "none", [], "")

    def nn(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        return self.nt(a_MK, b_KN.t())

    def tn(self, a_KM: Tensor, b_KN: Tensor) -> Tensor:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if not self._transposes:
            return TORCH_MATMUL.tn(a_KM, b_KN)
        if a_KM.shape[1] <= b_KN.shape[1]:
            return self.nt(a_KM.t(), b_KN.t())
        # The first operand is copied, so it should be the smaller one.
        return self.nt(b_KN.t(), a_KM.t()).t().contiguous()

    def add_tn_(self, sum_MN: Tensor, a_KM: Tensor, b_KN: Tensor) -> None:
        """See :class:`megatron_glue.ops.matmul.MatMul`."""
        if sum_MN.dtype != torch.float32 or not _can_multiply(a_KM, b_KN):
            TORCH_MATMUL.add_tn_(sum_MN, a_KM, b_KN)
        else:
            sum_MN += self.nt(a_KM.t(), b_KN.t())


def _can_multiply(a: Tensor, b: Tensor) -> bool:
    """Whether the operator takes these; a product in fp64 or with nothing in it goes to torch."""
    return a.dtype == b.dtype == torch.float32 and a.numel() > 0 and b.numel() > 0


def why_not_onednn(device: torch.device, dtype: torch.dtype) -> str:
    """Say why oneDNN cannot serve, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
    """
    if device.type != "cpu":
        return f"it is for a CPU, not for {device.type}"
    if dtype != torch.float32:
        return f"it computes in fp32, not in {dtype}"
    if not torch.backends.mkldnn.is_available():
        return f"torch {torch.__version__} was built without it"
    operators: Any = torch.ops.mkldnn
    if not hasattr(operators, "_linear_pointwise"):
        return f"torch {torch.__version__} lacks its operator"
    return ""


def is_onednn_much_faster() -> bool:
    """Whether this processor computes more per cycle with AVX-512 than with AVX2, and MKL does not know it.

    MKL keeps to AVX2 on processors of other makers than Intel. Vector units of AMD's are 512 bits wide from family 26
    (Zen 5) on; before, oneDNN gains some percent on products without a transposed operand, and nothing on others.
    """
    vendor, family = _processor()
    return vendor != "GenuineIntel" and not (vendor == "AuthenticAMD" and family < _FIRST_WIDE_FAMILY_OF_AMD)


def why_onednn_gains_nothing() -> str:
    """Say why no product gains by oneDNN on this processor, or return an empty string."""
    return "MKL is as fast on Intel's processors" if _processor()[0] == "GenuineIntel" else ""


def why_onednn_gains_little() -> str:
    """Say why small products gain too little by it to pay for rounded sizes, or return an empty string."""
    return "" if is_onednn_much_faster() else "MKL is as fast for small products on this processor"


def _processor() -> tuple[str, int]:
    """Maker and family, as Linux has them; empty and 0 where the system does not say."""
    facts = processor_facts()
    family = facts.get("cpu family", "")
    return facts.get("vendor_id", ""), int(family) if family.isdigit() else 0
