"""Every engine and layout gives the gradients of one process: with and without recompute, over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.parallel.data_parallel import DataParallelEngine, wrap_data_parallel
from megatron_glue.parallel.engines.base import SingleEngine
from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients
from megatron_glue.parallel.grad_norm import clip_gradients, global_grad_norm
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close
from tests.support.toy_moe import ToyModel, run_step

FP32 = Precision(torch.float32)
BF16 = Precision(torch.bfloat16)
LAYOUTS = [(2, 1), (2, 2), (4, 2)]
layouts = pytest.mark.parametrize(("world_size", "ep_size"), LAYOUTS, ids=["dp2", "ep2", "ep2xdp2"])
engines = pytest.mark.parametrize("engine_name", ["ddp", "fsdp2"])


def build(
    engine_name: str, ep_size: int, precision: Precision = FP32, **options: bool
) -> tuple[DataParallelEngine, ParallelMesh]:
    parallel = ParallelConfig(data_parallel_engine=engine_name, expert_model_parallel_size=ep_size)
    mesh = ParallelMesh.build(parallel, "cpu")
    model = ToyModel(mesh, dtype=precision.compute_dtype, **options)
    return wrap_data_parallel(model, mesh, parallel, precision), mesh


def reference(precision: Precision = FP32, **options: bool) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    mesh = ParallelMesh()
    engine = SingleEngine(ToyModel(mesh, dtype=precision.compute_dtype, **options))
    loss = run_step(engine, mesh)
    return loss, gather_full_gradients(engine.module, mesh), global_grad_norm(engine.gradient_parameters(), mesh)


def compare_with_one_process(rank: int, world_size: int, engine_name: str, ep_size: int) -> list[float]:
    expected_loss, expected, expected_norm = reference(recompute=False)
    norms = []
    for recompute in (False, True):
        engine, mesh = build(engine_name, ep_size, recompute=recompute)
        assert not differing_replicas(engine.module, mesh)
        for _ in range(2):
            engine.module.zero_grad(set_to_none=True)
            loss = run_step(engine, mesh)
            total = float(all_reduce_sum(torch.tensor(loss), mesh.dp_group))
            assert math.isclose(total, expected_loss, rel_tol=1e-5)
            actual = gather_full_gradients(engine.module, mesh)
            assert actual.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_close(actual[name], gradient, what=f"{name} (recompute {recompute})")
        norm = clip_gradients(engine.gradient_parameters(), 0.1, mesh)
        assert_close(norm, expected_norm, what="norm")
        clipped = global_grad_norm(engine.gradient_parameters(), mesh)
        assert math.isclose(float(clipped), 0.1, rel_tol=1e-4)
        norms.append(float(norm))
    return norms


@engines
@layouts
def test_f73_f53_gradients_and_norm_equal_one_process(engine_name: str, world_size: int, ep_size: int) -> None:
    results = run_distributed(compare_with_one_process, world_size, engine_name, ep_size)
    assert all(norms == results[0] for norms in results), "ranks must agree on the norm bit for bit"
