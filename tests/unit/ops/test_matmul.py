import pytest
import torch
import torch.nn.functional as F

from megatron_glue.backends.matmul_onednn import OnednnMatMul
from megatron_glue.ops.matmul import TORCH_MATMUL, linear
from tests.support.tolerances import assert_close

MATMULS = {"torch": TORCH_MATMUL, "onednn": OnednnMatMul(), "onednn, tn by torch": OnednnMatMul(transposes=False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(7, 5, 3), (5, 7, 3), (0, 4, 3), (4, 0, 3), (4, 3, 0), (130, 33, 65)])
@pytest.mark.parametrize("matmul", MATMULS.values(), ids=MATMULS)
def test_products_of_operands_of_any_strides(matmul, sizes, dtype):
    num_rows, num_columns, num_sums = sizes
    a, b = torch.randn(num_rows, num_sums, dtype=dtype), torch.randn(num_sums, num_columns, dtype=dtype)
    expected = a @ b
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            assert_close(matmul.nn(left, right), expected)
            assert_close(matmul.nt(left, right.t()), expected)
            assert_close(matmul.tn(left.t(), right), expected)
            total = torch.ones(num_rows, num_columns, dtype=dtype)
            matmul.add_tn_(total, left.t(), right)
            assert_close(total, expected + 1)


@pytest.mark.parametrize("matmul", MATMULS.values(), ids=MATMULS)
def test_a_sum_may_be_wider_than_its_products(matmul):
    a, b = torch.randn(6, 4).bfloat16(), torch.randn(6, 3).bfloat16()
    total = torch.zeros(4, 3)
    matmul.add_tn_(total, a, b)
    assert_close(total, a.float().t() @ b.float(), tolerance=2e-2)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("matmul", MATMULS.values(), ids=MATMULS)
def test_linear_equals_torchs_in_value_and_gradients(matmul, has_bias):
    x, weight, bias = torch.randn(9, 6), torch.randn(4, 6), torch.randn(4)
    inputs = [x, weight, bias] if has_bias else [x, weight]
    for tensor in inputs:
        tensor.requires_grad_()
    actual = linear(x, weight, bias if has_bias else None, matmul)
    expected = F.linear(x, weight, bias if has_bias else None)
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(actual, inputs, probe), torch.autograd.grad(expected, inputs, probe), strict=True
    ):
        assert_close(got, wanted)


def test_a_frozen_weight_costs_no_product():
    class Counting:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            self.calls.append(name)
            return getattr(TORCH_MATMUL, name)

    matmul = Counting()
    x = torch.randn(3, 4, requires_grad=True)
    linear(x, torch.randn(2, 4), None, matmul).sum().backward()
    assert matmul.calls == ["nt", "nn"]


def test_the_second_operand_has_no_gaps_between_its_rows(monkeypatch):
    """oneDNN would take its reference code, a thousand times slower."""
    matmul, seen = OnednnMatMul(), []
    product = matmul._linear
    monkeypatch.setattr(matmul, "_linear", lambda a, b, *rest: seen.append(b) or product(a, b, *rest))
    wide = torch.randn(8, 3, 4)
    left, right = torch.randn(5, 4), wide[:, 1]
    assert_close(matmul.nt(left, right), left @ right.t())
    assert_close(matmul.nn(left, right.t()), left @ right.t())
    assert_close(matmul.tn(torch.randn(8, 3).fill_(1.0), right), torch.ones(3, 8) @ right)
    assert all(b.is_contiguous() or b.t().is_contiguous() for b in seen)
