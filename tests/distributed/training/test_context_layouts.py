"""A whole model whose sequences are split over ranks, against one process with the same segment alignment.

First-step loss, every gradient, norms and weights after steps, the loss on held-out documents and a sample, with
dropout of both kinds and sliding windows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.gather import differing_replicas, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.generation import SamplingPlan, sample_continuation
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
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


def configured(corpus: str, case: Case) -> RunConfig:
    world_size, model, parallel, training = case
    axes = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    dp_size = world_size // math.prod(parallel.get(axis, 1) for axis in axes)
    return small_config(
        corpus,
        model=MODELS[model],
        moe={"num_experts": 0},
        data={"segment_alignment": ALIGNMENT},
        parallel=parallel,
        training=training | {"eval_iters": 2 // dp_size},
    )


def observe(config: RunConfig, mesh: ParallelMesh, folder: Path) -> dict[str, Any]:
    """Gradients of step 0; then two whole steps from the same start, an evaluation and a sample."""
    session = build_session(config, mesh, CPU, folder)
    loss = accumulate_gradients(session) / session.data.loader.step_label_tokens
    gradients = session.engine.full_gradients()
    session.close()
    session = build_session(config, mesh, CPU, folder)
    for _ in range(2):
        session.metrics.add(train_step(session), 0.0)
    session.metrics.flush(session.host_reader, mesh.world_group)
    assert differing_replicas(session.engine.model, mesh) == []
    weights = gather_full_parameters(session.engine.model, mesh)
    cache, reads = session.built.metadata_cache, session.num_step_host_reads
    builds = (cache.builds, cache.reuses)
    heldout = evaluate(session.built.model, session.executor, session.data.eval_batches(CPU), mesh)
    tokens = sample_continuation(session.executor.next_logits, [100, 101, 102], SamplingPlan(6, 8), CPU, mesh)
    session.close()
    return {
        "loss": loss,
        "gradients": gradients,
        "losses": torch.tensor(session.metrics.losses),
        "grad_norms": torch.tensor(session.metrics.grad_norms),
        "weights": weights,
        "heldout": heldout,
        "tokens": tokens,
        "builds": builds,
        "reads": reads,
        "step_tokens": session.data.loader.step_valid_tokens,
    }


def observe_cases(rank: int, world_size: int, corpus: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        config = configured(corpus, CASES[name])
        mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
        found[name] = observe(config, mesh, Path(corpus).parent / f"{name}-{rank}")
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("context") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Any]:
    folder = Path(corpus).parent
    return {name: observe(configured(corpus, (1, name, {}, {})), ParallelMesh(), folder) for name in MODELS}


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, corpus: str) -> list[dict[str, Any]]:
    """What each rank observed, by case."""
    names = [name for name, case in CASES.items() if case[0] == request.param]
    return run_distributed(observe_cases, request.param, corpus, names, timeout_s=240.0)


def test_split_sequences_change_nothing(results: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    for name in results[0]:
        model = CASES[name][1]
        expected = one_process[model]
        assert_close(sum(r[name]["loss"] for r in results), expected["loss"], what=f"first-step loss ({name})")
        for result in (r[name] for r in results):
            assert result["gradients"].keys() == expected["gradients"].keys()
            for parameter, gradient in expected["gradients"].items():
                assert_close(result["gradients"][parameter], gradient, what=f"gradient of {parameter} ({name})")
            for values in ("losses", "grad_norms", "heldout"):
                assert_close(result[values], expected[values], what=f"{values} ({name})")
            for parameter, weight in expected["weights"].items():
                assert_close(result["weights"][parameter], weight, what=f"{parameter} ({name})", tolerance=1e-4)
            assert result["tokens"] == expected["tokens"]
            assert result["step_tokens"] == expected["step_tokens"]


def test_metadata_is_planned_once_per_micro_batch_and_kind_of_layer(results: list[dict[str, Any]]) -> None:
    for name in results[0]:
        world_size, model, parallel, training = CASES[name]
        if training is not RECOMPUTED or "pipeline_model_parallel_size" in parallel:
            continue
        dp_size = world_size // parallel["context_parallel_size"] // parallel.get("tensor_model_parallel_size", 1)
        num_kinds = 2 if model == "windows" else 1
        num_micro_batches = 2 * 4 // dp_size
        for result in results:
            # Two layers, each run in forward and again for backward.
            builds, reuses = result[name]["builds"]
            assert (builds, reuses) == (num_kinds * num_micro_batches, (4 - num_kinds) * num_micro_batches)
            assert result[name]["reads"] == 0
