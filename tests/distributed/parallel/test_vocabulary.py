"""Lookup, loss and logits over a split vocabulary against the whole one, on 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_glue.ops.cross_entropy import LossChunks, linear_cross_entropy
from megatron_glue.parallel.tensor import TensorParallel
from megatron_glue.parallel.vocabulary import (
    vocab_parallel_embedding,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_logits,
)
from megatron_glue.types import IGNORE_LABEL
from tests.support.collective_watch import CollectiveWatch
from tests.support.operator_watch import OperatorWatch
from tests.support.processes import run_distributed
from tests.support.tolerances import RELATIVE_NORM, assert_close

NUM_TOKENS, WIDTH, NUM_ROWS = 12, 6, 40
sequence_parallel = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all rows", "own rows"])


def ranks_of_world(rank: int, world_size: int, is_sequence_parallel: bool) -> TensorParallel:
    group = dist.group.WORLD
    assert group is not None
    return TensorParallel(group, rank, world_size, is_sequence_parallel)


def problem(vocab_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Logits of a size at which exp without the largest one subtracted would overflow in fp32.
    x = (torch.randn(NUM_TOKENS, WIDTH, generator=generator) * 30).to(dtype).requires_grad_()
    weight = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    labels[::5] = IGNORE_LABEL
    labels[1], labels[2] = 0, vocab_size - 1
    return x, weight, labels


def rows_of(whole: Tensor, tp: TensorParallel) -> Tensor:
    return whole.detach().chunk(tp.size)[tp.rank] if tp.sequence_parallel else whole.detach()


def compare_loss(
    rank: int, world_size: int, is_sequence_parallel: bool, vocab_size: int, chunk_tokens: int, dtype_name: str
) -> Tensor:
    dtype = getattr(torch, dtype_name)
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    x, weight, labels = problem(vocab_size, dtype)
    chunks = LossChunks(vocab_size, chunk_tokens)
    expected = linear_cross_entropy(x, weight, labels, chunks)
    # A factor on the loss, as a training step has it, and a backward on every rank's own copy.
    (expected * 0.3).backward()
    own_x = rows_of(x, tp).clone().requires_grad_()
    own_weight = weight.detach().chunk(world_size)[rank].clone().requires_grad_()
    actual = vocab_parallel_linear_cross_entropy(own_x, own_weight, labels, chunks, tp=tp)
    (actual * 0.3).backward()
    tolerance = RELATIVE_NORM[dtype]
    assert actual.dtype == expected.dtype
    assert_close(actual, expected, what="loss", tolerance=tolerance)
    assert own_x.grad is not None
    assert x.grad is not None
    assert own_weight.grad is not None
    assert weight.grad is not None
    assert_close(own_x.grad, rows_of(x.grad, tp), what="gradient of the input", tolerance=tolerance)
    whole_grad = weight.grad.chunk(world_size)[rank]
    assert_close(own_weight.grad, whole_grad, what="gradient of the weight", tolerance=tolerance)
    first = rank * own_weight.shape[0]
    padding = own_weight.grad[max(vocab_size - first, 0) :]
    assert torch.equal(padding, torch.zeros_like(padding))
    with torch.no_grad():
        without_grad = vocab_parallel_linear_cross_entropy(own_x, own_weight, labels, chunks, tp=tp)
    assert torch.equal(without_grad, actual)
    return actual.detach()


# The vocabulary ends: nowhere early, inside the last rank, inside the first, at a border (ranks without a real row).
@pytest.mark.parametrize("vocab_size", [40, 37, 9, 20])
@sequence_parallel
@pytest.mark.parametrize("world_size", [2, 4])
def test_loss_and_gradients_equal_the_whole_vocabulary(
    world_size: int, sequence_parallel: bool, vocab_size: int
) -> None:
    losses = run_distributed(compare_loss, world_size, sequence_parallel, vocab_size, 5, "float64")
    assert all(torch.equal(loss, losses[0]) for loss in losses), "every rank returns the same sum, bit for bit"


@pytest.mark.parametrize(
    ("chunk_tokens", "dtype_name"), [(1, "float64"), (100, "float32"), (5, "float32"), (5, "bfloat16")]
)
def test_chunks_and_dtypes(chunk_tokens: int, dtype_name: str) -> None:
    run_distributed(compare_loss, 2, True, 37, chunk_tokens, dtype_name)


def mixed_dtypes(rank: int, world_size: int) -> None:
    x, weight, labels = problem(37, torch.float32)
    own_x = x.detach().bfloat16().chunk(world_size)[rank].requires_grad_()
    own_weight = weight.detach().chunk(world_size)[rank].clone().requires_grad_()
    tp = ranks_of_world(rank, world_size, True)
    vocab_parallel_linear_cross_entropy(own_x, own_weight, labels, chunks=LossChunks(37, 5), tp=tp).backward()
    assert own_x.grad is not None
    assert own_weight.grad is not None
    assert own_x.grad.dtype == torch.bfloat16
    assert own_weight.grad.dtype == torch.float32
    assert not torch.equal(own_weight.grad, own_weight.grad.bfloat16().float())


def test_a_master_weight_gets_its_gradient_unrounded() -> None:
    run_distributed(mixed_dtypes, 2)


def watch_exchanges(rank: int, world_size: int, is_sequence_parallel: bool) -> list[list[str]]:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    x, weight, labels = problem(37, torch.float32)
    own_x, own_weight = (part.requires_grad_() for part in (rows_of(x, tp), weight.detach().chunk(world_size)[rank]))
    with OperatorWatch() as operators, CollectiveWatch() as forward:
        loss = vocab_parallel_linear_cross_entropy(own_x, own_weight, labels, chunks=LossChunks(37, 6), tp=tp)
    with OperatorWatch() as more_operators, CollectiveWatch() as backward:
        loss.backward()
    assert operators.synchronising == more_operators.synchronising == []
    assert backward.events == []
    with torch.no_grad(), CollectiveWatch() as evaluation:
        vocab_parallel_linear_cross_entropy(own_x, own_weight, labels, chunks=LossChunks(37, 6), tp=tp)
    return [forward.events, evaluation.events]


@pytest.mark.parametrize(
    ("sequence_parallel", "at_start", "reduction"),
    [(True, ["gather", "gather done"], "reduce_scatter"), (False, [], "all_reduce")],
    ids=["own rows", "all rows"],
)
def test_one_exchange_per_chunk_one_for_the_input_and_none_in_backward(
    sequence_parallel: bool, at_start: list[str], reduction: str
) -> None:
    chunk = ["product", "gather", "gather done", "product"]
    expected = [*at_start, *chunk, "product", *chunk, reduction, "product", f"{reduction} done"]
    for training, evaluation in run_distributed(watch_exchanges, 2, sequence_parallel):
        assert training == expected
        assert evaluation == [*at_start, *chunk[:3], *chunk[:3]]


def wrong_sizes(rank: int, world_size: int) -> None:
    tp = ranks_of_world(rank, world_size, False)
    x, weight, labels = problem(37)
    own_weight = weight.detach().chunk(world_size)[rank]
    for field, value in (("vocab_size", 41), ("vocab_size", 0), ("chunk_tokens", 0)):
        sizes = {"vocab_size": 37, "chunk_tokens": 8} | {field: value}
        with pytest.raises(ValueError, match=field):
            vocab_parallel_linear_cross_entropy(x, own_weight, labels, LossChunks(**sizes), tp)


def test_wrong_sizes_are_named() -> None:
    run_distributed(wrong_sizes, 2)


def compare_embedding(rank: int, world_size: int, is_sequence_parallel: bool) -> None:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    _, weight, _ = problem(NUM_ROWS)
    ids = torch.randint(0, NUM_ROWS, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    probe = torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = F.embedding(ids, weight)
    expected.backward(probe)
    own_weight = weight.detach().chunk(world_size)[rank].clone().requires_grad_()
    actual = vocab_parallel_embedding(ids, own_weight, torch.float64, tp)
    assert torch.equal(actual, rows_of(expected, tp))
    actual.backward(rows_of(probe, tp))
    assert own_weight.grad is not None
    assert weight.grad is not None
    assert_close(own_weight.grad, weight.grad.chunk(world_size)[rank])


@sequence_parallel
@pytest.mark.parametrize("world_size", [2, 4])
def test_lookup(world_size: int, sequence_parallel: bool) -> None:
    run_distributed(compare_embedding, world_size, sequence_parallel)


def compare_logits(rank: int, world_size: int, is_sequence_parallel: bool) -> None:
    tp = ranks_of_world(rank, world_size, is_sequence_parallel)
    x, weight, _ = problem(37, torch.float32)
    own_weight = weight.detach().chunk(world_size)[rank]
    for row in (0, 7, NUM_TOKENS - 1):
        actual = vocab_parallel_logits(rows_of(x, tp), own_weight, row, 37, tp)
        assert_close(actual, weight[:37] @ x[row])


@sequence_parallel
def test_logits_of_one_token(sequence_parallel: bool) -> None:
    run_distributed(compare_logits, 2, sequence_parallel)
