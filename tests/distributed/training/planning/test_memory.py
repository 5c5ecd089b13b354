"""What engines keep between steps is what the memory estimate says, on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_glue.parallel.grad_norm import local_gradient
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.planning.memory import estimate_memory
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_settled_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"expert_model_parallel_size": 2},
    "fsdp2": {"data_parallel_engine": "fsdp2"},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def kept_on_rank(rank: int, world_size: int, corpus: str, parallel: dict[str, Any]) -> dict[str, tuple[float, float]]:
    config = small_config(corpus, parallel=parallel)
    mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    session = build_session(config, mesh, torch.device("cpu"), Path(corpus).parent / f"{rank}")
    estimate = estimate_memory(config, world_size, session.data.tokenizer.vocab_size, "cpu")[mesh.pp_rank]
    train_settled_step(session)
    accumulate_gradients(session)
    parameters = session.engine.gradient_parameters()
    state = session.optimizer.torch_optimizer.state.values()
    moments = sum(_bytes(value) for of in state for value in of.values() if value.numel() > 1)
    gradients = sum(local_gradient(p.grad).nbytes for p in parameters if p.grad is not None)
    session.close()
    return {
        "parameters": (sum(_bytes(parameter) for parameter in parameters), estimate.parameters),
        "gradients": (gradients, estimate.gradients),
        "optimizer": (moments, estimate.optimizer),
    }


@pytest.mark.parametrize("parallel", ENGINES.values(), ids=ENGINES)
def test_of_each_engine(parallel: dict[str, Any], tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    for kept in run_distributed(kept_on_rank, 2, corpus, parallel):
        for name, (measured, estimated) in kept.items():
            assert measured == estimated, name
