import itertools
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_glue.backends.grouped_mm import grouped_mm_torch
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ModelConfig, MoEConfig
from megatron_glue.moe.build import MoEExecution, MoEPlacement, build_moe_layer
from megatron_glue.moe.dispatcher_alltoall import AllToAllDispatcher
from megatron_glue.moe.layer import MoELayer
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import keeps_full_precision
from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, is_expert_parameter
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord
from tests.support.layer_cases import layer_build
from tests.support.moe_cases import random_rows

MODEL = ModelConfig(num_layers=2, hidden_size=16)
MOE = MoEConfig(num_experts=6, moe_router_topk=3, moe_ffn_hidden_size=8)


class FakeGroup:
    """Only what the builder asks of a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def expert_mesh(ep: tuple[int, int] = (0, 1), etp: tuple[int, int] = (0, 1), tp_size: int = 1) -> ParallelMesh:
    """A mesh of a rank that nobody talks to; places are (rank, size)."""
    group = cast(ProcessGroup, FakeGroup(ep[1] * etp[1]))
    return ParallelMesh(
        world_size=ep[1] * etp[1],
        sizes={"ep": ep[1], "etp": etp[1], "tensor": tp_size, "tp": tp_size},
        ranks={"ep": ep[0], "etp": etp[0]},
        groups={"ep_etp": group} if ep[1] * etp[1] > 1 else {},
        sequence_parallel=tp_size > 1,
    )


def build(
    model: ModelConfig = MODEL, moe: MoEConfig = MOE, name: str = "blocks.1.ffn", mesh: ParallelMesh | None = None
) -> MoELayer:
    execution = MoEExecution(grouped_mm_torch, HostReader())
    return build_moe_layer(model, moe, MoEPlacement(1, name), execution, layer_build(model, seed=5, mesh=mesh))


@pytest.mark.parametrize(("ep_size", "etp_size"), [(2, 1), (3, 1), (1, 2), (2, 4)])
def test_weights_and_specs_do_not_depend_on_the_layout_of_experts(ep_size, etp_size):
    whole = build()
    for ep_rank, etp_rank in itertools.product(range(ep_size), range(etp_size)):
        part = build(mesh=expert_mesh((ep_rank, ep_size), (etp_rank, etp_size)))
        assert torch.equal(part.router.weight, whole.router.weight)
        experts = slice(ep_rank * 6 // ep_size, (ep_rank + 1) * 6 // ep_size)
        width = slice(etp_rank * 8 // etp_size, (etp_rank + 1) * 8 // etp_size)
        for (name, param), full in zip(part.experts.named_parameters(), whole.experts.parameters(), strict=True):
            assert torch.equal(param, full[experts][:, :, width]), name
            assert get_shard_spec(param) == get_shard_spec(full)
            assert is_expert_parameter(param)
            assert is_expert_parameter(full)
        assert part.dispatcher.num_ranks == ep_size
        assert not part.dispatcher.is_local
    names = "blocks.1.ffn.experts.gate_up_weight", "blocks.1.ffn.experts.down_weight"
    shapes = (6, 2, 8, 16), (6, 16, 8)
    for param, name, shape in zip(whole.experts.parameters(), names, shapes, strict=True):
        assert get_shard_spec(param) == ShardSpec(name, shape, (("ep", 0), ("etp", 2)))


def test_f75_the_router_of_a_rank_with_some_of_the_rows_has_a_partial_gradient():
    name = "blocks.1.ffn.router.weight"
    assert get_shard_spec(build().router.weight) == ShardSpec(name, (6, 16))
    split = build(mesh=expert_mesh(tp_size=2)).router.weight
    assert get_shard_spec(split) == ShardSpec(name, (6, 16), partial_axes=("tp",))
    assert keeps_full_precision(split)


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
        moe_shared_expert_overlap=True,
    )
    layer = build(ModelConfig(hidden_size=16, swiglu=False), moe)
    config = layer.router.config
    assert (config.num_experts, config.top_k, config.score_function) == (4, 1, "sigmoid")
    assert (config.normalise_weights, config.weight_scale, config.has_expert_bias) == (False, 2.5, True)
    assert (layer.balance.aux_loss_coeff, layer.balance.z_loss_coeff, layer.balance.by_document) == (0.3, 0.4, True)
    assert layer.config.layer_index == layer.balance.layer_index == 1
    assert layer.config.overlap_shared_expert
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


def test_the_dispatcher_is_built_as_configured():
    moe = MoEConfig(num_experts=6, moe_overlap_chunks=3)
    dispatcher = build(moe=moe, mesh=expert_mesh((0, 2))).dispatcher
    assert isinstance(dispatcher, AllToAllDispatcher)
    assert dispatcher.chunk_sizes == [1, 1, 1]
    with pytest.raises(ConfigError, match="--moe-token-dispatcher-type=deepep"):
        build(moe=MoEConfig(num_experts=6, moe_token_dispatcher_type="deepep"), mesh=expert_mesh((0, 2)))


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigError, match="--expert-model-parallel-size=4"):
        build(mesh=expert_mesh((0, 4)))
    with pytest.raises(ConfigError, match="--expert-tensor-parallel-size=3"):
        build(mesh=expert_mesh(etp=(0, 3)))
    with pytest.raises(ConfigError, match="--add-bias-linear=on"):
        build(ModelConfig(hidden_size=16, add_bias_linear=True))
