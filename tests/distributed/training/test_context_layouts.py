"""A whole model whose sequences are split over ranks, against one process with the same segment alignment.

First-step loss, every gradient, norms and weights after steps, the loss on held-out documents and a sample, with
dropout of both kinds and sliding windows.
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
    assert_answers_as_one_process,
    assert_same_as_one_process,
    dp_size_of,
    evaluate_and_sample,
    observe_session,
)

ALIGNMENT = 8
DROPPED = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_layernorm": True}
# A windowed layer and a full one.
MODELS: dict[str, dict[str, Any]] = {
    "windows": DROPPED | {"window_size": 24, "window_attn_skip_freq": 2},
    "full": DROPPED | {"position_embedding_type": "learned"},
}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
RING, FSDP = {"cp_comm_type": "p2p"}, {"data_parallel_engine": "fsdp2"}
TP2 = {"tensor_model_parallel_size": 2}
RECOMPUTED = {"accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True}}
Case = tuple[int, str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "gather": (2, "windows", CP2, {}),
    "ring": (2, "windows", CP2 | RING, {}),
    "gather recomputed": (2, "full", CP2, RECOMPUTED),
    "ring recomputed": (2, "full", CP2 | RING, RECOMPUTED),
    "gather of four": (4, "full", CP4, RECOMPUTED),
    "ring of four": (4, "windows", CP4 | RING, RECOMPUTED),
    "ddp": (4, "windows", CP2, RECOMPUTED),
    "fsdp2": (4, "windows", CP2 | RING | FSDP, RECOMPUTED),
    "tp": (4, "full", CP2 | RING | TP2 | {"sequence_parallel": True}, RECOMPUTED),
    "tp without its own rows": (4, "windows", CP2 | TP2, {}),
    "pp": (4, "full", CP2 | RING | {"pipeline_model_parallel_size": 2}, RECOMPUTED),
    "zb": (4, "windows", CP2 | RING | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb"}, {}),
}
COUNTED = [
    name
    for name, (_, _, parallel, training) in CASES.items()
    if training is RECOMPUTED and "pipeline_model_parallel_size" not in parallel
]


def configured(corpus: str, case: Case) -> RunConfig:
    world_size, model, parallel, training = case
    return small_config(
        corpus,
        model=MODELS[model],
        moe={"num_experts": 0},
        data={"segment_alignment": ALIGNMENT},
        parallel=parallel,
        training=training | {"eval_iters": 2 // dp_size_of(world_size, parallel)},
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("context") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Report]:
    """What one process computes, by model."""
    folder = Path(corpus).parent
    return {
        model: observe_session(configured(corpus, (1, model, {}, {})), ParallelMesh(), folder, evaluate_and_sample)
        for model in MODELS
    }


@pytest.fixture(scope="module")
def runs(corpus: str) -> LayoutRuns:
    cases = {name: (case[0], configured(corpus, case)) for name, case in CASES.items()}
    return LayoutRuns(cases, Path(corpus).parent, evaluate_and_sample)


@pytest.mark.parametrize("name", CASES)
def test_split_sequences_change_nothing(name: str, runs: LayoutRuns, one_process: dict[str, Report]) -> None:
    reports, expected = runs.reports(name), one_process[CASES[name][1]]
    assert_same_as_one_process(reports, expected, name, ADAM_TOLERANCE)
    assert_answers_as_one_process(reports, expected, name)


@pytest.mark.parametrize("name", COUNTED)
def test_metadata_is_planned_once_per_micro_batch_and_kind_of_layer(name: str, runs: LayoutRuns) -> None:
    world_size, model, parallel, _ = CASES[name]
    num_kinds = 2 if model == "windows" else 1
    num_micro_batches = 2 * 4 // dp_size_of(world_size, parallel)
    for report in runs.reports(name):
        # Two layers, each run in forward and again for backward.
        assert report["builds"] == num_kinds * num_micro_batches
        assert report["reuses"] == (4 - num_kinds) * num_micro_batches
        assert report["host_reads"] == 0
