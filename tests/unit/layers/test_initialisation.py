import math

import pytest
import torch

from megatron_glue.layers.embedding import build_token_embedding
from megatron_glue.layers.initialisation import init_expert_normal_, init_normal_, residual_std
from megatron_glue.parallel.shard_spec import ShardSpec
from tests.support.layer_cases import build_blocks, layer_build, small_model


def test_values_depend_on_seed_and_global_name_alone():
    first, again, other_name, other_seed = (torch.empty(40, 50) for _ in range(4))
    init_normal_(first, 0.02, 1, "a.weight")
    torch.rand(17)
    init_normal_(again, 0.02, 1, "a.weight")
    init_normal_(other_name, 0.02, 1, "b.weight")
    init_normal_(other_seed, 0.02, 2, "a.weight")
    assert torch.equal(first, again)
    assert not torch.equal(first, other_name)
    assert not torch.equal(first, other_seed)


def test_global_generators_are_left_alone():
    state = torch.get_rng_state()
    init_normal_(torch.empty(10), 0.02, 1, "a")
    assert torch.equal(torch.get_rng_state(), state)


def test_moments():
    weight = torch.empty(400, 500)
    init_normal_(weight, 0.02, 1, "a")
    assert abs(weight.std().item() - 0.02) < 1e-4
    assert abs(weight.mean().item()) < 2e-4


@pytest.mark.parametrize(("ep_size", "etp_size"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_experts_depend_on_their_global_id_and_not_on_the_layout(ep_size, etp_size):
    spec = ShardSpec("experts.weight", (4, 6, 7), (("ep", 0), ("etp", 1)))
    whole = torch.empty(4, 6, 7)
    init_expert_normal_(whole, 0.02, 1, spec, (slice(0, 4), slice(0, 6), slice(0, 7)))
    rows = []
    for ep_rank in range(ep_size):
        parts = []
        for etp_rank in range(etp_size):
            slices = spec.local_slices({"ep": ep_size, "etp": etp_size}, {"ep": ep_rank, "etp": etp_rank})
            part = torch.empty(4 // ep_size, 6 // etp_size, 7)
            init_expert_normal_(part, 0.02, 1, spec, slices)
            parts.append(part)
        rows.append(torch.cat(parts, dim=1))
    assert torch.equal(torch.cat(rows), whole)
    assert not torch.equal(whole[0], whole[1])


def test_f75_two_ranks_that_build_different_things_first_agree():
    model = small_model()
    _ = build_blocks(small_model(num_layers=1))
    first = build_blocks(model)[0].state_dict()
    build_token_embedding(model, 100, layer_build())
    second = build_blocks(model)[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layers_differ_and_residual_projections_are_smaller():
    model = small_model(num_layers=8, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128)
    blocks, _ = build_blocks(model)
    assert not torch.equal(blocks[0].attention.qkv_weight, blocks[1].attention.qkv_weight)
    expected = residual_std(0.02, 8)
    assert math.isclose(expected, 0.005)
    for block in blocks:
        assert abs(block.attention.out_weight.std().item() / expected - 1) < 0.1
        assert abs(block.ffn.down_weight.std().item() / expected - 1) < 0.1
        assert abs(block.attention.qkv_weight.std().item() / 0.02 - 1) < 0.1
        assert abs(block.ffn.gate_up_weight.std().item() / 0.02 - 1) < 0.1


def test_dtype_and_device_of_the_parameter_do_not_change_the_draw():
    wide, narrow = torch.empty(30, 30), torch.empty(30, 30, dtype=torch.bfloat16)
    for weight in (wide, narrow):
        init_normal_(weight, 0.02, 1, "a")
    assert torch.equal(wide.bfloat16(), narrow)
