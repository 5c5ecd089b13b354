"""Column and row products over 2 and 4 ranks against whole ones: values, gradients, order of exchanges, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_glue.activation.recompute import InputInMemory, run_recomputed
from megatron_glue.parallel.tensor import TensorParallel, column_linear, gather_rows, row_linear
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.collective_watch import CollectiveWatch
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

NUM_TOKENS, WIDTH, INNER = 8, 12, 16
sequence_parallel = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all rows", "own rows"])


def ranks_of_world(rank: int, world_size: int, is_sequence_parallel: bool) -> TensorParallel:
    group = dist.group.WORLD
    assert group is not None
    return TensorParallel(group, rank, world_size, is_sequence_parallel)


class Problem:
    """Two products with a nonlinearity between them, whole on every rank."""

    def __init__(self, dtype: torch.dtype = torch.float64, has_bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.x, self.probe = draw(NUM_TOKENS, WIDTH), draw(NUM_TOKENS, WIDTH).detach()
        self.up, self.down = draw(INNER, WIDTH), draw(WIDTH, INNER)
        self.up_bias, self.down_bias = (draw(INNER), draw(WIDTH)) if has_bias else (None, None)

    def leaves(self) -> dict[str, Tensor | None]:
        names = ("x", "up", "down", "up_bias", "down_bias")
        return {name: getattr(self, name) for name in names}

    def run(self, tp: TensorParallel | None) -> Tensor:
        hidden = F.gelu(column_linear(self.x, self.up, self.up_bias, tp))
        return row_linear(hidden, self.down, self.down_bias, tp)

    def part(self, tp: TensorParallel) -> Problem:
        """What one rank holds, as leaves of its own."""
        own = object.__new__(Problem)
        dims: dict[str, int | None] = {"up": 0, "down": 1, "up_bias": 0, "down_bias": None}
        dims["x"] = dims["probe"] = 0 if tp.sequence_parallel else None
        for name, dim in dims.items():
            whole = getattr(self, name)
            setattr(own, name, None if whole is None else cut(whole, dim, tp).clone().requires_grad_())
        return own


def cut(whole: Tensor, dim: int | None, tp: TensorParallel) -> Tensor:
    return whole.detach() if dim is None else whole.detach().chunk(tp.size, dim)[tp.rank]


def compare(rank: int, world_size: int, is_sequence_parallel: bool, has_bias: bool, dtype_name: str) -> None:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    whole = Problem(getattr(torch, dtype_name), has_bias)
    own = whole.part(tp)
    expected, actual = whole.run(None), own.run(tp)
    rows = 0 if is_sequence_parallel else None
    assert_close(actual, cut(expected, rows, tp), what="output")
    expected.backward(whole.probe)
    actual.backward(own.probe.detach())
    dims: dict[str, int | None] = {"x": rows, "up": 0, "down": 1, "up_bias": 0, "down_bias": None}
    for name, leaf in own.leaves().items():
        if leaf is None:
            continue
        assert leaf.grad is not None
        if name == "down_bias" and is_sequence_parallel:
            dist.all_reduce(leaf.grad)
        whole_grad = whole.leaves()[name].grad  # pyright: ignore[reportOptionalMemberAccess]
        assert whole_grad is not None
        assert_close(leaf.grad, cut(whole_grad, dims[name], tp), what=f"gradient of {name}")


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@sequence_parallel
@pytest.mark.parametrize("world_size", [2, 4])
def test_products_equal_whole_ones(world_size: int, sequence_parallel: bool, has_bias: bool) -> None:
    run_distributed(compare, world_size, sequence_parallel, has_bias, "float64")


@sequence_parallel
def test_bf16(sequence_parallel: bool) -> None:
    run_distributed(compare, 2, sequence_parallel, True, "bfloat16")


def order_of_events(rank: int, world_size: int, is_sequence_parallel: bool) -> dict[str, list[str]]:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    own = Problem(torch.float32, has_bias=False).part(tp)
    found: dict[str, list[str]] = {}
    with CollectiveWatch() as watch:
        hidden = column_linear(own.x, own.up, None, tp)
    found["column forward"] = watch.events
    with CollectiveWatch() as watch:
        hidden.backward(torch.ones_like(hidden))
    found["column backward"] = watch.events
    x = torch.randn(NUM_TOKENS, INNER // world_size, requires_grad=True)
    with CollectiveWatch() as watch:
        out = row_linear(x, own.down, None, tp)
    found["row forward"] = watch.events
    with CollectiveWatch() as watch:
        out.backward(torch.ones_like(out))
    found["row backward"] = watch.events
    return found


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (
            True,
            {
                "column forward": ["gather", "gather done", "product"],
                # The gather runs beside the gradient of the input, its sum beside the gradient of the weight.
                "column backward": [
                    *("gather", "product", "reduce_scatter"),
                    *("gather done", "product", "reduce_scatter done"),
                ],
                "row forward": ["product", "reduce_scatter", "reduce_scatter done"],
                "row backward": ["gather", "gather done", "product", "product"],
            },
        ),
        (
            False,
            {
                "column forward": ["product"],
                "column backward": ["product", "all_reduce", "product", "all_reduce done"],
                "row forward": ["product", "all_reduce", "all_reduce done"],
                "row backward": ["product", "product"],
            },
        ),
    ],
    ids=["own rows", "all rows"],
)
def test_exchanges_of_backward_run_beside_products(sequence_parallel: bool, expected: dict[str, list[str]]) -> None:
    for found in run_distributed(order_of_events, 2, sequence_parallel):
        assert found == expected


def shapes_kept_for_backward(rank: int, world_size: int) -> list[list[int]]:
    tp = ranks_of_world(rank, world_size, True)
    own = Problem(torch.float32).part(tp)
    kept: list[list[int]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(list(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        column_linear(own.x, own.up, own.up_bias, tp)
    return kept


def test_only_own_rows_are_kept_for_backward() -> None:
    for kept in run_distributed(shapes_kept_for_backward, 2):
        assert kept == [[NUM_TOKENS // 2, WIDTH], [INNER // 2, WIDTH]]


def recompute(rank: int, world_size: int, is_sequence_parallel: bool) -> dict[str, Any]:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    own = Problem(torch.float64, has_bias=False).part(tp)
    own.run(tp).backward(own.probe.detach())
    plain = {
        name: leaf.grad.clone() for name, leaf in own.leaves().items() if leaf is not None and leaf.grad is not None
    }

    def block(x: Tensor, context: ForwardContext) -> Tensor:
        return row_linear(F.gelu(column_linear(x, own.up, None, tp)), own.down, None, tp)

    for leaf in own.leaves().values():
        if leaf is not None:
            leaf.grad = None
    context = ForwardContext(PackedSequence.from_lengths([NUM_TOKENS]))
    out = run_recomputed(block, [own.x], context, [InputInMemory(own.x)], preserve_rng=False)
    with CollectiveWatch() as watch:
        out.backward(own.probe.detach())
    for name, expected in plain.items():
        grad = own.leaves()[name].grad  # pyright: ignore[reportOptionalMemberAccess]
        assert grad is not None
        assert torch.equal(grad, expected), name
    return {name: watch.count(name) for name in ("gather", "reduce_scatter", "all_reduce")}


def test_recompute_repeats_the_gather_but_not_the_last_exchange() -> None:
    for counts in run_distributed(recompute, 2, True):
        # Gradient of the rows that were summed, the gather of the second run, and that of the first product's backward.
        assert counts == {"gather": 3, "reduce_scatter": 1, "all_reduce": 0}
    for counts in run_distributed(recompute, 2, False):
        assert counts == {"gather": 0, "reduce_scatter": 0, "all_reduce": 1}


def backward_in_two_passes(rank: int, world_size: int, is_sequence_parallel: bool, is_leaf: bool) -> list[list[str]]:
    """As a zero-bubble pipeline asks for gradients: those of inputs first, those of weights later."""
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    own = Problem(torch.float64).part(tp)
    weights = [own.up, own.up_bias]
    inputs = weights if is_leaf else [weight * 1.0 for weight in weights]
    x = own.x * 1.0
    hidden = column_linear(x, inputs[0], inputs[1], tp)
    probe = torch.ones_like(hidden)
    expected = torch.autograd.grad(hidden, [x, *weights], probe, retain_graph=True)
    with CollectiveWatch() as first:
        actual = torch.autograd.grad(hidden, [x], probe, retain_graph=True)
    with CollectiveWatch() as second:
        actual += torch.autograd.grad(hidden, weights, probe)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    return [first.events, second.events]


@pytest.mark.parametrize("is_leaf", [False, True], ids=["computed weight", "weight"])
def test_gradients_of_inputs_and_weights_can_be_computed_apart(is_leaf: bool) -> None:
    for inputs, weights in run_distributed(backward_in_two_passes, 2, True, is_leaf):
        assert inputs == ["product", "reduce_scatter", "reduce_scatter done"]
        assert weights == ["gather", "gather done", "product"]
    for inputs, weights in run_distributed(backward_in_two_passes, 2, False, is_leaf):
        assert inputs == ["product", "all_reduce", "all_reduce done"]
        assert weights == ["product"]


def rows_of_all(rank: int, world_size: int) -> list[Tensor]:
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = gather_rows(x, ranks_of_world(rank, world_size, True))
    same = gather_rows(x, ranks_of_world(rank, world_size, False))
    assert not gathered.requires_grad
    return [gathered, same]


def test_gather_rows() -> None:
    for rank, (gathered, same) in enumerate(run_distributed(rows_of_all, 2)):
        assert gathered[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert same.tolist() == [[float(rank)] * 3] * 2
