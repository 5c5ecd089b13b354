"""Products of rows, sorted by expert, with each expert's own weight.

``grouped_mm_torch`` is one call of ``torch.nn.functional.grouped_mm``. In bf16 on SM90 and SM100 that is one kernel,
forward and for each gradient, and the host waits for nothing. On other GPUs and in other dtypes torch copies the
offsets to the host and loops over experts; ``GroupedMMWithReads`` is the same product and counts these reads. On a CPU
torch reads them too, but there is no device to wait for, and nothing is counted. ``GroupedMMLoop`` multiplies expert by
expert; it must read the offsets to slice, which is what common stacks do, and is the oracle of the parity test.

Called by the experts of an MoE layer. Neither routes nor sorts.

Shape suffixes: R received rows, D input width, F output width, e local experts, G fused gate/up width.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.ops.host_reader import HostReader


class GroupedMM(Protocol):
    """The role ``grouped_mm``."""

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """Multiply each expert's rows with its weight.

        Args:
            x_RD: Rows ordered by expert. Rows past the last offset belong to nobody and are never read.
            weight_eDF: One weight per expert, in the dtype of ``x_RD``.
            offsets_e: Integer end row of each expert, on the device of ``x_RD``.
            zero_tail: Write zeros past the last offset, in the result and in the gradient of ``x_RD``. Without it those
                rows are uninitialised memory in both, and the caller must not read them.

        Returns:
            [R, F].
        """
        ...


Activation = Literal["swiglu", "gelu"]
"""Between the two products of an expert: silu(gate) * up, or GELU by its tanh approximation."""


@runtime_checkable
class FusedExperts(Protocol):
    """A :class:`GroupedMM` that can compute both products of the experts and what is between them as one function."""

    def feed_forward(
        self, x_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, offsets_e: Tensor, activation: Activation
    ) -> Tensor:
        """Compute all experts.

        Args:
            x_RD: Rows ordered by expert. Rows past the last offset belong to nobody and are never read.
            gate_up_eGD: First weight of each expert, in the dtype of ``x_RD``; gates are the first half of its rows.
            down_eDF: Second weight.
            offsets_e: Integer end row of each expert, on the device of ``x_RD``.
            activation: Between the two products.

        Returns:
            [R, D].
        """
        ...


class _ZeroTail(torch.autograd.Function):
    """Zero rows past the last offset, of the value and of its gradient, without reading the offset on the host."""

    @staticmethod
    def forward(ctx: Any, rows_RX: Tensor, offsets_e: Tensor) -> Tensor:
        tail_R1 = (torch.arange(rows_RX.shape[0], device=rows_RX.device) >= offsets_e[-1])[:, None]
        ctx.save_for_backward(tail_R1)
        return rows_RX.masked_fill(tail_R1, 0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (tail_R1,) = ctx.saved_tensors
        return grad_outputs[0].masked_fill(tail_R1, 0.0), None


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is dense: the backward of ``grouped_mm`` rejects an expanded one (``y.sum()``)."""

    @staticmethod
    def forward(ctx: Any, y_RF: Tensor) -> Tensor:
        return y_RF.view_as(y_RF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0].contiguous()


def reads_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the host waits for the offsets in :func:`grouped_mm_torch`.

    Args:
        device: Where the rows are.
        dtype: Of rows and weights.

    Returns:
        False on a CPU and where torch has a kernel that takes the offsets on the device: for bf16 on
        NVIDIA's compute capabilities 9 and 10.
    """
    if device.type == "cpu":
        return False
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] not in (9, 10)


def grouped_mm_torch(x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
    """Multiply all experts in one call. See :class:`GroupedMM`, and :func:`reads_offsets` for when the host waits."""
    in_width, out_width = weight_eDF.shape[1:]
    if x_RD.shape[0] == 0:
        # The kernel's backward rejects empty operands. One row past the last offset is never read, and the rank without
        # tokens keeps its autograd edge and gets zero weight gradients.
        return grouped_mm_torch(F.pad(x_RD, (0, 0, 0, 1)), weight_eDF, offsets_e)[:0]
    rows_RD = _ZeroTail.apply(x_RD, offsets_e) if zero_tail else x_RD
    # The kernel wants rows that start at multiples of 16 bytes; other widths get zero columns for the product.
    num_elements = 16 // x_RD.element_size()
    in_pad, out_pad = -in_width % num_elements, -out_width % num_elements
    if in_pad or out_pad:
        rows_RD = F.pad(rows_RD, (0, in_pad))
        weight_eDF = F.pad(weight_eDF, (0, out_pad, 0, in_pad))
    y_RF = F.grouped_mm(rows_RD.contiguous(), weight_eDF, offs=offsets_e.to(torch.int32))
    y_RF = _ContiguousGradient.apply(y_RF)
    if out_pad:
        y_RF = y_RF[:, :out_width]
    return _ZeroTail.apply(y_RF, offsets_e) if zero_tail else y_RF


class _CountReads(torch.autograd.Function):
    """Identity whose backward counts the reads of the backward before it."""

    @staticmethod
    def forward(ctx: Any, y_RF: Tensor, host_reader: HostReader, num_reads: int) -> Tensor:
        ctx.host_reader, ctx.num_reads = host_reader, num_reads
        return y_RF.view_as(y_RF)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        ctx.host_reader.count_reads_of_library(ctx.num_reads)
        return grad_outputs[0], None, None


class GroupedMMWithReads:
    """:func:`grouped_mm_torch` where torch has no kernel of its own for it. See :class:`GroupedMM`.

    Args:
        host_reader: Counts the reads of the offsets that torch makes: one for the product, one for each gradient.
    """

    def __init__(self, host_reader: HostReader) -> None:
        self._host_reader = host_reader

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """See :class:`GroupedMM`."""
        self._host_reader.count_reads_of_library(1)
        y_RF = grouped_mm_torch(x_RD, weight_eDF, offsets_e, zero_tail=zero_tail)
        return _CountReads.apply(y_RF, self._host_reader, x_RD.requires_grad + weight_eDF.requires_grad)


class GroupedMMLoop:
    """Multiply expert by expert. See :class:`GroupedMM`.

    Args:
        host_reader: Counts the one read of the offsets that each call makes.
    """

    def __init__(self, host_reader: HostReader) -> None:
        self._host_reader = host_reader

    def __call__(self, x_RD: Tensor, weight_eDF: Tensor, offsets_e: Tensor, *, zero_tail: bool = False) -> Tensor:
        """See :class:`GroupedMM`; the tail is zeros whether or not it is asked for."""
        ends = self._host_reader.read(offsets_e)
        starts = [0, *ends[:-1]]
        parts = [x_RD[start:end] @ weight_eDF[e] for e, (start, end) in enumerate(zip(starts, ends, strict=True))]
        parts.append(x_RD.new_zeros(x_RD.shape[0] - ends[-1], weight_eDF.shape[2]))
        return torch.cat(parts)
