"""Softmax together with the logarithm of its denominator, in as few passes over the scores as it takes.

For losses and attention on wide rows, where every pass counts. It masks nothing.

Shape suffixes: R rows, S scores of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_and_log_sum(scores_RS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of each row, its largest score, and the log of the sum of exponentials relative to it.

    The largest probability is 1 / sum(exp(score - largest score)), so the logarithm of the sum costs no pass that
    writes, and no probability that underflows is ever taken the logarithm of.

    Args:
        scores_RS: Floating point; -inf is no probability, and no row is all -inf.

    Returns:
        softmax_RS: Each row sums to 1.
        largest_R1: Its largest score.
        log_sum_R1: log(sum(exp(score - largest))); with the largest score added, the usual log-sum-exp.
    """
    largest_R1 = scores_RS.amax(dim=1, keepdim=True)
    softmax_RS = torch.softmax(scores_RS, dim=1)
    return softmax_RS, largest_R1, softmax_RS.amax(dim=1, keepdim=True).log().neg_()
