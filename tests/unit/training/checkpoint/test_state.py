"""Names, facts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ModelConfig, MoEConfig, OptimizerConfig, RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.files import CheckpointError
from megatron_glue.training.checkpoint.index import SavedTensor
from megatron_glue.training.checkpoint.parts import GlobalTensor
from megatron_glue.training.checkpoint.state import (
    TrainingState,
    check_same_model,
    check_same_tensors,
    collect_facts,
    collect_tensors,
    model_facts,
    restore_rng,
    rng_tensors,
)
from megatron_glue.training.optimizer import build_optimizer

CPU = torch.device("cpu")
MESH = ParallelMesh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("balance", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)


def state_of(model: nn.Module, **fields) -> TrainingState:
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(), "fused", CPU)
    return TrainingState(model, optimizer, RunConfig(**fields), {"iteration": 3}, {"pack": 5})


def test_each_tensor_has_one_name_that_wrappers_do_not_change() -> None:
    expected = {
        "model.embedding.weight",
        "model.balance",
        "optimizer.embedding.weight.step",
        "optimizer.embedding.weight.exp_avg",
        "optimizer.embedding.weight.exp_avg_sq",
    }
    model = Tied()
    assert collect_tensors(state_of(model), MESH).keys() == expected
    wrapper = nn.Module()
    wrapper.module = model
    assert collect_tensors(state_of(wrapper), MESH).keys() == expected


def test_tensors_share_memory_and_version_with_the_model() -> None:
    model = Tied()
    version = model.embedding.weight._version
    collect_tensors(state_of(model), MESH)["model.embedding.weight"].parts[0].tensor.fill_(2.0)
    assert (model.head.weight == 2).all()
    assert model.embedding.weight._version > version


def test_facts_are_json() -> None:
    facts = collect_facts(state_of(Tied()), 9, MESH)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["step"], facts["counters"], facts["data_position"]) == (9, {"iteration": 3}, {"pack": 5})
    assert facts["config"]["optimizer"]["lr"] == OptimizerConfig().lr


def test_facts_name_the_source_of_every_value_that_is_no_default() -> None:
    sources = {"lr": "command line", "num_layers": "file a.yaml", "seed": "default"}
    state = replace(state_of(Tied()), provenance=sources)
    assert collect_facts(state, 9, MESH)["provenance"] == {"lr": "command line", "num_layers": "file a.yaml"}


def test_generators_come_back() -> None:
    states = rng_tensors(CPU, MESH)
    first = torch.rand(3)
    restore_rng(states, CPU)
    assert torch.equal(torch.rand(3), first)


def test_another_model_is_refused_with_every_field_and_both_values() -> None:
    saved = model_facts(RunConfig(model=ModelConfig(num_layers=2, hidden_size=64)))
    present = RunConfig(model=ModelConfig(num_layers=3, hidden_size=64), moe=MoEConfig(num_experts=4))
    with pytest.raises(ConfigError) as caught:
        check_same_model(json.loads(json.dumps(saved)), present, "runs/a/step_00000001")
    assert str(caught.value) == (
        "--num-layers, --num-experts=3, 4: runs/a/step_00000001 holds a model with --num-layers 2, --num-experts 0; "
        "set them to the saved values, or give --save another folder to start a new run"
    )


def test_what_follows_from_another_setting_is_named_only_if_it_stays_wrong() -> None:
    def difference(saved: RunConfig, present: RunConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            check_same_model(json.loads(json.dumps(model_facts(saved))), present, "x")
        return f"{caught.value.field}={caught.value.value}, {caught.value.reason}"

    wide, moe = ModelConfig(hidden_size=512), MoEConfig(num_experts=4, moe_layer_freq=(0, 1, 0, 1))
    assert difference(RunConfig(), RunConfig(model=wide)) == "--hidden-size=512, x holds a model with --hidden-size 256"
    own = wide.model_copy(update={"ffn_hidden_size": 100, "qk_layernorm": True})
    assert difference(RunConfig(), RunConfig(model=own)) == (
        "--hidden-size, --qk-layernorm, --ffn-hidden-size=512, on, 100, "
        "x holds a model with --hidden-size 256, --qk-layernorm off, --ffn-hidden-size 704"
    )
    assert difference(RunConfig(moe=moe), RunConfig()) == (
        "--num-experts, --moe-layer-freq=0, 1 1 1 1, x holds a model with --num-experts 4, --moe-layer-freq 0 1 0 1"
    )
    fewer = RunConfig(model=ModelConfig(num_layers=2), moe=moe.model_copy(update={"moe_layer_freq": (1, 0)}))
    assert difference(RunConfig(moe=moe), fewer) == (
        "--num-layers, --moe-layer-freq=2, 1 0, x holds a model with --num-layers 4, --moe-layer-freq 0 1 0 1"
    )


def test_settings_that_are_no_shapes_may_change() -> None:
    before = RunConfig(model=ModelConfig(hidden_size=64), moe=MoEConfig(num_experts=2))
    after = RunConfig(
        model=ModelConfig(hidden_size=64, ffn_hidden_size=before.model.ffn_width, hidden_dropout=0.1),
        moe=MoEConfig(num_experts=2, moe_router_topk=1, moe_layer_freq=(1, 1, 1, 1)),
        optimizer=OptimizerConfig(lr=1.0),
    )
    check_same_model(json.loads(json.dumps(model_facts(before))), after, "x")


def test_other_tensors_are_refused() -> None:
    def saved(*shape: int, dtype: torch.dtype = torch.float32) -> SavedTensor:
        return SavedTensor(dtype, shape, ())

    wanted = {"model.a": GlobalTensor.whole(torch.zeros(2, 3)), "model.b": GlobalTensor.whole(torch.zeros(1))}
    good = {"model.a": saved(2, 3), "model.b": saved(1), "optimizer.a.step": saved(), "rng.cpu.00000": saved(9)}
    check_same_tensors(good, wanted, "x")
    for changed, line in (
        ({"model.c": saved(1)}, "x: has, and this run has not, 1 tensors: model.c"),
        ({"model.a": saved(3, 2)}, r"x: model.a is \(3, 2\) torch.float32, this run needs \(2, 3\) torch.float32"),
        ({"model.b": saved(1, dtype=torch.bfloat16)}, r"model.b is \(1,\) torch.bfloat16"),
    ):
        with pytest.raises(CheckpointError, match=line):
            check_same_tensors(good | changed, wanted, "x")
    del good["model.b"]
    with pytest.raises(CheckpointError, match=r"x: lacks 1 tensors: model\.b"):
        check_same_tensors(good, wanted, "x")


def test_what_another_pipeline_stage_wants_is_not_left_over() -> None:
    saved = {f"model.blocks.{i}.weight": SavedTensor(torch.float32, (2,), ()) for i in range(3)}
    wanted = {"model.blocks.0.weight": GlobalTensor.whole(torch.zeros(2))}
    check_same_tensors(saved, wanted, "x", known=set(saved))
    with pytest.raises(CheckpointError, match=r"has, and this run has not, 1 tensors: model\.blocks\.2\.weight"):
        check_same_tensors(saved, wanted, "x", known={"model.blocks.0.weight", "model.blocks.1.weight"})
