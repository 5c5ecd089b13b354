"""NaN on one rank: all skip the step together, and the rank where it began is named on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_glue.parallel.gather import differing_replicas, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.faults import FaultWatch, TrainingFaultError
from megatron_glue.training.session import build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed

VICTIM = 1


def run_with_a_nan(rank: int, _world_size: int, corpus: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Two good steps, one that is NaN on a rank, a good one, then NaN to the end."""
    config = small_config(corpus, parallel=parallel, faults={"max_nonfinite_steps": 2})
    mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    session = build_session(config, mesh, torch.device("cpu"), Path(corpus).parent / f"offload-{rank}")
    watch, is_poisoned = FaultWatch(session, lambda _line: None), False

    def spoil(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if is_poisoned and rank == VICTIM else output

    for part in session.built.parts:
        next(module for name, module in part.named_modules() if name.endswith("attention")).register_forward_hook(spoil)

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in gather_full_parameters(session.engine.module, mesh).items()}

    def step() -> None:
        start = session.start
        session.metrics.add(train_step(session), 0.0)
        watch.after_step(start)

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    steps(2)
    before = weights()
    is_poisoned = True
    step()
    after, skipped = weights(), session.optimizer.num_skipped_updates
    is_poisoned = False
    step()
    report = {
        "is_unchanged": all(torch.equal(after[name], before[name]) for name in before),
        "differing": differing_replicas(session.engine.module, mesh),
        "skipped": skipped,
        "skipped_later": session.optimizer.num_skipped_updates,
        "goes_on": any(not torch.equal(value, before[name]) for name, value in weights().items()),
    }
    is_poisoned = True
    with pytest.raises(TrainingFaultError) as error:
        steps(4)
    session.close()
    return report | {"error": str(error.value)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"data_parallel_engine": "fsdp2"},
    "experts": {"expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f113_nan_on_one_rank_skips_on_all_and_is_named(layout: str, tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    reports = run_distributed(run_with_a_nan, 2, corpus, LAYOUTS[layout])
    for report in reports:
        assert report["is_unchanged"]
        assert report["differing"] == []
        assert (report["skipped"], report["skipped_later"]) == (1, 1)
        assert report["goes_on"]
        assert "attention (PackedAttention) on rank 1" in report["error"]
    assert reports[0]["error"] == reports[1]["error"]
