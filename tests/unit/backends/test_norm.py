import pytest
import torch

from megatron_glue.backends.norm import layer_norm_torch, rms_norm_cpu, rms_norm_torch
from tests.support.tolerances import assert_close


def by_hand(x, weight, epsilon):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


@pytest.mark.parametrize("kernel", [rms_norm_cpu, rms_norm_torch])
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8), (0, 8), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_equals_its_definition_with_gradients(kernel, shape, dtype):
    x = (torch.randn(shape, dtype=dtype) + 3.0).requires_grad_()
    weight = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    expected, actual = by_hand(x, weight, 1e-5), kernel(x, weight, 1e-5)
    assert_close(actual, expected)
    probe = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, (x, weight), probe), torch.autograd.grad(expected, (x, weight), probe), strict=True
    ):
        assert_close(a, e)


def test_rms_norm_on_cpu_of_strided_input_and_expanded_gradient():
    x = torch.randn(8, 6).t().requires_grad_()
    weight = torch.randn(8, requires_grad=True)
    (expected,) = torch.autograd.grad(by_hand(x, weight, 1e-5).sum(), x)
    (actual,) = torch.autograd.grad(rms_norm_cpu(x, weight, 1e-5).sum(), x)
    assert_close(actual, expected)


def test_rms_norm_on_cpu_of_zero_rows_is_finite():
    x = torch.zeros(3, 8, requires_grad=True)
    y = rms_norm_cpu(x, torch.ones(8), 1e-5)
    y.sum().backward()
    assert not y.any()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_layer_norm():
    x, weight, bias = torch.randn(5, 8, dtype=torch.float64), torch.randn(8).double(), torch.randn(8).double()
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-3) * weight + bias
    assert_close(layer_norm_torch(x, weight, bias, 1e-3), expected)
