"""DeepSpeed gives the gradients, norms and weights of one process, at every stage, and skips as one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.precision import local
from tests.support.deepspeed_runs import ToyRun, needs_deepspeed
from tests.support.processes import run_distributed
from tests.support.tolerances import RELATIVE_NORM, assert_close
from tests.support.toy_moe import STEP

pytestmark = needs_deepspeed

# world, stage, ep, bf16, experts. Stage 3 has no experts.
CASES = {
    "stage0": (2, 0, 1, False, True),
    "stage1": (2, 1, 1, False, True),
    "stage2": (2, 2, 1, False, True),
    "stage3": (2, 3, 1, False, False),
    "stage3-dp4": (4, 3, 1, False, False),
    "stage0-ep2": (2, 0, 2, False, True),
    "stage1-ep2": (2, 1, 2, False, True),
    "stage1-ep2xdp2": (4, 1, 2, False, True),
    "stage2-ep2xdp2": (4, 2, 2, False, True),
    "stage0-bf16": (4, 0, 2, True, True),
    "stage1-bf16": (4, 1, 2, True, True),
    "stage2-bf16": (4, 2, 2, True, True),
    "stage3-bf16": (2, 3, 1, True, False),
}


def compare(rank: int, world_size: int, stage: int, ep_size: int, bf16: bool, has_experts: bool) -> list[float]:
    one = ToyRun(bf16=bf16, has_experts=has_experts)
    run = ToyRun("deepspeed", stage, ep_size, bf16=bf16, has_experts=has_experts)
    tolerance = RELATIVE_NORM[torch.bfloat16 if bf16 else torch.float32]
    for name, tensor in one.weights().items():
        assert torch.equal(run.weights()[name], tensor), f"{name}: masters start unrounded"
    norms = []
    for _ in range(3):
        assert math.isclose(run.backward(), one.backward(), rel_tol=tolerance)
        expected = one.engine.full_gradients()
        actual = run.engine.full_gradients()
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, what=f"gradient of {name}", tolerance=tolerance)
        norms.append(run.update())
        expected_norm = one.update()
        assert expected_norm > 0.5, "clipping must be at work"
        assert math.isclose(norms[-1], expected_norm, rel_tol=tolerance)
    for name, tensor in one.tensors().items():
        assert_close(run.tensors()[name], tensor, what=name, tolerance=tolerance * 10)
    return norms


@pytest.mark.parametrize("case", CASES)
def test_f73_gradients_norms_and_weights_equal_one_process(case: str) -> None:
    world_size, *settings = CASES[case]
    norms = run_distributed(compare, world_size, *settings)
    assert all(own == norms[0] for own in norms), "ranks must agree on the norm bit for bit"


def compare_three_ranks(rank: int, world_size: int, stage: int) -> None:
    step = STEP[:6]
    one, run = ToyRun(has_experts=False), ToyRun("deepspeed", stage, has_experts=False)
    one.backward(step)
    run.backward(step)
    for name, gradient in one.engine.full_gradients().items():
        assert_close(run.engine.full_gradients()[name], gradient, what=name)
    assert math.isclose(run.update(), one.update(), rel_tol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_sums_over_a_number_of_ranks_that_is_no_power_of_two(stage: int) -> None:
    run_distributed(compare_three_ranks, 3, stage)


def skip_together(rank: int, world_size: int, stage: int, bf16: bool) -> list[float]:
    has_experts = stage != 3
    run = ToyRun("deepspeed", stage, bf16=bf16, has_experts=has_experts)
    never = ToyRun("deepspeed", stage, bf16=bf16, has_experts=has_experts)
    run.train(1)
    never.train(1)
    before = run.tensors()
    backward = run.engine.backward
    run.engine.backward = lambda loss: backward(loss * math.nan if rank == 1 else loss)
    run.backward()
    assert not math.isfinite(run.update())
    run.engine.backward = backward
    for name, tensor in before.items():
        assert torch.equal(run.tensors()[name], tensor), f"{name} changed in a step that is skipped"
    skipped = [run.optimizer.num_skipped_updates]
    assert run.train(2) == never.train(2)
    for name, tensor in never.tensors().items():
        assert torch.equal(run.tensors()[name], tensor), f"{name} differs after a skipped step"
    return [*skipped, run.optimizer.num_skipped_updates]


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True)])
def test_f113_nan_on_one_rank_skips_the_update_on_all(stage: int, bf16: bool) -> None:
    assert run_distributed(skip_together, 2, stage, bf16) == [[1, 1], [1, 1]]


def read_routers(rank: int, world_size: int, root: str, stage: int) -> None:
    run, other = (ToyRun("deepspeed", stage, bf16=True) for _ in range(2))

    def check(one: ToyRun, what: str) -> None:
        router = one.engine.model.blocks[0].managed.router
        master = one.weights()["blocks.0.router"]
        assert router.dtype == torch.bfloat16
        assert not torch.equal(master, master.bfloat16().float()), "rounding would show"
        assert torch.equal(local(router, torch.float32), master), what

    check(run, "at the start")
    run.train(1)
    check(run, "after an update")
    run.store(root).save(1, run.state())
    other.scramble()
    other.store(root).load(Path(root) / "step_00000001", other.state())
    check(other, "after a load")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_router_reads_its_unrounded_weights_in_bf16(tmp_path: Path, stage: int) -> None:
    run_distributed(read_routers, 2, str(tmp_path), stage)


def drop_gradients(rank: int, world_size: int, stage: int) -> None:
    run, clean = (ToyRun("deepspeed", stage, has_experts=stage != 3) for _ in range(2))
    run.backward()
    run.engine.reset()
    run.backward()
    clean.backward()
    for name, gradient in clean.engine.full_gradients().items():
        assert torch.equal(run.engine.full_gradients()[name], gradient), name
    assert run.update() == clean.update()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_dropped_leave_nothing_behind(stage: int) -> None:
    run_distributed(drop_gradients, 2, stage)


def offload(rank: int, world_size: int, stage: int, path: str) -> None:
    one, run = ToyRun(has_experts=stage != 3), ToyRun("deepspeed", stage, has_experts=stage != 3, config_path=path)
    for _ in range(2):
        one.backward()
        run.backward()
        for name, gradient in one.engine.full_gradients().items():
            assert_close(run.engine.full_gradients()[name], gradient, what=f"gradient of {name}")
        assert math.isclose(run.update(), one.update(), rel_tol=1e-5)
    for name, tensor in one.tensors().items():
        assert_close(run.tensors()[name], tensor, what=name, tolerance=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_to_the_cpu_changes_nothing(tmp_path: Path, stage: int) -> None:
    path = tmp_path / "file.json"
    section = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
    path.write_text(json.dumps({"zero_optimization": section}))
    run_distributed(offload, 2, stage, str(path))


def read_settings(rank: int, world_size: int, path: str) -> list[object]:
    run = ToyRun("deepspeed", 2, config_path=path)
    engine = run.engine.module
    return [engine.zero_reduce_bucket_size(), engine.steps_per_print(), engine.zero_optimization_stage()]


def test_what_no_flag_decides_goes_to_deepspeed_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 4321, "stage": 2}, "steps_per_print": 77}))
    assert run_distributed(read_settings, 2, str(path)) == [[4321, 77, 2]] * 2


def be_refused(rank: int, world_size: int, path: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        ToyRun("deepspeed", 2, config_path=path)
    return [str(error.value)]


def test_a_file_that_deepspeed_refuses_is_one_line_about_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": "many"}}))
    answers = run_distributed(be_refused, 2, str(path))
    assert answers[0] == answers[1]
    assert answers[0][0].startswith(f"--deepspeed-config={path}: DeepSpeed refuses it: ")
    assert "\n" not in answers[0][0]
