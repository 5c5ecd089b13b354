import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.layers.attention import build_attention
from megatron_glue.ops.rope import apply_rope, rope_table
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support import oracles
from tests.support.layer_cases import layer_build, small_model
from tests.support.tolerances import assert_close


def build(model, layer_index=0):
    return build_attention(model, layer_index, layer_build(model))


def by_hand(attention, x, sequence, *, rotary_dim=8, window=0, norm=False):
    """The layer from separate projections, one per part, and the token-by-token oracle."""
    weight, bias = attention.qkv_weight, attention.qkv_bias
    groups, parts, head_dim, _ = weight.shape

    def project(group, part):
        return x @ weight[group, part].t() + (0 if bias is None else bias[group, part])

    q = torch.stack([project(g, p) for g in range(groups) for p in range(parts - 2)], 1)
    k = torch.stack([project(g, parts - 2) for g in range(groups)], 1)
    v = torch.stack([project(g, parts - 1) for g in range(groups)], 1)
    if norm:
        q, k = (t / torch.sqrt((t * t).mean(-1, keepdim=True) + 1e-5) for t in (q, k))
    if rotary_dim:
        cos, sin = (table[sequence.positions_T] for table in rope_table(256, rotary_dim, 10000.0, "cpu"))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = oracles.packed_attention(q, k, v, sequence, window=window, scale=head_dim**-0.5).flatten(1)
    return out @ attention.out_weight.t() + (0 if attention.out_bias is None else attention.out_bias)


@pytest.mark.parametrize(
    ("overrides", "hand"),
    [
        ({}, {}),
        ({"num_query_groups": 4}, {}),
        ({"num_query_groups": 1}, {}),
        ({"rotary_percent": 0.5}, {"rotary_dim": 4}),
        ({"position_embedding_type": "none"}, {"rotary_dim": 0}),
        ({"window_size": 5}, {"window": 5}),
        ({"qk_layernorm": True}, {"norm": True}),
        ({"add_bias_linear": True}, {}),
        ({"kv_channels": 12, "rotary_percent": 0.5}, {"rotary_dim": 6}),
    ],
)
def test_equals_separate_projections_and_the_oracle(overrides, hand):
    attention = build(small_model(**overrides))
    if attention.qkv_bias is not None:
        torch.nn.init.normal_(attention.qkv_bias)
        torch.nn.init.normal_(attention.out_bias)
    sequence = PackedSequence.from_lengths([9, 4, 12], 0, position_starts=[0, 30, 0])
    x = torch.randn(25, 32, requires_grad=True)
    actual, expected = attention(x, ForwardContext(sequence)), by_hand(attention, x, sequence, **hand)
    assert_close(actual, expected)
    leaves = [x, *attention.parameters()]
    probe = torch.randn_like(expected)
    actual_grads = torch.autograd.grad(actual, leaves, probe)
    expected_grads = torch.autograd.grad(expected, leaves, probe, allow_unused=True)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        # The oracle knows no weight of the q and k norms (they are one).
        assert e is None or torch.isfinite(a).all()
        if e is not None:
            assert_close(a, e, tolerance=1e-4)


def test_f7_a_chunk_that_starts_late_is_rotated_by_its_true_positions():
    """Scores depend on distances alone, so a late start must change nothing, and only RoPE sees it."""
    attention = build(small_model())
    x = torch.randn(8, 32)
    outs = [attention(x, ForwardContext(PackedSequence.from_lengths([8], position_starts=[start]))) for start in (0, 5)]
    assert_close(outs[1], outs[0])


def test_windows_alternate_by_layer():
    model = small_model(window_size=4, window_attn_skip_freq=(1, 0, 1))
    assert [build(model, layer).shape.window for layer in range(3)] == [4, 0, 4]


def test_a_position_beyond_the_table_is_named():
    attention = build(small_model(max_position_embeddings=16))
    with pytest.raises(ValueError, match="position 19: --max-position-embeddings=16"):
        attention(torch.randn(10, 32), ForwardContext(PackedSequence.from_lengths([10], position_starts=[10])))


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match="--num-query-groups=3"):
        build(small_model(num_query_groups=3))


def test_attention_dropout_depends_on_step_micro_batch_and_layer_and_is_off_in_evaluation():
    model = small_model(attention_dropout=0.3)
    attention = build(model)
    sequence = PackedSequence.from_lengths([20])
    x = torch.randn(20, 32)

    def run(**context):
        return attention(x, ForwardContext(sequence, **context))

    assert torch.equal(run(step=1), run(step=1))
    assert not torch.equal(run(step=1), run(step=2))
    assert not torch.equal(run(micro_batch=0), run(micro_batch=1))
    assert not torch.equal(run(seed=0), run(seed=1))
    other = build(model, 1)
    other.load_state_dict(attention.state_dict())
    assert not torch.equal(run(), other(x, ForwardContext(sequence)))
    attention.eval()
    assert_close(run(), by_hand(attention, x, sequence))


def test_weights_keep_parts_on_own_dims():
    """A split of the kv heads cuts queries, keys and values alike: two halves give the whole."""
    model = small_model()
    attention = build(model)
    sequence = PackedSequence.from_lengths([6, 5])
    x = torch.randn(11, 32)
    halves = []
    for rank in range(2):
        half = build(small_model(num_attention_heads=2, num_query_groups=1, kv_channels=8))
        with torch.no_grad():
            half.qkv_weight.copy_(attention.qkv_weight[rank : rank + 1])
            half.out_weight.copy_(attention.out_weight.chunk(2, dim=1)[rank])
        halves.append(half(x, ForwardContext(sequence)))
    assert_close(halves[0] + halves[1], attention(x, ForwardContext(sequence)))
