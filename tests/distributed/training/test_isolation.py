"""--prove-isolation on ranks that split documents, heads, tokens and experts."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from megatron_glue.backends import attention_context_metadata
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.isolation import IsolationError, IsolationReport, prove_isolation
from tests.support.cases import small_config
from tests.support.processes import run_distributed

CPU = torch.device("cpu")
CP2 = {"context_parallel_size": 2}
Sections = dict[str, dict[str, Any]]


def context_cases() -> dict[str, Sections]:
    """Both exchanges, with and without a window, dense and with experts."""
    cases: dict[str, Sections] = {}
    for comm in ("allgather", "p2p"):
        for window in (0, 16):
            for experts in (0, 4):
                cases[f"{comm} {window} {experts}"] = {
                    "parallel": {**CP2, "cp_comm_type": comm, "expert_model_parallel_size": 2 if experts else 1},
                    "model": {"window_size": window},
                    "moe": {"num_experts": experts},
                }
    return cases


OTHER_CASES: dict[str, Sections] = {
    "tensor and sequence parallel": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "pipeline": {"parallel": {"pipeline_model_parallel_size": 2}},
    "data": {"moe": {"num_experts": 0}},
}


def prove_all(rank: int, world_size: int, cases: dict[str, Sections]) -> dict[str, dict[str, Any]]:
    """Every case on this rank: the fields of its report."""
    reports = {}
    for name, sections in cases.items():
        config = small_config("unused.jsonl", **({"data": {"segment_alignment": 4}} | sections))
        mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
        reports[name] = asdict(prove_isolation(config, mesh, CPU))
    return reports


def reports_of_all_ranks(size: int, cases: dict[str, Sections]) -> dict[str, IsolationReport]:
    """What ranks agree on."""
    first, *others = run_distributed(prove_all, size, cases)
    assert all(other == first for other in others)
    return {name: IsolationReport(**values) for name, values in first.items()}


def leak_on_one_rank(rank: int, world_size: int) -> str:
    """A piece's keys begin one token early, in the document before it, on the last rank only."""
    plan = attention_context_metadata._jobs_of_gather

    def leaking(shard: Any, window: int) -> Any:
        return [
            replace(
                jobs,
                first_key_J=jobs.first_key_J - (is_later := (jobs.first_key_J > 0).astype(np.int64)),
                num_keys_J=jobs.num_keys_J + is_later,
                distance_J=jobs.distance_J + is_later,
            )
            for jobs in plan(shard, window)
        ]

    if rank == world_size - 1:
        attention_context_metadata._jobs_of_gather = leaking
    try:
        prove_all(rank, world_size, {"leak": {"parallel": CP2, "moe": {"num_experts": 0}}})
    except IsolationError as error:
        return str(error)
    return ""


def test_documents_that_ranks_split_keep_every_bit() -> None:
    for name, report in reports_of_all_ranks(2, context_cases()).items():
        comm, window, experts = name.split()
        assert report.backend == f"segments ({'ring' if comm == 'p2p' else 'gather'})"
        assert (report.windows, report.cp_size, report.num_changed) == ((int(window),), 2, 7)
        assert report.limit == (1e-6 if int(experts) else 0.0)
        assert max(report.output_difference, report.gradient_difference) <= report.limit
        assert report.num_rerouted == 0


def test_other_ways_to_share_a_model() -> None:
    assert all(report.holds for report in reports_of_all_ranks(2, OTHER_CASES).values())


def test_a_leak_on_one_rank_stops_all_of_them() -> None:
    first, second = run_distributed(leak_on_one_rank, 2)
    assert first == second
    assert "attention segments (gather), window none, cp 2: changed 7 of 7" in first
    assert "outputs differ by 0," not in first


def test_more_ranks_than_tokens_of_a_document() -> None:
    size = 4
    cases: dict[str, Sections] = {
        comm: {
            "parallel": {"context_parallel_size": size, "cp_comm_type": comm},
            "moe": {"num_experts": 0},
            "data": {"segment_alignment": 8},
        }
        for comm in ("allgather", "p2p")
    }
    assert {report.limit for report in reports_of_all_ranks(size, cases).values()} == {0.0}
