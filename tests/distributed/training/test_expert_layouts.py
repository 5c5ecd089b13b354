"""A whole MoE model with experts folded over all dense ranks of a stage, against one process.

Losses, every gradient, norms, counts, balancing biases and weights after steps; with the grouping in one pass and with
the loop over experts, with and without recompute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from tests.support.cases import small_config, write_corpus
from tests.support.layout_runs import (
    ADAM_TOLERANCE,
    LayoutRuns,
    Report,
    assert_same_as_one_process,
    observe_session,
)

MODEL = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_layernorm": True}
MOE = {
    "moe_shared_expert_intermediate_size": 24,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
ONE_PASS_RECOMPUTED = {
    "accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True},
}
LOOP: dict[str, Any] = {"accelerator": {"enable_grouped_index": False}}
OVERLAP = {"moe_shared_expert_overlap": True}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}


def sizes(ep: int = 1, etp: int = 1, **others: Any) -> dict[str, Any]:
    """Fields of the parallel section."""
    return {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, **others}


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp 2, ep 2": (2, sizes(ep=2, **TP), OVERLAP, ONE_PASS_RECOMPUTED),
    "tp 2, etp 2, loop": (2, sizes(etp=2, **TP), {}, LOOP),
    "dp 2 x tp 2, ep 4": (4, sizes(ep=4, **TP), {}, ONE_PASS_RECOMPUTED),
    "dp 2 x tp 2, ep 2 x etp 2, loop": (4, sizes(ep=2, etp=2, **TP), OVERLAP, LOOP),
    "fsdp 2 x tp 2, ep 2 x etp 2": (
        4,
        sizes(ep=2, etp=2, data_parallel_engine="fsdp2", **TP),
        OVERLAP,
        ONE_PASS_RECOMPUTED,
    ),
    "cp 2 x tp 2, ep 2 x etp 2": (4, sizes(ep=2, etp=2, **TP, **CP), OVERLAP, ONE_PASS_RECOMPUTED),
    "pp 2 x tp 2, ep 2": (4, sizes(ep=2, pipeline_model_parallel_size=2, **TP), OVERLAP, ONE_PASS_RECOMPUTED),
}


def config_of(corpus: str, parallel: dict[str, Any], moe: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    data = {"segment_alignment": 4}
    return small_config(corpus, parallel=parallel, moe=MOE | moe, training=training, model=MODEL, data=data)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("layouts") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> Report:
    report = observe_session(config_of(corpus, {}, {}, {}), ParallelMesh(), Path(corpus).parent)
    assert report["biases"], "there must be some to compare"
    return report


@pytest.fixture(scope="module")
def runs(corpus: str) -> LayoutRuns:
    cases = {name: (world_size, config_of(corpus, *sections)) for name, (world_size, *sections) in LAYOUTS.items()}
    return LayoutRuns(cases, Path(corpus).parent)


@pytest.mark.parametrize("name", LAYOUTS)
def test_f73_a_model_with_folded_experts_equals_one_process(name: str, runs: LayoutRuns, one_process: Report) -> None:
    assert_same_as_one_process(runs.reports(name), one_process, name, ADAM_TOLERANCE)
