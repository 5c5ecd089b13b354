import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_glue.ops.cross_entropy import LossChunks, linear_cross_entropy
from megatron_glue.types import IGNORE_LABEL
from tests.support.operator_watch import OperatorWatch
from tests.support.tolerances import assert_close


def problem(num_tokens=23, dtype=torch.float32, vocab_size=37, num_rows=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 12, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(num_rows, 12, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(num_rows, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    labels[::5] = IGNORE_LABEL
    return x, weight, bias, labels


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_cross_entropy(chunk_tokens, has_bias, dtype):
    x, weight, bias, labels = problem(dtype=dtype)
    leaves = [x, weight, *([bias] if has_bias else [])]
    logits = F.linear(x, weight, bias if has_bias else None)[:, :37]
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
    actual = linear_cross_entropy(
        x, weight, labels, chunks=LossChunks(37, chunk_tokens), bias_V=bias if has_bias else None
    )
    assert_close(actual, expected)
    # A factor on the loss, as a training step has it.
    expected_grads = torch.autograd.grad(expected * 0.3, leaves)
    for a, e in zip(torch.autograd.grad(actual * 0.3, leaves), expected_grads, strict=True):
        assert_close(a, e)
    assert not expected_grads[1][37:].any()


def test_padding_of_the_vocabulary_gets_exact_zeros_and_takes_no_part():
    x, weight, _, labels = problem()
    loss = linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8))
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[37:], torch.zeros(3, 12))
    with torch.no_grad():
        weight[37:] = 1e4
    assert torch.equal(linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8)), loss)


def test_ignored_rows_contribute_nothing_whatever_they_hold():
    x, weight, _, labels = problem()
    keep = labels != IGNORE_LABEL
    linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8)).backward()
    assert x.grad is not None
    assert torch.equal(x.grad[~keep], torch.zeros(int((~keep).sum()), 12))
    expected = linear_cross_entropy(x[keep], weight, labels[keep], chunks=LossChunks(37, 100))
    with torch.no_grad():
        x[~keep] = float("nan")
    assert_close(linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8)), expected)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_f32_no_label_at_all_gives_zero_loss_and_zero_gradients(num_tokens):
    x, weight, _, _ = problem(num_tokens)
    labels = torch.full((num_tokens,), IGNORE_LABEL)
    loss = linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 2))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_bf16_input_with_fp32_weight_keeps_the_weight_gradient_unrounded():
    x, weight, _, labels = problem()
    x16 = x.detach().bfloat16().requires_grad_()
    loss = linear_cross_entropy(x16, weight, labels, chunks=LossChunks(37, 4))
    loss.backward()
    assert loss.dtype == torch.float32
    assert x16.grad is not None
    assert x16.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    plain = F.cross_entropy(x @ weight[:37].t(), labels, ignore_index=IGNORE_LABEL, reduction="sum")
    assert_close(loss, plain, tolerance=2e-2)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest result of any operator."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return out


def test_full_logits_never_exist():
    x = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(512, 8, requires_grad=True)
    labels = torch.randint(0, 512, (64,))
    with LargestTensor() as largest:
        linear_cross_entropy(x, weight, labels, chunks=LossChunks(512, 8)).backward()
    assert largest.num_elements == 8 * 512


def test_evaluation_computes_no_gradients():
    x, weight, _, labels = problem()
    with torch.no_grad(), OperatorWatch() as watch:
        linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 100))
    assert watch.calls.count("aten::mm") == 1


def test_reads_no_device_value():
    x, weight, _, labels = problem()
    with OperatorWatch() as watch:
        linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8)).backward()
    assert watch.synchronising == []


def test_backward_twice_gives_the_same_gradient():
    x, weight, _, labels = problem()
    loss = linear_cross_entropy(x, weight, labels, chunks=LossChunks(37, 8)) * 0.5
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 41), ("vocab_size", 0), ("chunk_tokens", 0)])
def test_wrong_sizes_are_named(field, value):
    x, weight, _, labels = problem()
    sizes = {"vocab_size": 37, "chunk_tokens": 8} | {field: value}
    with pytest.raises(ValueError, match=field):
        linear_cross_entropy(x, weight, labels, LossChunks(**sizes))
