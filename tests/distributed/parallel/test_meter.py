"""The meter around real collectives: every layout gives the numbers that it gives without, and nothing is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.meter import CollectiveMeter
from megatron_glue.training.session import build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed
from tests.support.toy_run import CPU

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel_engine": "ddp"},
    "fsdp2": {"data_parallel_engine": "fsdp2"},
    "ep": {"expert_model_parallel_size": 2},
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
}


def steps(rank: int, world_size: int, corpus: str) -> dict[str, dict[str, Any]]:
    """Two steps of each layout without the meter, and the same two with it."""
    found: dict[str, dict[str, Any]] = {}
    for name, parallel in LAYOUTS.items():
        config = small_config(corpus, parallel=parallel)
        mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
        figures: dict[str, Any] = {}
        for is_metered in (False, True):
            session = build_session(config, mesh, CPU, Path(corpus).parent / f"offload-{rank}")
            meter = CollectiveMeter()
            if is_metered:
                meter.__enter__()
            try:
                losses = []
                for _ in range(2):
                    meter.open(is_timing=True)
                    result = train_step(session)
                    meter.close()
                    losses += [float(result.loss), float(result.grad_norm)]
            finally:
                meter.__exit__()
                session.close()
            figures["metered" if is_metered else "plain"] = losses
            figures |= {"waited_ms": meter.take_waited_ms(), "num_bytes": meter.num_bytes, "calls": meter.num_calls}
        found[name] = figures
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    corpus = write_corpus(tmp_path_factory.mktemp("meter") / "corpus.jsonl")
    return run_distributed(steps, 2, str(corpus))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metered_steps_are_the_same_steps(reports: list[dict[str, dict[str, Any]]], layout: str) -> None:
    for of_rank in reports:
        figures = of_rank[layout]
        assert figures["metered"] == pytest.approx(figures["plain"], rel=1e-6)
        assert figures["calls"] > 0
        assert figures["num_bytes"] > 0
        assert figures["waited_ms"] > 0
