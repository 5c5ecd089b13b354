"""Every engine and layout gives the gradients of one process: with and without recompute, over micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.parallel.data_parallel import DataParallelEngine, wrap_data_parallel
from megatron_glue.parallel.engines.base import SingleEngine, keep_shard_specs
from megatron_glue.parallel.engines.fsdp2 import Fsdp2Engine
from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients, gather_full_parameters
from megatron_glue.parallel.grad_norm import clip_gradients, global_grad_norm
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision, track_updates
from tests.support.processes import run_distributed
from tests.support.tolerances import RELATIVE_NORM, assert_close
from tests.support.toy_moe import RUNNERS, ToyContext, ToyModel, run_step

FP32 = Precision(torch.float32)
BF16 = Precision(torch.bfloat16)
LAYOUTS = [(2, 1), (2, 2), (4, 2)]
layouts = pytest.mark.parametrize(("world_size", "ep_size"), LAYOUTS, ids=["dp2", "ep2", "ep2xdp2"])
engines = pytest.mark.parametrize("engine_name", ["ddp", "fsdp2"])


def build(
    engine_name: str, ep_size: int, precision: Precision = FP32, **options: Any
) -> tuple[DataParallelEngine, ParallelMesh]:
    parallel = ParallelConfig(data_parallel_engine=engine_name, expert_model_parallel_size=ep_size)
    mesh = ParallelMesh.build(parallel, "cpu")
    model = ToyModel(mesh, dtype=precision.compute_dtype, **options)
    return wrap_data_parallel(model, mesh, parallel, precision), mesh


def reference(precision: Precision = FP32, **options: Any) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    mesh = ParallelMesh()
    engine = SingleEngine(ToyModel(mesh, dtype=precision.compute_dtype, **options))
    loss = run_step(engine, mesh)
    return loss, gather_full_gradients(engine.module, mesh), global_grad_norm(engine.gradient_parameters(), mesh)


def compare_with_one_process(rank: int, world_size: int, engine_name: str, ep_size: int) -> list[float]:
    expected_loss, expected, expected_norm = reference()
    norms = []
    for run in RUNNERS:
        engine, mesh = build(engine_name, ep_size, run=run)
        assert not differing_replicas(engine.module, mesh)
        for _ in range(2):
            engine.module.zero_grad(set_to_none=True)
            loss = run_step(engine, mesh)
            total = float(all_reduce_sum(torch.tensor(loss), mesh.dp_group))
            assert math.isclose(total, expected_loss, rel_tol=1e-5)
            actual = gather_full_gradients(engine.module, mesh)
            assert actual.keys() == expected.keys()
            for name, gradient in expected.items():
                assert_close(actual[name], gradient, what=f"{name} (run: {run})")
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


def compare_rarely_reached_parameters(rank: int, world_size: int, engine_name: str) -> None:
    _, expected, _ = reference(run="function", has_rare=True)
    engine, mesh = build(engine_name, 1, run="function", has_rare=True)
    for _ in range(2):
        engine.module.zero_grad(set_to_none=True)
        run_step(engine, mesh)
        actual = gather_full_gradients(engine.module, mesh)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, what=name)


@engines
def test_f54_parameter_that_only_one_rank_reaches(engine_name: str) -> None:
    run_distributed(compare_rarely_reached_parameters, 2, engine_name)


def compare_unreached_parameter(rank: int, world_size: int, engine_name: str) -> None:
    engine, mesh = build(engine_name, 2, run="function", has_rare=True)
    context = ToyContext(torch.tensor([1, 2, 3]))
    with engine.micro_batch(is_last=True):
        engine.module(context).backward()
    engine.finish_backward()
    rare = gather_full_gradients(engine.module, mesh)["blocks.0.rare"]
    assert torch.equal(rare, torch.zeros_like(rare))
    assert all(param.grad is not None for param in engine.gradient_parameters())


@engines
def test_f55_parameter_that_no_rank_reaches_gets_zeros(engine_name: str) -> None:
    run_distributed(compare_unreached_parameter, 2, engine_name)


def compare_bf16(rank: int, world_size: int, engine_name: str, ep_size: int) -> None:
    _, expected, expected_norm = reference(BF16)
    _, exact, _ = reference(FP32)
    assert any(not torch.equal(exact[name], expected[name]) for name in exact), "bf16 must really be used"
    for run in RUNNERS:
        engine, mesh = build(engine_name, ep_size, BF16, run=run)
        run_step(engine, mesh)
        for param in engine.gradient_parameters():
            assert param.dtype == torch.float32
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
        actual = gather_full_gradients(engine.module, mesh)
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, what=name, tolerance=RELATIVE_NORM[torch.bfloat16])
        norm = global_grad_norm(engine.gradient_parameters(), mesh)
        assert_close(norm, expected_norm, tolerance=RELATIVE_NORM[torch.bfloat16])


@engines
def test_bf16_compute_keeps_masters_and_sums_in_fp32(engine_name: str) -> None:
    run_distributed(compare_bf16, 4, engine_name, 2)


def compare_router_reads(rank: int, world_size: int, engine_name: str) -> None:
    engine, mesh = build(engine_name, 1, BF16)
    seen: list[torch.Tensor] = []
    block = engine.model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: seen.append(module.managed.router.detach().clone()))
    with torch.no_grad():
        engine.module(ToyContext(torch.tensor([1])))
    whole = gather_full_parameters(engine.module, mesh)["blocks.0.router"]
    assert torch.equal(seen[0], whole), "a marked parameter reaches its layer unrounded"


@engines
def test_parameter_marked_for_full_precision_is_read_unrounded(engine_name: str) -> None:
    run_distributed(compare_router_reads, 2, engine_name)


def compare_whole_experts(rank: int, world_size: int) -> None:
    _, expected, expected_norm = reference()
    parallel = ParallelConfig(data_parallel_engine="fsdp2", expert_model_parallel_size=2)
    mesh = ParallelMesh.build(parallel, "cpu")
    model = ToyModel(mesh, run="function")
    with keep_shard_specs(model):
        engine = Fsdp2Engine(model, mesh, FP32, shard_experts=False)
    run_step(engine, mesh)
    for name, gradient in gather_full_gradients(engine.module, mesh).items():
        assert_close(gradient, expected[name], what=name)
    assert_close(global_grad_norm(engine.gradient_parameters(), mesh), expected_norm)


def test_fsdp2_without_per_parameter_meshes_sums_whole_experts() -> None:
    run_distributed(compare_whole_experts, 4)


def train_two_steps(engine: DataParallelEngine, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for param in engine.gradient_parameters():
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    # A large eps keeps Adam from turning rounding noise of tiny gradients into full steps.
    optimizer = torch.optim.AdamW([{"params": params} for params in groups.values()], lr=0.1, eps=0.1, fused=True)
    track_updates(optimizer)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        run_step(engine, mesh)
        clip_gradients(engine.gradient_parameters(), 1.0, mesh)
        optimizer.step()
        with torch.no_grad():
            engine.module(ToyContext(torch.tensor([1, 2])))
    return gather_full_parameters(engine.module, mesh)


def compare_training(rank: int, world_size: int, engine_name: str, ep_size: int) -> None:
    expected = train_two_steps(SingleEngine(ToyModel(ParallelMesh())), ParallelMesh())
    engine, mesh = build(engine_name, ep_size, run="function")
    before = gather_full_parameters(engine.module, mesh)
    actual = train_two_steps(engine, mesh)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert not torch.equal(before[name], value)
        assert_close(actual[name], value, what=name, tolerance=1e-4)
    assert not differing_replicas(engine.module, mesh)


@engines
def test_trained_weights_equal_one_process(engine_name: str) -> None:
    run_distributed(compare_training, 4, engine_name, 2)


def compare_evaluation(rank: int, world_size: int, engine_name: str) -> None:
    context = ToyContext(torch.tensor([1, 2, 3, 4]))
    mesh = ParallelMesh()
    single = ToyModel(mesh, run="function")
    engine, mesh = build(engine_name, 2, BF16, run="function")
    exact, _ = build(engine_name, 2, FP32, run="function")
    with torch.no_grad():
        assert_close(exact.module(context), single(context))
        assert_close(exact.model.logits(context), single.logits(context))
        engine.module(context)
    for param in engine.model.parameters():
        assert param.dtype == torch.float32, "after an evaluation the model's parameters are the masters again"
        assert param.requires_grad


@engines
def test_evaluation_and_sampling_leave_the_masters_registered(engine_name: str) -> None:
    run_distributed(compare_evaluation, 2, engine_name)


class Boom(Exception):
    pass


def raise_boom(module: torch.nn.Module, args: object) -> None:
    raise Boom


def recover_from_exception(rank: int, world_size: int, engine_name: str) -> None:
    _, expected, _ = reference()
    engine, mesh = build(engine_name, 1, run="function")
    run_step(engine, mesh)
    handle = engine.model.blocks[1].managed.experts.register_forward_pre_hook(raise_boom)
    engine.module.zero_grad(set_to_none=True)
    with pytest.raises(Boom):
        run_step(engine, mesh)
    handle.remove()
    engine.reset()
    run_step(engine, mesh)
    for name, gradient in gather_full_gradients(engine.module, mesh).items():
        assert_close(gradient, expected[name], what=name)


@engines
def test_a_step_works_after_an_aborted_one(engine_name: str) -> None:
    run_distributed(recover_from_exception, 2, engine_name)


class RaiseOnSecondCall:
    """A hook that lets a block's forward pass and breaks its recompute."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise Boom


def recover_from_exception_in_backward(rank: int, world_size: int) -> None:
    _, expected, _ = reference()
    engine, mesh = build("fsdp2", 1, run="function")
    handle = engine.model.blocks[0].managed.register_forward_pre_hook(RaiseOnSecondCall())
    with pytest.raises(Boom):
        run_step(engine, mesh)
    handle.remove()
    engine.reset()
    run_step(engine, mesh)
    for name, gradient in gather_full_gradients(engine.module, mesh).items():
        assert_close(gradient, expected[name], what=name)


def test_fsdp2_works_after_an_aborted_backward() -> None:
    run_distributed(recover_from_exception_in_backward, 2)
