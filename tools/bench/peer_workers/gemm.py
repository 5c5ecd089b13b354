"""A worker that does nothing but the matrix products of one training step: the machine's rate on the model's shapes.

Forward, gradient of the input and gradient of the weight of each linear map. Experts get equal shares of the rows, one
product each. Attention's products are not among them. Variant ``torch``: ``torch.mm`` into memory that is there
already; ``auto``: the products that ``--matmul-backend auto`` takes on this machine.

Shape suffixes: T rows, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from protocol import BenchSpec, serve

if TYPE_CHECKING:
    from megatron_glue.ops.matmul import MatMul


def products(spec: BenchSpec) -> list[tuple[int, int, int, int]]:
    """List the linear maps of one step and process as (number of alike maps, T, I, O)."""
    num_tokens, width, layers = spec.num_tokens, spec.hidden_size, spec.num_layers
    return [
        (layers, num_tokens, width, 3 * width),
        (layers, num_tokens, width, width),
        (1, num_tokens, width, spec.vocab_size),
        *feed_forward_products(spec),
    ]


def feed_forward_products(spec: BenchSpec) -> list[tuple[int, int, int, int]]:
    """List those of all feed-forward layers, the router's included, as :func:`products` does."""
    num_tokens, width, layers = spec.num_tokens, spec.hidden_size, spec.num_layers
    router, rows, count = [], num_tokens, layers
    if spec.num_experts:
        router = [(layers, num_tokens, width, spec.num_experts)]
        rows, count = num_tokens * spec.top_k // spec.num_experts, layers * spec.num_experts
    return [*router, (count, rows, width, 2 * spec.ffn_hidden_size), (count, rows, spec.ffn_hidden_size, width)]


def num_flops(spec: BenchSpec) -> int:
    """Floating-point operations of these products, forward and backward, of all processes."""
    return spec.world_size * sum(6 * count * rows * inner * outer for count, rows, inner, outer in products(spec))


def num_attention_flops(spec: BenchSpec) -> int:
    """Those of causal attention, of all processes: half of each document's square, twice in forward, four times back.

    Documents have the mean length of their range.
    """
    length = spec.row_tokens if spec.document_tokens is None else sum(spec.document_tokens) // 2
    return spec.world_size * spec.num_layers * 6 * spec.num_tokens * length * spec.hidden_size


def build(spec: BenchSpec, rank: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Allocate operands. See :func:`protocol.serve`."""
    import torch

    from megatron_glue.backends.registry import resolve
    from megatron_glue.config.sections import BackendConfig

    torch.set_num_threads(spec.num_threads)
    matmul = None
    if spec.variant == "auto":
        head_dim = spec.hidden_size // spec.num_heads
        matmul = resolve(BackendConfig(), "cpu", torch.float32, head_dim=head_dim).matmul
    multiply = multiplication(products(spec), matmul)

    def step() -> float:
        multiply()
        return 0.0

    return step, {"version": f"torch {torch.__version__}", "num_parameters": 0}


def multiplication(maps: Sequence[tuple[int, int, int, int]], matmul: MatMul | None) -> Callable[[], None]:
    """Allocate operands.

    Args:
        maps: As :func:`products` lists them.
        matmul: Multiplies; ``None``: ``torch.mm`` into memory that is there already.

    Returns:
        What computes all products once.
    """
    import torch

    operands = []
    for count, rows, inner, outer in maps:
        x_TI, weight_OI, y_TO = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        results = torch.empty(rows, outer), torch.empty(rows, inner), torch.empty(outer, inner)
        operands.append((count, x_TI, weight_OI, y_TO, results))

    def multiply() -> None:
        for count, x_TI, weight_OI, y_TO, (out_TO, grad_TI, grad_OI) in operands:
            for _ in range(count):
                if matmul is None:
                    torch.mm(x_TI, weight_OI.t(), out=out_TO)
                    torch.mm(y_TO, weight_OI, out=grad_TI)
                    torch.mm(y_TO.t(), x_TI, out=grad_OI)
                else:
                    matmul.nt(x_TI, weight_OI)
                    matmul.nn(y_TO, weight_OI)
                    matmul.tn(y_TO, x_TI)

    return multiply


if __name__ == "__main__":
    serve(build)
