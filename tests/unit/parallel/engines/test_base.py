"""The one-process engine, missing gradients, and specs that survive wrapping."""

from __future__ import annotations

import torch
from torch import nn

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.data_parallel import wrap_data_parallel
from megatron_glue.parallel.engines.base import SingleEngine, fill_missing_gradients, keep_shard_specs
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, set_shard_spec
from tests.support.toy_moe import STEP, ToyContext, ToyModel, run_step


def test_one_rank_gets_the_engine_that_reduces_nothing() -> None:
    mesh = ParallelMesh()
    for name in ("ddp", "fsdp2"):
        model = ToyModel(mesh)
        engine = wrap_data_parallel(model, mesh, ParallelConfig(data_parallel_engine=name), Precision(torch.float32))
        assert isinstance(engine, SingleEngine)
        assert engine.module is engine.model is model
        assert all(get_shard_spec(param) is not None for param in engine.gradient_parameters())
        assert "nothing to reduce" in engine.describe()


def test_f29_f30_gradients_of_micro_batches_add_up_to_those_of_the_whole_step() -> None:
    mesh = ParallelMesh()
    accumulated = SingleEngine(ToyModel(mesh, run="function"))
    run_step(accumulated, mesh)
    whole = SingleEngine(ToyModel(mesh))
    whole.module(ToyContext(torch.tensor([token for tokens in STEP for token in tokens]))).backward()
    for actual, expected in zip(accumulated.gradient_parameters(), whole.gradient_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_f55_missing_gradients_become_zeros_and_present_ones_stay() -> None:
    missing, present = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    present.grad = torch.full((2,), 3.0)
    fill_missing_gradients([missing, present])
    assert missing.grad is not None
    assert missing.grad.tolist() == [0, 0]
    assert present.grad.tolist() == [3, 3]


def test_reset_drops_gradients() -> None:
    engine = SingleEngine(nn.Linear(2, 2))
    engine.module(torch.ones(1, 2)).sum().backward()
    engine.reset()
    assert all(param.grad is None for param in engine.gradient_parameters())


def test_frozen_parameters_are_not_the_optimizers() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    assert SingleEngine(layer).gradient_parameters() == [layer.weight]


def test_specs_survive_replaced_parameters() -> None:
    layer = nn.Linear(2, 3)
    given = ShardSpec("given", (3, 2))
    set_shard_spec(layer.weight, given)
    with keep_shard_specs(layer):
        layer.weight = nn.Parameter(layer.weight.detach())
    assert get_shard_spec(layer.weight) is given
    assert get_shard_spec(layer.bias) == ShardSpec("bias", (3,))
