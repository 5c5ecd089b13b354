"""Trial runs of the Triton kernels: a few tokens through each role on the real device, against torch.

They run once, when the registry asks whether the kernels can be used, so they may wait for the device. They prove that
the kernels compile, start and compute here; the tests prove that they are right.

Shape suffixes: T tokens, E experts, K top-k, N pairs, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_glue.backends.router import RoutingRule
from megatron_glue.backends.triton import permute as triton_permute
from megatron_glue.backends.triton.grouping import group_pairs
from megatron_glue.backends.triton.router import route
from megatron_glue.ops import permute as torch_permute
from megatron_glue.ops.grouping import group_tokens
from megatron_glue.ops.topk import topk_lowest_index

NUM_TOKENS, NUM_EXPERTS, TOP_K, WIDTH = 40, 6, 2, 16


def _ids_TK(device: torch.device) -> Tensor:
    """Ids with a sentinel on both sides."""
    return torch.arange(NUM_TOKENS * TOP_K, device=device).view(-1, TOP_K) * 5 % (NUM_EXPERTS + 2) - 1


def try_grouping(device: torch.device) -> str:
    """Group a few pairs.

    Args:
        device: Where.

    Returns:
        What is wrong; empty if nothing is.
    """
    ids_TK = _ids_TK(device)
    actual = group_pairs(ids_TK.view(-1), NUM_EXPERTS, 2, TOP_K)
    expected = group_tokens(ids_TK, NUM_EXPERTS, num_ranks=2, implementation="torch")
    names = ("order_N", "inverse_N", "counts_E", "offsets_E", "rank_splits_P")
    wrong = [name for name in names if not torch.equal(getattr(actual, name), getattr(expected, name))]
    return f"in a trial run it got other values than torch: {', '.join(wrong)}" if wrong else ""


def try_permutation(device: torch.device) -> str:
    """Move a few rows there and back, with gradients.

    Args:
        device: Where.

    Returns:
        What is wrong; empty if nothing is.
    """
    groups = group_tokens(_ids_TK(device), NUM_EXPERTS, implementation="torch")
    results = []
    for way in (triton_permute, torch_permute):
        x_TD = torch.linspace(-1, 1, NUM_TOKENS * WIDTH, device=device).view(-1, WIDTH).requires_grad_()
        weights_TK = torch.linspace(0, 1, NUM_TOKENS * TOP_K, device=device).view(-1, TOP_K).requires_grad_()
        y_TD = way.unpermute_rows(way.permute_rows(x_TD, groups).sin(), groups, weights_TK)
        results.append((y_TD, *torch.autograd.grad(y_TD.square().sum(), (x_TD, weights_TK))))
    is_equal = all(torch.allclose(actual, expected, atol=1e-5) for actual, expected in zip(*results, strict=True))
    return "" if is_equal else "in a trial run it got other values than torch"


def try_router(device: torch.device) -> str:
    """Route a few tokens, with gradients.

    Args:
        device: Where.

    Returns:
        What is wrong; empty if nothing is.
    """
    logits_TE = torch.linspace(-9, 9, NUM_TOKENS * NUM_EXPERTS, device=device).sin().view(-1, NUM_EXPERTS)
    logits_TE.requires_grad_()
    routed = route(logits_TE, RoutingRule(TOP_K, "softmax", False, 1.0), None, None)
    weights_TK, ids_TK = topk_lowest_index(logits_TE.softmax(-1), TOP_K)
    grads = [torch.autograd.grad(weights.square().sum(), logits_TE)[0] for weights in (routed.weights_TK, weights_TK)]
    is_equal = (
        torch.equal(routed.expert_ids_TK, ids_TK)
        and torch.allclose(routed.weights_TK, weights_TK, atol=1e-5)
        and torch.allclose(grads[0], grads[1], atol=1e-5)
    )
    return "" if is_equal else "in a trial run it got other values than torch"


TRIALS: dict[str, Callable[[torch.device], str]] = {
    "grouping": try_grouping,
    "permutation": try_permutation,
    "router": try_router,
}
"""Role -> its trial."""
