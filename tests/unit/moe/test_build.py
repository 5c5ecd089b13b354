import pytest
import torch

from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ModelConfig, MoEConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.precision import keeps_full_precision
from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, is_expert_parameter
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord
from tests.support.moe_cases import random_rows

MODEL = ModelConfig(num_layers=2, hidden_size=16)
MOE = MoEConfig(num_experts=6, moe_router_topk=3, moe_ffn_hidden_size=8)


class FakeGroup:
    """Only what the builder asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def build(model: ModelConfig = MODEL, moe: MoEConfig = MOE, name: str = "blocks.1.ffn", group=None) -> MoELayer:
    placement = MoEPlacement(layer_index=1, name=name, seed=5, expert_group=group)
    return build_moe_layer(model, moe, placement, MoEExecution(grouped_mm_torch, HostReader()))


@pytest.fixture
def _group_of_two(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: group.size())


@pytest.mark.usefixtures("_group_of_two")
def test_weights_and_specs_do_not_depend_on_the_expert_parallel_layout():
    whole = build()
    for rank in (0, 1):
        part = build(group=FakeGroup(rank, 2))
        assert torch.equal(part.router.weight, whole.router.weight)
        for (name, param), full in zip(part.experts.named_parameters(), whole.experts.parameters(), strict=True):
            assert torch.equal(param, full[3 * rank : 3 * rank + 3]), name
            assert get_shard_spec(param) == get_shard_spec(full)
            assert is_expert_parameter(param)
            assert is_expert_parameter(full)
    spec = get_shard_spec(whole.experts.gate_up_weight)
    assert spec == ShardSpec("blocks.1.ffn.experts.gate_up_weight", (6, 2, 8, 16), (("ep", 0),))
    assert get_shard_spec(whole.router.weight) == ShardSpec("blocks.1.ffn.router.weight", (6, 16))
    assert keeps_full_precision(whole.router.weight)


def test_experts_and_layers_start_from_different_numbers_of_the_right_spread():
    first, second = build(), build(name="blocks.0.ffn")
    assert not torch.equal(first.router.weight, second.router.weight)
    assert not torch.equal(first.experts.gate_up_weight[0], first.experts.gate_up_weight[1])
    assert first.experts.gate_up_weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.experts.down_weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_every_field_of_the_configuration_arrives():
    moe = MoEConfig(
        num_experts=4,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_norm_topk_prob=False,
        moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.4,
        moe_aux_loss_scope="sequence",
        moe_router_enable_expert_bias=True,
    )
    layer = build(ModelConfig(hidden_size=16, swiglu=False), moe)
    config = layer.router.config
    assert (config.num_experts, config.top_k, config.score_function) == (4, 1, "sigmoid")
    assert (config.normalise_weights, config.weight_scale, config.has_expert_bias) == (False, 2.5, True)
    assert (layer.config.aux_loss_coeff, layer.config.z_loss_coeff, layer.config.balance_documents) == (0.3, 0.4, True)
    assert layer.config.layer_index == 1
    assert layer.experts.gate_up_weight.shape == (4, 1, 64, 16)
    assert layer.experts.down_weight.shape == (4, 16, 64)


def test_a_built_layer_trains():
    layer = build()
    log: list[RouterRecord] = []
    x = random_rows(10, 16)
    out = layer(x, ForwardContext(PackedSequence.from_lengths([6, 4]), router_log=log))
    out.square().sum().backward()
    assert log[0].layer_index == 1
    assert log[0].counts_E.sum() == 30
    assert all(param.grad is not None and param.dtype == torch.float32 for param in layer.parameters())


def test_the_shared_expert_is_built_with_its_own_width():
    assert build().shared_expert is None
    layer = build(moe=MOE.model_copy(update={"moe_shared_expert_intermediate_size": 24}))
    assert layer.shared_expert is not None
    assert {name: tuple(param.shape) for name, param in layer.shared_expert.named_parameters()} == {
        "gate_up_weight": (2, 24, 16),
        "down_weight": (16, 24),
    }
    x = random_rows(5, 16)
    context = ForwardContext(PackedSequence.from_lengths([5]))
    assert torch.allclose(layer(x, context) - build()(x, context), layer.shared_expert(x, context), atol=1e-7)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigError, match="--expert-model-parallel-size=4"):
        build(group=FakeGroup(0, 4))
    with pytest.raises(ConfigError, match="--add-bias-linear=on"):
        build(ModelConfig(hidden_size=16, add_bias_linear=True))
