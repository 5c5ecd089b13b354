"""A worker that does nothing but the matrix products of one training step: the machine's rate on the model's shapes.

Forward, gradient of the input and gradient of the weight of each linear map, into memory that is there already. Experts
get equal shares of the rows, one product each. Attention's products are not among them.

Shape suffixes: T rows, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from protocol import BenchSpec, serve


def products(spec: BenchSpec) -> list[tuple[int, int, int, int]]:
    """List the linear maps of one step as (number of alike maps, T, I, O)."""
    num_tokens, width, layers = spec.num_tokens, spec.hidden_size, spec.num_layers
    maps = [
        (layers, num_tokens, width, 3 * width),
        (layers, num_tokens, width, width),
        (1, num_tokens, width, spec.vocab_size),
    ]
    if spec.num_experts:
        rows, count = num_tokens * spec.top_k // spec.num_experts, layers * spec.num_experts
        maps.append((layers, num_tokens, width, spec.num_experts))
    else:
        rows, count = num_tokens, layers
    return [*maps, (count, rows, width, 2 * spec.ffn_hidden_size), (count, rows, spec.ffn_hidden_size, width)]


def num_flops(spec: BenchSpec) -> int:
    """Floating-point operations of these products, forward and backward."""
    return sum(6 * count * rows * inner * outer for count, rows, inner, outer in products(spec))


def build(spec: BenchSpec, rank: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Allocate operands. See :func:`protocol.serve`."""
    torch.set_num_threads(spec.num_threads)
    operands = []
    for count, rows, inner, outer in products(spec):
        x_TI, weight_OI, y_TO = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        results = torch.empty(rows, outer), torch.empty(rows, inner), torch.empty(outer, inner)
        operands.append((count, x_TI, weight_OI, y_TO, results))

    def step() -> float:
        for count, x_TI, weight_OI, y_TO, (out_TO, grad_TI, grad_OI) in operands:
            for _ in range(count):
                torch.mm(x_TI, weight_OI.t(), out=out_TO)
                torch.mm(y_TO, weight_OI, out=grad_TI)
                torch.mm(y_TO.t(), x_TI, out=grad_OI)
        return 0.0

    return step, {"version": f"torch {torch.__version__}", "num_parameters": 0}


if __name__ == "__main__":
    serve(build)
