"""--check-ranks: what differs between ranks that must agree is named on all of them, with the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.rank_check import RanksDifferError, check_batches, check_weights
from megatron_glue.training.session import Session, build_session
from megatron_glue.training.step import train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed

CPU = torch.device("cpu")
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


def build(corpus: str, parallel: dict[str, Any], rank: int) -> Session:
    config = small_config(
        corpus,
        parallel=parallel,
        data={"segment_alignment": 4},
        moe={"moe_router_enable_expert_bias": True},
        training={"check_ranks": True},
    )
    return build_session(config, ParallelMesh.build(config.parallel, "cpu"), CPU, Path(corpus).parent / f"{rank}")


def message_of(check: Any, *args: Any) -> str:
    try:
        check(*args)
    except RanksDifferError as error:
        return str(error)
    return ""


def weights_on_rank(rank: int, world_size: int, corpus: str) -> dict[str, str]:
    """What is said of two data-parallel replicas, before and after one of them is changed."""
    session = build(corpus, {}, rank)
    said = {"equal": message_of(train_step, session) + message_of(check_weights, session)}
    router = session.built.routers[1]
    assert router.expert_bias_E is not None
    if rank == 1:
        router.expert_bias_E[0] += 1e-3
    said["bias"] = message_of(check_weights, session)
    with torch.no_grad():
        if rank == 1:
            router.expert_bias_E[0] -= 1e-3
            router.weight.view(torch.int32)[0, 0] ^= 1  # the last bit
    said["weight"] = message_of(check_weights, session)
    session.close()
    return said


def batches_on_rank(rank: int, world_size: int, corpus: str, parallel: dict[str, Any]) -> dict[str, str]:
    session = build(corpus, parallel, rank)
    batches = session.data.loader.next_step()
    said = {"equal": message_of(check_batches, session, batches)}
    if rank == 1:
        labels_T = batches[1].labels_T.clone()
        labels_T[0] += 1
        changed = [batches[0], replace(batches[1], labels_T=labels_T), *batches[2:]]
    else:
        changed = batches
    said["labels"] = message_of(check_batches, session, changed)
    # Other packs: what a rank sees that is at another place of the data.
    said["packs"] = message_of(check_batches, session, batches if rank == 0 else batches[::-1])
    session.close()
    return said


def test_weights_and_biases_that_differ_are_named(tmp_path: Path) -> None:
    for said in run_distributed(weights_on_rank, 2, str(write_corpus(tmp_path / "corpus.jsonl"))):
        assert said["equal"] == ""
        assert said["bias"] == (
            "--check-ranks: after iteration 1, ranks differ in blocks.1.ffn.router.expert_bias_E (ranks 0, 1)"
        )
        assert said["weight"] == (
            "--check-ranks: after iteration 1, ranks differ in blocks.1.ffn.router.weight (ranks 0, 1)"
        )


def test_stages_must_see_the_same_micro_batches(tmp_path: Path) -> None:
    for said in run_distributed(batches_on_rank, 2, str(write_corpus(tmp_path / "corpus.jsonl")), PP2):
        assert said["equal"] == ""
        assert said["labels"] == "--check-ranks: in iteration 1, ranks 0, 1 differ in labels of micro-batch 1"
        assert said["packs"] == "--check-ranks: in iteration 1, ranks 0, 1 differ in packs of micro-batch 0"


def test_context_parallel_ranks_must_cut_the_same_packs(tmp_path: Path) -> None:
    for said in run_distributed(batches_on_rank, 2, str(write_corpus(tmp_path / "corpus.jsonl")), CP2):
        assert said["equal"] == ""
        assert said["labels"] == "", "each rank has labels of its own"
        assert said["packs"] == "--check-ranks: in iteration 1, ranks 0, 1 differ in packs of micro-batch 0"


def test_data_parallel_ranks_see_other_packs(tmp_path: Path) -> None:
    for said in run_distributed(batches_on_rank, 2, str(write_corpus(tmp_path / "corpus.jsonl")), {}):
        assert set(said.values()) == {""}
