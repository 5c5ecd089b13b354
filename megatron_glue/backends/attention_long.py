"""Causal attention of one long segment on a CPU, block of queries by block, over the products of a :class:`MatMul`.

A block of queries meets all keys up to its own last one, so what lies above the diagonal is computed inside the
diagonal blocks only. Backward computes the scores again from the log of their sums (Dao et al. 2022, "FlashAttention").
Heads are independent: each core takes some of them whole.

torch's own flash kernel does the same over MKL's products; this one is for machines on which other products are faster
(``matmul_onednn.py``). Called by ``attention_segments.py``. No windows, no dropout.

Shape suffixes: L tokens of the segment, H query heads, G kv heads, C head dim, B queries of a block, K keys up to its
last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_glue.backends.core_pool import CorePool
from megatron_glue.ops.matmul import MatMul
from megatron_glue.ops.softmax import softmax_and_log_sum

_BLOCK = 256


@dataclass(frozen=True, eq=False)
class LongSegmentAttention:
    """Attention of segments that are long enough to be worth it.

    Attributes:
        matmul: Computes the products.
        pool: Shares heads out among cores.
        min_tokens: Shortest segment for which it is faster than the flash kernel.
    """

    matmul: MatMul
    pool: CorePool
    min_tokens: int = 384

    def takes(self, q_nHLC: Tensor) -> bool:
        """Whether these are the queries of one segment, and that one is long enough."""
        return q_nHLC.shape[0] == 1 and q_nHLC.shape[2] >= self.min_tokens

    def forward(self, q_LHC: Tensor, k_LGC: Tensor, v_LGC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q_LHC: Queries, fp32.
            k_LGC: Keys; query head h reads kv head h // (H / G).
            v_LGC: Values.
            scale: Factor on the scores.

        Returns:
            out_LHC: The output.
            lse_HL1: Log of the sum of the exponentials of each query's scores, with entries for padding behind.
        """
        length, num_heads = q_LHC.shape[:2]
        padded = padded_length(length)
        out_LHC, lse_HL1 = torch.empty_like(q_LHC), q_LHC.new_empty(num_heads, padded, 1)
        above_BB = _above_diagonal(q_LHC)
        heads_per_group = num_heads // k_LGC.shape[1]

        def attend(head: int) -> None:
            q_LC = _rows_of(q_LHC, head, padded).mul_(scale)
            k_LC, v_LC = (_rows_of(x, head // heads_per_group, padded) for x in (k_LGC, v_LGC))
            for start, end in _blocks(padded):
                scores_BK = self._scores(q_LC, k_LC, start, end, above_BB)
                probs_BK, largest_B1, log_sum_B1 = softmax_and_log_sum(scores_BK)
                lse_HL1[head, start:end] = largest_B1 + log_sum_B1
                rows = slice(start, min(end, length))
                out_LHC[rows, head] = self.matmul.nn(probs_BK, v_LC[:end])[: rows.stop - start]

        self._for_each_head(attend, num_heads)
        return out_LHC, lse_HL1

    def backward(
        self, grad_LHC: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_LHC: Tensor, lse_HL1: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v.

        Args:
            grad_LHC: Gradient of the output.
            qkv: As in :meth:`forward`.
            out_LHC: Its output.
            lse_HL1: Likewise.
            scale: Factor on the scores.
        """
        q_LHC, k_LGC, v_LGC = qkv
        length, num_heads = q_LHC.shape[:2]
        grad_q_LHC = torch.empty_like(q_LHC)
        # Transposed: the operand that a product has to copy is then the narrow one.
        padded = padded_length(length)
        grad_k_HCL, grad_v_HCL = (q_LHC.new_zeros(num_heads, q_LHC.shape[2], padded) for _ in range(2))
        above_BB = _above_diagonal(q_LHC)
        heads_per_group = num_heads // k_LGC.shape[1]

        def attend_back(head: int) -> None:
            q_LC, grad_LC = _rows_of(q_LHC, head, padded).mul_(scale), _rows_of(grad_LHC, head, padded)
            k_LC, v_LC = (_rows_of(x, head // heads_per_group, padded) for x in (k_LGC, v_LGC))
            through_sum_L1 = (grad_LC * _rows_of(out_LHC, head, padded)).sum(dim=1, keepdim=True)
            for start, end in _blocks(padded):
                scores_BK = self._scores(q_LC, k_LC, start, end, above_BB)
                probs_BK = scores_BK.sub_(lse_HL1[head, start:end]).exp_()
                grad_BC = grad_LC[start:end]
                grad_v_HCL[head, :, :end] += self.matmul.tn(grad_BC, probs_BK)
                grad_BK = self.matmul.nt(grad_BC, v_LC[:end]).sub_(through_sum_L1[start:end]).mul_(probs_BK)
                rows = slice(start, min(end, length))
                grad_q_LHC[rows, head] = self.matmul.nn(grad_BK, k_LC[:end])[: rows.stop - start]
                grad_k_HCL[head, :, :end] += self.matmul.tn(q_LC[start:end], grad_BK)

        self._for_each_head(attend_back, num_heads)
        grad_k, grad_v = (
            x.unflatten(0, (-1, heads_per_group)).sum(dim=1)[..., :length].permute(2, 0, 1).contiguous()
            for x in (grad_k_HCL, grad_v_HCL)
        )
        return grad_q_LHC.mul_(scale), grad_k, grad_v

    def _scores(self, q_LC: Tensor, k_LC: Tensor, start: int, end: int, above_BB: Tensor) -> Tensor:
        scores_BK = self.matmul.nt(q_LC[start:end], k_LC[:end])
        scores_BK[:, start:end] += above_BB[: end - start, : end - start]
        return scores_BK

    def _for_each_head(self, function: Callable[[int], None], num_heads: int) -> None:
        self.pool.run([partial(function, head) for head in range(num_heads)], [1] * num_heads)


def padded_length(length: int) -> int:
    """Round a length up to one of a few: libraries compile and keep a kernel for every shape of a product.

    What stands behind the last token is later than all queries, so no token ever sees it.

    Args:
        length: Tokens of a segment.

    Returns:
        A multiple of 64, above 1024 one of 256.
    """
    multiple = 64 if length <= 1024 else _BLOCK
    return -(-length // multiple) * multiple


def _rows_of(x_LXC: Tensor, head: int, padded: int) -> Tensor:
    """One head's rows in memory of their own, [padded, C], zeros behind the last."""
    rows_LC = x_LXC.new_zeros(padded, x_LXC.shape[2])
    rows_LC[: x_LXC.shape[0]] = x_LXC[:, head]
    return rows_LC


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _above_diagonal(like: Tensor) -> Tensor:
    """-inf where a query of the block would see a later key, [B, B]."""
    return like.new_full((_BLOCK, _BLOCK), -math.inf).triu_(1)
