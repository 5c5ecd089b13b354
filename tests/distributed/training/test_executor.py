"""A pipeline computes what one process does: loss, every gradient, norm, counts, weights, evaluation and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import Session
from tests.support.cases import small_config, write_corpus
from tests.support.layout_runs import (
    LayoutRuns,
    Report,
    assert_answers_as_one_process,
    assert_same_as_one_process,
    dp_size_of,
    evaluate_and_sample,
    observe_session,
    train_steps,
)

NUM_LAYERS = 4
# A stage of dense layers and one of MoE layers (F81); with four stages, two of each.
MIXED = {"moe_layer_freq": (0, 0, 1, 1), "moe_router_enable_expert_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "moe": MIXED},
    "untied": {"model": {"untie_embeddings_and_output_weights": True, "position_embedding_type": "learned"}},
    "dense": {"moe": {"num_experts": 0}},
}
RECOMPUTE = {"activation": {"recompute_granularity": "full"}}
SELECTIVE = {
    "activation": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp", "moe", "layernorm", "moe_act"),
    }
}
DOUBLE_BUFFER = {
    "training": {"accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True}},
    "activation": {"activation_debug_poison": True},
}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
FSDP2 = {"data_parallel_engine": "fsdp2"}
VIRTUAL = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
Case = tuple[int, str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "1f1b": (2, "tied", PP2, {}),
    "1f1b double buffer": (2, "tied", PP2, DOUBLE_BUFFER),
    "1f1b uneven recomputed": (2, "tied", PP2 | {"decoder_first_pipeline_num_layers": 3}, RECOMPUTE),
    "gpipe": (2, "untied", PP2 | {"pipeline_schedule": "gpipe"}, {}),
    "gpipe double buffer": (2, "untied", PP2 | {"pipeline_schedule": "gpipe"}, DOUBLE_BUFFER),
    "interleaved": (2, "tied", VIRTUAL, {}),
    "interleaved double buffer": (2, "tied", VIRTUAL, DOUBLE_BUFFER),
    "zb": (2, "tied", PP2 | {"pipeline_schedule": "zb"}, {}),
    "zb virtual": (2, "untied", VIRTUAL | {"pipeline_schedule": "zb"}, {}),
    "zb dense": (2, "dense", PP2 | {"pipeline_schedule": "zb"}, {}),
    "1f1b of four": (4, "tied", {"pipeline_model_parallel_size": 4}, {}),
    "ddp interleaved": (4, "untied", VIRTUAL, {}),
    "ddp zb experts": (4, "tied", PP2 | EP2 | {"pipeline_schedule": "zb"}, {}),
    "fsdp2 double buffer": (4, "tied", PP2 | FSDP2, DOUBLE_BUFFER),
    "fsdp2 interleaved kept gathered": (4, "untied", VIRTUAL | FSDP2 | {"zero_stage": 2}, {}),
    "fsdp2 selective": (4, "tied", PP2 | FSDP2, SELECTIVE),
    "fsdp2 zb": (4, "tied", PP2 | FSDP2 | {"pipeline_schedule": "zb"}, {}),
    "fsdp2 experts": (4, "tied", PP2 | EP2 | FSDP2, {}),
    "tp": (4, "tied", PP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "cp": (4, "tied", PP2 | {"context_parallel_size": 2}, {}),
}
DOUBLE_BUFFERED = [name for name in CASES if name.endswith(" double buffer")]
PLAIN_OF = {name: plain for name in DOUBLE_BUFFERED if (plain := name.removesuffix(" double buffer")) in CASES}
SHARDED = [name for name in CASES if name.startswith("fsdp2")]


def configured(corpus: str, case: Case) -> RunConfig:
    world_size, model, parallel, extra = case
    sections = {name: dict(values) for name, values in MODELS[model].items()}
    for name, values in extra.items():
        sections.setdefault(name, {}).update(values)
    sections.setdefault("model", {}).setdefault("num_layers", NUM_LAYERS)
    eval_iters = 4 // dp_size_of(world_size, parallel)
    sections.setdefault("training", {}).update({"global_batch_size": 8, "eval_iters": eval_iters})
    return small_config(
        corpus,
        parallel=parallel,
        data={"seq_length": 64, "segment_alignment": 4},
        # Adam without it divides the last bits of small gradients by themselves.
        optimizer={"adam_eps": 1e-3},
        **sections,
    )


def go_on(session: Session) -> Report:
    """An evaluation and a sample, and a third step to show that training goes on after them."""
    report = evaluate_and_sample(session)
    report["is_sharded"] = all(isinstance(param, DTensor) for param in session.engine.model.parameters())
    train_steps(session, 1)
    return report


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("executor") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Report]:
    """What one process computes, by model."""
    folder = Path(corpus).parent
    return {
        model: observe_session(configured(corpus, (1, model, {}, {})), ParallelMesh(), folder, go_on)
        for model in MODELS
    }


@pytest.fixture(scope="module")
def runs(corpus: str) -> LayoutRuns:
    cases = {name: (case[0], configured(corpus, case)) for name, case in CASES.items()}
    return LayoutRuns(cases, Path(corpus).parent, go_on)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_computes_what_one_process_does(
    name: str, runs: LayoutRuns, one_process: dict[str, Report]
) -> None:
    reports, expected = runs.reports(name), one_process[CASES[name][1]]
    assert_same_as_one_process(reports, expected, name)
    assert_answers_as_one_process(reports, expected, name)


@pytest.mark.parametrize("name", DOUBLE_BUFFERED)
def test_metadata_is_built_once_per_micro_batch(name: str, runs: LayoutRuns) -> None:
    for report in runs.reports(name):
        assert report["builds"] == report["micro_batches"] > 0


@pytest.mark.parametrize("name", PLAIN_OF)
def test_offload_changes_no_bit(name: str, runs: LayoutRuns) -> None:
    for report, plain in zip(runs.reports(name), runs.reports(PLAIN_OF[name]), strict=True):
        assert report["gradients"].keys() == plain["gradients"].keys()
        for parameter, gradient in plain["gradients"].items():
            assert torch.equal(report["gradients"][parameter], gradient), parameter


@pytest.mark.parametrize("name", SHARDED)
def test_weights_are_sharded_again_after_evaluation_and_sampling(name: str, runs: LayoutRuns) -> None:
    assert all(report["is_sharded"] for report in runs.reports(name))
