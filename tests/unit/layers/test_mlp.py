import pytest
import torch
import torch.nn.functional as F

from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.types import ForwardContext
from tests.support.layer_cases import layer_build, pack, small_model
from tests.support.tolerances import assert_close


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("swiglu", [True, False])
def test_equals_its_definition_with_gradients(swiglu, has_bias):
    ffn = build_feed_forward(small_model(swiglu=swiglu, add_bias_linear=has_bias), "blocks.0.ffn", layer_build())
    if has_bias:
        torch.nn.init.normal_(ffn.gate_up_bias)
        torch.nn.init.normal_(ffn.down_bias)
    x = torch.randn(5, 32, requires_grad=True)
    parts = [F.linear(x, w) for w in ffn.gate_up_weight]
    if has_bias:
        parts = [part + bias for part, bias in zip(parts, ffn.gate_up_bias, strict=True)]
    hidden = F.silu(parts[0]) * parts[1] if swiglu else F.gelu(parts[0], approximate="tanh")
    expected = F.linear(hidden, ffn.down_weight, ffn.down_bias)
    actual = ffn(x, ForwardContext(pack("one")))
    assert_close(actual, expected)
    leaves = [x, *ffn.parameters()]
    probe = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        assert_close(a, e)


def test_width_of_a_shared_expert():
    ffn = build_feed_forward(small_model(), "blocks.0.ffn.shared_expert", layer_build(), ffn_size=20)
    assert tuple(ffn.gate_up_weight.shape) == (2, 20, 32)
    assert tuple(ffn.down_weight.shape) == (32, 20)
