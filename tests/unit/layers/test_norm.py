import torch

from megatron_glue.layers.norm import LayerNorm, RMSNorm, build_head_norm, build_norm
from tests.support.layer_cases import layer_build, small_model
from tests.support.tolerances import assert_close

BUILD = layer_build()


def test_kind_width_and_epsilon_come_from_the_model():
    norm = build_norm(small_model(norm_epsilon=0.5), BUILD, "a")
    assert isinstance(norm, RMSNorm)
    x = torch.randn(4, 32)
    assert_close(norm(x), x / torch.sqrt((x * x).mean(-1, keepdim=True) + 0.5))
    norm = build_head_norm(small_model(normalization="LayerNorm", norm_epsilon=0.5), BUILD, "a")
    assert isinstance(norm, LayerNorm)
    x = torch.randn(4, 2, 8)
    centred = x - x.mean(-1, keepdim=True)
    assert_close(norm(x), centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 0.5))


def test_starts_as_the_plain_norm():
    norm = build_norm(small_model(normalization="LayerNorm"), BUILD, "a")
    assert torch.equal(norm.weight, torch.ones(32))
    assert isinstance(norm, LayerNorm)
    assert torch.equal(norm.bias, torch.zeros(32))
