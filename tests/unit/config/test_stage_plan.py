"""How layers are cut into stages, and what a user hears when they cannot be."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.loading import from_dict
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import StagePlan, schedule_kind, schedule_problems


def configured(num_layers: int, num_ranks: int, **parallel: Any) -> RunConfig:
    return from_dict(
        {
            "model": {"num_layers": num_layers},
            "parallel": {"pipeline_model_parallel_size": num_ranks, **parallel},
        }
    )


def counts(num_layers: int, num_ranks: int, **parallel: Any) -> list[int]:
    plan = StagePlan.from_config(configured(num_layers, num_ranks, **parallel))
    assert [layer for layers in plan.layers for layer in layers] == list(range(num_layers)), "each layer once, in order"
    return [len(layers) for layers in plan.layers]


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "parallel", "expected"),
    [
        (4, 1, {}, [4]),
        (4, 1, {"num_layers_per_virtual_pipeline_stage": 1, "decoder_first_pipeline_num_layers": 1}, [4]),
        (8, 4, {}, [2, 2, 2, 2]),
        (5, 2, {}, [3, 2]),
        (5, 4, {}, [2, 1, 1, 1]),
        (6, 4, {}, [2, 1, 2, 1]),
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [2, 2, 2, 2]),
        (7, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [2, 2, 2, 1]),
        (4, 2, {"num_layers_per_virtual_pipeline_stage": 1}, [1, 1, 1, 1]),
        (8, 4, {"decoder_first_pipeline_num_layers": 1}, [1, 3, 2, 2]),
        (8, 4, {"decoder_last_pipeline_num_layers": 1}, [3, 2, 2, 1]),
        (8, 2, {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 5}, [3, 5]),
        (8, 3, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2}, [1, 5, 2]),
    ],
)
def test_layers_are_spread(num_layers: int, num_ranks: int, parallel: dict[str, int], expected: list[int]) -> None:
    assert counts(num_layers, num_ranks, **parallel) == expected


def test_a_rank_holds_one_stage_of_each_round() -> None:
    plan = StagePlan.from_config(configured(8, 2, num_layers_per_virtual_pipeline_stage=2))
    assert plan.stages_of(0) == (0, 2)
    assert plan.stages_of(1) == (1, 3)
    assert plan.describe() == "4 stages on 2 ranks, layers 2 + 2 + 2 + 2"


def test_1f1b_over_virtual_stages_is_the_interleaved_schedule() -> None:
    assert schedule_kind(configured(8, 2)) == "1f1b"
    assert schedule_kind(configured(8, 2, num_layers_per_virtual_pipeline_stage=2)) == "interleaved"
    assert schedule_kind(configured(8, 2, num_layers_per_virtual_pipeline_stage=2, pipeline_schedule="zb")) == "zb"


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "parallel", "flag", "reason"),
    [
        (3, 4, {}, "--pipeline-model-parallel-size=4", "makes 4 stages out of --num-layers 3"),
        (
            5,
            2,
            {"num_layers_per_virtual_pipeline_stage": 1},
            "--num-layers-per-virtual-pipeline-stage=1",
            "makes 6 stages out of --num-layers 5",
        ),
        (
            8,
            2,
            {"num_layers_per_virtual_pipeline_stage": 4},
            "--num-layers-per-virtual-pipeline-stage=4",
            "leaves each of the 2 pipeline ranks with one stage",
        ),
        (
            8,
            4,
            {"decoder_first_pipeline_num_layers": 6},
            "--decoder-first-pipeline-num-layers=6",
            "leaves 2 of --num-layers 8 for the other 3 stages",
        ),
        (
            8,
            2,
            {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 4},
            "--decoder-first-pipeline-num-layers=3",
            "leaves 1 of --num-layers 8 for the other 0 stages",
        ),
    ],
)
def test_a_cut_that_does_not_come_out_is_refused(
    num_layers: int, num_ranks: int, parallel: dict[str, int], flag: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        StagePlan.from_config(configured(num_layers, num_ranks, **parallel))
    assert str(caught.value).startswith(f"{flag}: ")
    assert reason in str(caught.value)


RECOMPUTE = {"activation": {"recompute_granularity": "full"}}
DOUBLE_BUFFER = {"training": {"accelerator": {"enable_double_buffer": True}}}
VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}


def problems(world_size: int, global_batch_size: int, parallel: dict[str, Any], **sections: Any) -> list[str]:
    sections.setdefault("training", {})["global_batch_size"] = global_batch_size
    sections["parallel"] = {"pipeline_model_parallel_size": 2, **parallel}
    config = from_dict({"model": {"num_layers": 4}, **sections})
    return [str(problem) for problem in schedule_problems(config, world_size)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_schedule_that_torch_can_run_is_let_through(schedule: str, world_size: int) -> None:
    assert problems(world_size, 4, {"pipeline_schedule": schedule}) == []


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 6])
def test_interleaved_lets_through_what_torch_can_run(num_micro_batches: int) -> None:
    assert problems(2, num_micro_batches, {"pipeline_schedule": "interleaved", **VIRTUAL}) == []


@pytest.mark.parametrize(
    ("world_size", "global_batch_size", "parallel", "sections", "start", "reason"),
    [
        (2, 1, {}, {}, "--global-batch-size=1: ", "1 micro-batches per step for 2 pipeline stages"),
        (4, 2, {}, {}, "--global-batch-size=2: ", "use at least 4, or --pipeline-schedule gpipe"),
        (2, 5, {"pipeline_schedule": "zb"}, {}, "--global-batch-size=5: ", "in 2 rounds over 2 pipeline ranks"),
        (2, 5, VIRTUAL, {}, "--global-batch-size=5: ", "use e.g. 4"),
        (2, 4, {"pipeline_schedule": "interleaved"}, {}, "--pipeline-schedule=interleaved: ", "nothing to interleave"),
        (2, 4, {"pipeline_schedule": "gpipe", **VIRTUAL}, {}, "--pipeline-schedule=gpipe: ", "one stage per rank"),
        (2, 4, {"pipeline_schedule": "zb"}, RECOMPUTE, "--pipeline-schedule=zb: ", "in two passes"),
        (2, 4, {"pipeline_schedule": "zb"}, DOUBLE_BUFFER, "--pipeline-schedule=zb: ", "in two passes"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_anything_is_built(
    world_size: int, global_batch_size: int, parallel: dict[str, Any], sections: Any, start: str, reason: str
) -> None:
    (problem,) = problems(world_size, global_batch_size, parallel, **deepcopy(sections))
    assert problem.startswith(start)
    assert reason in problem
