"""The experts of one rank: small feed-forward networks whose weights are stacked.

Two ways to compute the same values:

- ``forward``: rows come ordered by expert; each of the two projections is ONE grouped product over all experts.
- ``forward_by_mask``: what common stacks do: for each expert, find its pairs by a mask, gather their rows, run one
  small network, add the weighted result back. ``forward_by_slice`` is its form for rows that other ranks sent. They
  are the baseline of the benchmarks and an oracle of the tests, and do no work beyond what that method needs.

Gate and up weights are one tensor with an own dim for the two parts, so both are one product and a split of the ffn
width cuts both alike. Experts have no biases.

It routes nothing and knows no other rank. Stands between dispatch and combine.

Shape suffixes: T tokens, D model, F ffn, K top-k, R received rows, e local experts, G fused gate/up width (2F for
SwiGLU, F for GELU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_glue.backends.grouped_mm import FusedExperts, GroupedMM
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.ops.swiglu import swiglu
from megatron_glue.parallel.precision import local

ComputeExperts = Callable[[Tensor, Tensor], Tensor]
"""(rows [R, D] in the order of some experts, int64 rows of each of them) -> [R, D] in the same order. Rows past the
last one of these belong to nobody; their results are never read."""


Rebuilt = Callable[[Callable[[Tensor], Tensor], Tensor], AbstractContextManager[Tensor]]
"""(function, x) -> context that gives ``function(x)``, which backward may compute again from x."""


class GroupedExperts(nn.Module):
    """Stacked SwiGLU or GELU experts.

    Args:
        num_local_experts: e.
        hidden_size: D.
        ffn_size: F.
        gated: SwiGLU (two parts in the first projection) or GELU (one).
        grouped_mm: Product of rows in expert order with each expert's weight.
    """

    def __init__(
        self, num_local_experts: int, hidden_size: int, ffn_size: int, *, gated: bool, grouped_mm: GroupedMM
    ) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.gated = gated
        self._grouped_mm = grouped_mm
        num_parts = 2 if gated else 1
        self.gate_up_weight = nn.Parameter(torch.empty(num_local_experts, num_parts, ffn_size, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(num_local_experts, hidden_size, ffn_size))

    def forward(self, x_RD: Tensor, counts_e: Tensor) -> Tensor:
        """Compute all experts at once.

        Args:
            x_RD: Rows in expert order.
            counts_e: int64 rows of each expert, with sum R.

        Returns:
            [R, D] in the same order. An expert without rows gets zero gradients. Nothing is read on the host here;
            whether ``grouped_mm`` does depends on the device (``backends/grouped_mm.py``).
        """
        return self.compute(x_RD, counts_e, *self._weights(x_RD.dtype))

    def split(self, sizes: Sequence[int], dtype: torch.dtype, rebuilt: Rebuilt | None = None) -> list[ComputeExperts]:
        """Cut the experts into groups that are computed one after the other.

        Args:
            sizes: Experts of each group, with sum e.
            dtype: Of the rows.
            rebuilt: How results of the nonlinearity are kept for backward; ``None``: as is fastest.

        Returns:
            For each group what :meth:`forward` is for all experts. Weights are read, and their gradients put together,
            once for all groups.
        """
        if len(sizes) == 1:
            weights = [self._weights(dtype)]
        else:
            weights = zip(*(weight.split(list(sizes)) for weight in self._weights(dtype)), strict=True)
        return [partial(self.compute, gate_up_eGD=gate_up, down_eDF=down, rebuilt=rebuilt) for gate_up, down in weights]

    def split_by_slice(self, sizes: Sequence[int], dtype: torch.dtype, host_reader: HostReader) -> list[ComputeExperts]:
        """Cut the experts into groups that :meth:`forward_by_slice` computes.

        Args:
            sizes: Experts of each group, with sum e.
            dtype: Of the rows.
            host_reader: Counts one read per group.

        Returns:
            As :meth:`split`.
        """
        weights = iter(self._weights_of_each_expert(dtype))
        of_groups = [list(islice(weights, size)) for size in sizes]
        return [partial(self.compute_slices, weights=of_group, host_reader=host_reader) for of_group in of_groups]

    def forward_by_mask(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, host_reader: HostReader
    ) -> Tensor:
        """Compute expert after expert on the tokens that a mask finds (all experts on this rank).

        Args:
            x_TD: Tokens.
            expert_ids_TK: int64 chosen experts.
            weights_TK: Their weights.
            host_reader: Counts one read per expert: the size of what the mask finds.

        Returns:
            [T, D].
        """
        out_TD = torch.zeros_like(x_TD)
        weights_TK = weights_TK.to(x_TD.dtype)
        for expert, weights in enumerate(self._weights_of_each_expert(x_TD.dtype)):
            token_r, choice_r = host_reader.where(expert_ids_TK == expert)
            y_rD = self._one_expert(x_TD[token_r], *weights)
            out_TD.index_add_(0, token_r, y_rD * weights_TK[token_r, choice_r, None])
        return out_TD

    def forward_by_slice(self, x_RD: Tensor, counts_e: Tensor, host_reader: HostReader) -> Tensor:
        """Compute expert after expert on slices of rows in expert order.

        Args:
            x_RD: Rows in expert order.
            counts_e: int64 rows of each expert; rows past their sum are nobody's.
            host_reader: Counts one read, of the counts.

        Returns:
            [R, D] in the same order; zeros for rows that are nobody's.
        """
        (compute,) = self.split_by_slice([self.num_local_experts], x_RD.dtype, host_reader)
        return compute(x_RD, counts_e)

    def compute(
        self, x_RD: Tensor, counts_e: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, rebuilt: Rebuilt | None = None
    ) -> Tensor:
        """Compute some experts at once, of which the weights are given; see :meth:`forward` and :meth:`split`."""
        offsets_e = counts_e.cumsum(0)
        if rebuilt is None and isinstance(self._grouped_mm, FusedExperts):
            activation = "swiglu" if self.gated else "gelu"
            return self._grouped_mm.feed_forward(x_RD, gate_up_eGD, down_eDF, offsets_e, activation)
        gate_up_RG = self._grouped_mm(x_RD, gate_up_eGD.transpose(1, 2), offsets_e)
        if rebuilt is None:
            return self._grouped_mm(self._activate(gate_up_RG), down_eDF.transpose(1, 2), offsets_e)
        with rebuilt(self._activate, gate_up_RG) as hidden_RF:
            return self._grouped_mm(hidden_RF, down_eDF.transpose(1, 2), offsets_e)

    def compute_slices(
        self, x_RD: Tensor, counts_e: Tensor, weights: list[tuple[Tensor, Tensor]], host_reader: HostReader
    ) -> Tensor:
        """Compute some experts one by one; see :meth:`forward_by_slice`."""
        counts = host_reader.read(counts_e)
        num_left = x_RD.shape[0] - sum(counts)
        *slices, _ = x_RD.split([*counts, num_left])
        results = [self._one_expert(x_rD, *weight) for x_rD, weight in zip(slices, weights, strict=True)]
        return torch.cat([*results, x_RD.new_zeros(num_left, x_RD.shape[1])] if num_left else results)

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return local(self.gate_up_weight, dtype).flatten(1, 2), local(self.down_weight, dtype)

    def _weights_of_each_expert(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Views per expert. ``unbind`` joins their gradients in one pass; an index per expert would make E passes."""
        gate_up_eGD, down_eDF = self._weights(dtype)
        return list(zip(gate_up_eGD.unbind(0), down_eDF.unbind(0), strict=True))

    def _one_expert(self, x_rD: Tensor, gate_up_GD: Tensor, down_DF: Tensor) -> Tensor:
        return F.linear(self._activate(F.linear(x_rD, gate_up_GD)), down_DF)

    def _activate(self, gate_up_RG: Tensor) -> Tensor:
        return swiglu(gate_up_RG) if self.gated else F.gelu(gate_up_RG, approximate="tanh")
