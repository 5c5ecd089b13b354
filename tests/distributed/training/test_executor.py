"""A pipeline computes what one process does: loss, every gradient, norm, counts, weights, evaluation and samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.gather import gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.pipeline import splits_backward_of_functions
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.generation import SamplingPlan, sample_continuation
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
NUM_LAYERS = 4
# A stage of dense layers and one of MoE layers (F81); with four stages, two of each.
MIXED = {"moe_layer_freq": (0, 0, 1, 1), "moe_router_enable_expert_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "moe": MIXED},
    "untied": {"model": {"untie_embeddings_and_output_weights": True, "position_embedding_type": "learned"}},
    "dense": {"moe": {"num_experts": 0}},
}
RECOMPUTE = {"activation": {"recompute_granularity": "full"}}
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
    "fsdp2 zb": (4, "tied", PP2 | FSDP2 | {"pipeline_schedule": "zb"}, {}),
    "fsdp2 experts": (4, "tied", PP2 | EP2 | FSDP2, {}),
    "tp": (4, "tied", PP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "cp": (4, "tied", PP2 | {"context_parallel_size": 2}, {}),
}


def configured(corpus: str, case: Case) -> RunConfig:
    world_size, model, parallel, extra = case
    sections = {name: dict(values) for name, values in MODELS[model].items()}
    for name, values in extra.items():
        sections.setdefault(name, {}).update(values)
    sections.setdefault("model", {}).setdefault("num_layers", NUM_LAYERS)
    axes = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    dp_size = world_size // math.prod(parallel.get(axis, 1) for axis in axes)
    sections.setdefault("training", {}).update({"global_batch_size": 8, "eval_iters": 4 // dp_size})
    return small_config(
        corpus,
        parallel=parallel,
        data={"seq_length": 64, "segment_alignment": 4},
        # Adam without it divides the last bits of small gradients by themselves.
        optimizer={"adam_eps": 1e-3},
        **sections,
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
    weights = gather_full_parameters(session.engine.model, mesh)
    builds, micro_batches = session.built.metadata_cache.builds, session.num_micro_batches
    heldout = evaluate(session.built.model, session.executor, session.data.eval_batches(CPU), mesh)
    session.built.model.eval()
    tokens = sample_continuation(session.executor.next_logits, [100, 101, 102], SamplingPlan(6, 8), CPU, mesh)
    is_sharded = all(isinstance(param, DTensor) for param in session.engine.model.parameters())
    # Training goes on after an evaluation and a sample.
    session.built.model.train()
    session.metrics.add(train_step(session), 0.0)
    session.metrics.flush(session.host_reader, mesh.world_group)
    session.close()
    metrics = session.metrics
    return {
        "is_sharded": is_sharded,
        "loss": loss,
        "gradients": gradients,
        "losses": torch.tensor(metrics.losses),
        "grad_norms": torch.tensor(metrics.grad_norms),
        "expert_counts": torch.tensor(metrics.expert_counts),
        "aux_losses": torch.tensor(metrics.aux_losses),
        "weights": weights,
        "biases": {
            layer: router.expert_bias_E.clone()
            for layer, router in session.built.routers.items()
            if router.expert_bias_E is not None
        },
        "heldout": heldout,
        "tokens": tokens,
        "builds": builds,
        "micro_batches": micro_batches,
    }


def observe_cases(rank: int, world_size: int, corpus: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        config = configured(corpus, CASES[name])
        mesh = ParallelMesh.build(config.parallel, "cpu")
        found[name] = observe(config, mesh, Path(corpus).parent / f"{name}-{rank}")
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("executor") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def whole(corpus: str) -> dict[str, dict[str, Any]]:
    """What one process computes, by model."""
    folder = Path(corpus).parent
    return {model: observe(configured(corpus, (1, model, {}, {})), ParallelMesh(), folder) for model in MODELS}


@pytest.fixture(scope="module", params=[2, 4])
def observed(corpus: str, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What each rank computes, by case, of all cases with this many ranks."""
    can_split = splits_backward_of_functions()
    names = [name for name, case in CASES.items() if case[0] == request.param and (can_split or "zb" not in name)]
    ranks = run_distributed(observe_cases, request.param, corpus, names, timeout_s=400.0, collective_timeout_s=60.0)
    return {name: [of_rank[name] for of_rank in ranks] for name in names}


def test_every_layout_computes_what_one_process_does(
    observed: dict[str, list[dict[str, Any]]], whole: dict[str, dict[str, Any]]
) -> None:
    for name, ranks in observed.items():
        expected = whole[CASES[name][1]]
        assert sum(actual["loss"] for actual in ranks) == pytest.approx(float(expected["loss"]), rel=1e-6), name
        for actual in ranks:
            for kind in ("gradients", "weights"):
                assert actual[kind].keys() == expected[kind].keys(), name
                for tensor_name, tensor in expected[kind].items():
                    assert_close(actual[kind][tensor_name], tensor, what=f"{name}: {kind} {tensor_name}")
            for kind in ("losses", "grad_norms", "aux_losses"):
                assert_close(actual[kind], expected[kind], what=f"{name}: {kind}")
            assert_close(actual["heldout"], expected["heldout"], what=f"{name}: held-out loss")
            assert torch.equal(actual["expert_counts"], expected["expert_counts"]), name
            assert actual["tokens"] == expected["tokens"], name
        biases = {layer: bias for actual in ranks for layer, bias in actual["biases"].items()}
        assert biases.keys() == expected["biases"].keys(), name
        for layer, bias in expected["biases"].items():
            assert torch.equal(biases[layer], bias), f"{name}: bias of layer {layer}"


def test_offload_changes_no_bit_and_metadata_is_built_once_per_micro_batch(
    observed: dict[str, list[dict[str, Any]]],
) -> None:
    for name, ranks in observed.items():
        if not name.endswith("double buffer"):
            continue
        for actual in ranks:
            assert actual["builds"] == actual["micro_batches"] > 0, name
        for actual, plain in zip(ranks, observed.get(name.removesuffix(" double buffer"), []), strict=False):
            assert all(torch.equal(actual["gradients"][key], grad) for key, grad in plain["gradients"].items()), name


def test_weights_are_sharded_again_after_evaluation_and_sampling(observed: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in observed.items():
        if name.startswith("fsdp2"):
            assert all(actual["is_sharded"] for actual in ranks), name
