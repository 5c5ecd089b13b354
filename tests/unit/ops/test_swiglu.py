import pytest
import torch
import torch.nn.functional as F

from megatron_glue.ops.swiglu import swiglu
from tests.support.tolerances import assert_close


def test_gradcheck():
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 8), (0, 8), (2, 3, 4)])
def test_equals_plain_autograd(dtype, shape):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    probe = torch.randn(expected.shape, dtype=dtype)
    actual = swiglu(x)
    assert_close(actual, expected)
    (actual_grad,) = torch.autograd.grad(actual, x, probe)
    (expected_grad,) = torch.autograd.grad(expected, x, probe)
    assert_close(actual_grad, expected_grad)
