"""One rank's place in a pipeline, with parts small enough to see through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.config.stage_plan import ScheduleKind, StagePlan
from megatron_glue.parallel import pipeline
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.pipeline import Pipeline, PipelineShape, StagePart
from megatron_glue.types import ForwardContext, PackedBatch, PackedSequence
from tests.support.processes import run_distributed

NUM_TOKENS, WIDTH, NUM_STAGES = 4, 3, 4


class Part(nn.Module):
    """Multiplies by its weight; the first part starts from ids, the last one sums."""

    def __init__(self, stage: int, fails: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.fails = fails
        self.weight = nn.Parameter(torch.tensor(1.0 + stage))
        self.seen: list[int] = []

    def forward(self, batch: PackedBatch, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        self.seen.append(context.micro_batch)
        if self.fails:
            raise OSError("the disk is full")
        out_TD = self.activations(batch.input_ids_T, context, x_TD)
        return out_TD.sum() if self.stage == NUM_STAGES - 1 else out_TD

    def activations(self, input_ids_T: Tensor, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        assert (x_TD is None) == (self.stage == 0)
        start_TD = input_ids_T[:, None].expand(-1, WIDTH).float() if x_TD is None else x_TD
        return start_TD * self.weight

    def logits(self, input_ids_T: Tensor, context: ForwardContext, row: int, x_TD: Tensor | None = None) -> Tensor:
        return self.activations(input_ids_T, context, x_TD)[row]


def inputs(num_micro_batches: int) -> list[tuple[PackedBatch, ForwardContext]]:
    sequence = PackedSequence.from_lengths([NUM_TOKENS])
    ids = [torch.full((NUM_TOKENS,), 1 + index) for index in range(num_micro_batches)]
    return [
        (PackedBatch(ids_T, ids_T, sequence, NUM_TOKENS), ForwardContext(sequence, micro_batch=index))
        for index, ids_T in enumerate(ids)
    ]


def build(
    kind: ScheduleKind, num_micro_batches: int, parts: list[Part], ends: list[int], mesh: ParallelMesh
) -> Pipeline:
    plan = StagePlan(tuple(range(stage, stage + 1) for stage in range(NUM_STAGES)), mesh.pp_size)
    shape = PipelineShape(num_micro_batches, NUM_TOKENS, WIDTH, WIDTH, torch.float32, torch.device("cpu"))
    stages = [StagePart(part.stage, part, lambda stage=part.stage: ends.append(stage)) for part in parts]
    return Pipeline(stages, plan, kind, shape, mesh)


def mesh_of(world_size: int) -> ParallelMesh:
    return ParallelMesh.build(ParallelConfig(pipeline_model_parallel_size=world_size), "cpu")


def buffer_addresses(stage: PipelineStage) -> list[int]:
    """Of the buffers that activations are received in."""
    infos = [info for of_chunk in stage.args_recv_info.values() for info in of_chunk]
    return [info.buffer.data_ptr() for info in infos if isinstance(info.buffer, Tensor)]


def run_on_rank(rank: int, world_size: int, kind: ScheduleKind) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    parts, ends = [Part(stage) for stage in range(rank, NUM_STAGES, world_size)], []
    built = build(kind, 4, parts, ends, mesh)
    found: dict[str, Any] = {"losses": [], "seen": [], "ends": []}
    for _ in range(2):
        found["losses"].append(float(built.train(inputs(4), 0.5)))
    found["buffers"] = [len(set(buffer_addresses(stage))) for stage in built._stages]
    found["gradients"] = {part.stage: float(part.weight.grad or 0.0) for part in parts}
    found["seen"] = [sorted(part.seen) for part in parts]
    found["num_ends"] = len(ends)
    found["evaluated"] = float(built.evaluate(inputs(3)))
    sequence = PackedSequence.from_lengths([7])
    found["logits"] = built.next_logits(torch.arange(7), ForwardContext(sequence), 5).tolist()
    found["ends_of_evaluation"] = len(ends) - found["num_ends"]
    return found


@pytest.mark.parametrize(("world_size", "kind"), [(4, "1f1b"), (4, "gpipe"), (2, "interleaved"), (2, "zb"), (4, "zb")])
def test_sums_reach_every_stage_and_nothing_is_divided(world_size: int, kind: ScheduleKind) -> None:
    if kind == "zb" and not pipeline.splits_backward_of_functions():
        pytest.skip("this torch cannot split the backward of an autograd Function")
    product = float(torch.arange(1, NUM_STAGES + 1).prod())
    tokens = NUM_TOKENS * WIDTH * (1 + 2 + 3 + 4)
    ranks = run_distributed(run_on_rank, world_size, kind)
    for rank, found in enumerate(ranks):
        is_last = rank == world_size - 1
        assert found["losses"] == ([product * tokens] * 2 if is_last else [0.0, 0.0])
        for stage, gradient in found["gradients"].items():
            assert gradient == pytest.approx(2 * 0.5 * product / (1 + stage) * tokens), "two steps, loss scale 0.5"
        assert all(seen == [0, 0, 1, 1, 2, 2, 3, 3] for seen in found["seen"]), "no extra forward to find shapes"
        assert found["num_ends"] == 8 * len(found["seen"])
        assert found["evaluated"] == (product * NUM_TOKENS * WIDTH * (1 + 2 + 3) if is_last else 0.0)
        assert found["logits"] == [product * 5] * WIDTH, "on every rank, and of another length than in training"
        assert found["ends_of_evaluation"] == 0
        if kind == "1f1b":
            assert found["buffers"] == [0 if rank == 0 else world_size - rank], "as many as are in flight at one time"


def refuse_on_rank(rank: int, world_size: int) -> str:
    pipeline.splits_backward_of_functions = lambda: False
    with pytest.raises(ConfigError) as caught:
        build("zb", 4, [Part(rank)], [], mesh_of(world_size))
    return str(caught.value)


def test_zero_bubble_is_refused_where_torch_cannot_split_a_backward() -> None:
    for said in run_distributed(refuse_on_rank, 4):
        assert said.startswith(f"--pipeline-schedule=zb: torch {torch.__version__} cannot compute")


def fail_on_rank(rank: int, world_size: int) -> str:
    mesh = mesh_of(world_size)
    parts = [Part(rank, fails=rank == world_size - 1)]
    built = build("gpipe", 1, parts, [], mesh)
    try:
        built.train(inputs(1), 1.0)
    except OSError as error:
        # The stage before waits for a gradient.
        dist.send(torch.zeros(NUM_TOKENS, WIDTH), group=mesh.pp_group, group_dst=world_size - 2)
        return str(error)
    return ""


def test_a_blocks_own_error_leaves_the_pipeline() -> None:
    assert run_distributed(fail_on_rank, 4) == ["", "", "", "the disk is full"]
