"""Ranks that share experts read once per MoE layer and micro-batch, and one read more is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_glue.backends import registry
from megatron_glue.backends.permutation import TORCH_PERMUTATION
from megatron_glue.config.sections import RunConfig
from megatron_glue.moe.router import Router, Routing
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.proofs.sync_audit import audit_on_rank
from megatron_glue.proofs.sync_budget import EXCHANGE, read_budget
from tests.support.cases import small_config, write_corpus
from tests.support.commands import ROOT
from tests.support.processes import run_distributed

BUDGET = read_budget(ROOT / "tools" / "sync_budget.yaml")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    corpus = write_corpus(tmp_path_factory.mktemp("audit") / "corpus.jsonl")
    training = {"accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True}}
    return small_config(corpus, training=training, parallel={"expert_model_parallel_size": 2})


def test_an_exchange_reads_once_per_layer_and_micro_batch(config: RunConfig, tmp_path: Path) -> None:
    for report in run_distributed(audit_on_rank, 2, config, str(tmp_path)):
        assert BUDGET.overruns(report) == []
        exchange = [read for read in report["reads"] if BUDGET.classify(read, report) == EXCHANGE]
        assert sorted(read["layer"] for read in exchange) == [0, 1]
        assert all(read["count"] == report["num_micro_batches"] == 2 for read in exchange)
        assert {read["phase"] for read in exchange} == {"forward"}, "recompute and backward know the splits"
        announced = sum(read["count"] for read in report["reads"] if read["announced"])
        assert announced == report["num_announced"], "what HostReader counted, found without asking it"


def test_exchanges_of_a_fixed_size_read_nothing(config: RunConfig, tmp_path: Path) -> None:
    bounded = config.moe.model_copy(update={"moe_static_capacity_factor": 2.0})
    for report in run_distributed(audit_on_rank, 2, config.model_copy(update={"moe": bounded}), str(tmp_path)):
        assert BUDGET.overruns(report) == []
        assert EXCHANGE not in {BUDGET.classify(read, report) for read in report["reads"]}
        assert report["num_announced"] == sum(read["count"] for read in report["reads"] if read["announced"])


def audit_with_another_read(rank: int, world_size: int, config: RunConfig, folder: str) -> dict[str, Any]:
    """The router of every layer reads something of its own."""
    forward = Router.forward

    def reading(router: Router, x_TD: Tensor, *args: Any) -> Routing:
        routing = forward(router, x_TD, *args)
        assert routing.expert_ids_TK.max().item() >= 0
        return routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", reading)
        return audit_on_rank(rank, world_size, config, folder)


def test_a_read_more_is_above_the_budget(config: RunConfig, tmp_path: Path) -> None:
    for report in run_distributed(audit_with_another_read, 2, config, str(tmp_path)):
        lines = BUDGET.overruns(report)
        assert [line.partition(",")[0] for line in lines] == ["layer 0", "layer 1"]
        assert all("tests/distributed/proofs/test_sync_audit.py" in line for line in lines)
        assert all("item x2 (forward)" in line for line in lines)
        assert all("item x2 (recompute)" in line for line in lines)


def order_of_calls(rank: int, world_size: int, config: RunConfig, folder: str) -> list[str]:
    calls: list[str] = []
    read = HostReader.read

    def noted_permute(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("permute")
        return TORCH_PERMUTATION.permute_rows(*args, **kwargs)

    def noted_read(reader: HostReader, tensor: Tensor) -> Any:
        calls.append("read")
        return read(reader, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "TORCH_PERMUTATION", replace(TORCH_PERMUTATION, permute_rows=noted_permute))
        patch.setattr(HostReader, "read", noted_read)
        audit_on_rank(rank, world_size, config, folder)
    return calls


def test_the_exchange_reads_late(config: RunConfig, tmp_path: Path) -> None:
    """Behind the permutation, which a GPU can work on while the host waits."""
    for calls in run_distributed(order_of_calls, 2, config, str(tmp_path)):
        assert calls[:4] == ["permute", "read"] * 2, "the two layers of the first micro-batch"
