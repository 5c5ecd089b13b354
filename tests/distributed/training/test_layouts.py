"""Every layout computes the same thing: losses, every gradient, norms and token counts against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import build_session
from tests.support.cases import small_config, write_corpus
from tests.support.layout_runs import (
    ADAM_TOLERANCE,
    CPU,
    LayoutRuns,
    Report,
    assert_same_as_one_process,
    observe_session,
)
from tests.support.processes import run_distributed

ALL_ON = {
    "accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True},
}
MODEL = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_layernorm": True, "window_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"moe_shared_expert_intermediate_size": 24},
    "dense": {"num_experts": 0},
}
EP2 = {"expert_model_parallel_size": 2}
TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
OWN_ROWS = {"sequence_parallel": True}
DDP, FSDP2 = {"data_parallel_engine": "ddp"}, {"data_parallel_engine": "fsdp2"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ep 2": (2, "moe", EP2),
    "ddp 2": (2, "moe", DDP),
    "fsdp 2": (2, "moe", FSDP2),
    "ddp 4, ep 2": (4, "moe", EP2 | DDP),
    "fsdp 4, ep 2": (4, "moe", EP2 | FSDP2),
    "tp 2 with its own rows": (2, "moe", TP2 | OWN_ROWS),
    "tp 4 with its own rows, ep 2": (4, "moe", TP4 | OWN_ROWS | EP2),
    "fsdp 2 x tp 2 with its own rows, ep 2": (4, "moe", TP2 | OWN_ROWS | EP2 | FSDP2),
    "dense, tp 2": (2, "dense", TP2),
    "dense, tp 4 with its own rows": (4, "dense", TP4 | OWN_ROWS),
    "dense, ddp 2 x tp 2": (4, "dense", TP2 | DDP),
    "dense, fsdp 2 x tp 2 with its own rows": (4, "dense", TP2 | OWN_ROWS | FSDP2),
}


def configured(corpus: str, kind: str, parallel: dict[str, Any]) -> RunConfig:
    return small_config(corpus, parallel=parallel, training=ALL_ON, model=MODEL, moe=KINDS[kind])


def build_on_different_data(rank: int, world_size: int, folder: str) -> str:
    """The error of a rank whose corpus is not the others'."""
    corpus = write_corpus(Path(folder) / f"corpus-{rank}.jsonl", seed=rank)
    config = small_config(corpus)
    with pytest.raises(ConfigError) as error:
        build_session(config, ParallelMesh.build(config.parallel, "cpu"), CPU, Path(folder))
    return str(error.value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("layouts") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Report]:
    """What one process computes, by kind of model."""
    folder = Path(corpus).parent
    return {kind: observe_session(configured(corpus, kind, {}), ParallelMesh(), folder) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(corpus: str) -> LayoutRuns:
    cases = {
        name: (world_size, configured(corpus, kind, parallel)) for name, (world_size, kind, parallel) in CASES.items()
    }
    return LayoutRuns(cases, Path(corpus).parent)


@pytest.mark.parametrize("name", CASES)
def test_layout_equals_one_process(name: str, runs: LayoutRuns, one_process: dict[str, Report]) -> None:
    _, kind, _ = CASES[name]
    assert_same_as_one_process(runs.reports(name), one_process[kind], name, ADAM_TOLERANCE)


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    for message in run_distributed(build_on_different_data, 2, str(tmp_path)):
        assert "--data-path" in message
        assert "not the same on all ranks" in message
