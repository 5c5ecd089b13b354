"""The decoder in bf16 under each engine against one process: what weights are read in, and what their gradients are."""

from __future__ import annotations

import pytest
import torch

from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.models.parallelize import parallelize
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.gather import gather_full_gradients
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedBatch, PackedSequence
from tests.support.cases import small_config
from tests.support.processes import run_distributed
from tests.support.tolerances import RELATIVE_NORM, assert_close

VOCAB_SIZE = 50


def gradients(mesh: ParallelMesh, engine_name: str, untied: bool) -> dict[str, torch.Tensor]:
    """Whole gradients of two micro-batches, shared out among the ranks."""
    torch.set_num_threads(1)
    config = small_config(
        "unused",
        model={"untie_embeddings_and_output_weights": untied},
        moe={"num_experts": 0},
        parallel={"data_parallel_engine": engine_name},
        training={"precision": "bf16"},
    )
    built = build_model(config, VOCAB_SIZE, BuildPlace(mesh, torch.device("cpu"), HostReader()))
    engine = parallelize(built, mesh, config.parallel)
    for micro_batch in range(mesh.dp_rank, 2, mesh.dp_size):
        ids_T = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(micro_batch))
        sequence = PackedSequence.from_lengths([12, 18])
        with engine.micro_batch(micro_batch + mesh.dp_size >= 2):
            engine.module(PackedBatch(ids_T, ids_T.roll(-1), sequence, 30), ForwardContext(sequence)).backward()
    engine.finish_backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in engine.gradient_parameters())
    return gather_full_gradients(engine.module, mesh)


def gradients_of_rank(rank: int, world_size: int, engine_name: str, untied: bool) -> dict[str, torch.Tensor]:
    config = small_config("unused", parallel={"data_parallel_engine": engine_name})
    return gradients(ParallelMesh.build(config.parallel, "cpu"), engine_name, untied)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("engine_name", ["ddp", "fsdp2"])
def test_bf16_gradients_are_those_of_one_process(engine_name: str, untied: bool) -> None:
    expected = gradients(ParallelMesh(), engine_name, untied)
    for actual in run_distributed(gradients_of_rank, 2, engine_name, untied):
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, what=name, tolerance=RELATIVE_NORM[torch.bfloat16])
