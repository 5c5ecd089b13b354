"""A whole MoE model with experts folded over all dense ranks of a stage, against one process.

Losses, every gradient, norms, counts, balancing biases and weights after steps; with the grouping in one pass and with
the loop over experts, with and without recompute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.sections import RunConfig
from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
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


def run_layout(
    rank: int, world_size: int, corpus: str, parallel: dict[str, Any], moe: dict[str, Any], training: dict[str, Any]
) -> dict[str, Any]:
    """Gradients of step 0, then two whole steps from the same start."""
    torch.set_num_threads(1)
    config = config_of(corpus, parallel, moe, training)
    mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    folder = Path(corpus).parent / f"offload-{world_size}-{rank}"
    session = build_session(config, mesh, CPU, folder)
    loss = accumulate_gradients(session) / session.data.loader.step_label_tokens
    gradients = gather_full_gradients(session.engine.module, mesh)
    session.close()
    session = build_session(config, mesh, CPU, folder)
    for _ in range(2):
        session.metrics.add(train_step(session), 0.0)
    session.metrics.flush(session.host_reader, mesh.world_group)
    # F75: what several ranks hold, routers above all, is the same to the bit.
    assert differing_replicas(session.engine.module, mesh) == []
    biases = {
        str(layer): router.expert_bias_E
        for layer, router in session.built.routers.items()
        if router.expert_bias_E is not None
    }
    session.close()
    return {
        "loss": loss,
        "gradients": gradients,
        "losses": torch.tensor(session.metrics.losses),
        "grad_norms": torch.tensor(session.metrics.grad_norms),
        "expert_counts": torch.tensor(session.metrics.expert_counts),
        "aux_losses": torch.tensor(session.metrics.aux_losses),
        "weights": gather_full_parameters(session.engine.module, mesh),
        "biases": biases,
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("layouts") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Any]:
    return run_layout(0, 1, corpus, {}, {}, {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_f73_a_model_with_folded_experts_equals_one_process(
    name: str, corpus: str, one_process: dict[str, Any]
) -> None:
    world_size, parallel, moe, training = LAYOUTS[name]
    results = run_distributed(run_layout, world_size, corpus, parallel, moe, training)
    loss = torch.stack([result["loss"] for result in results]).sum()
    assert_close(loss, one_process["loss"], what="first-step loss")
    for result in results:
        assert result["gradients"].keys() == one_process["gradients"].keys()
        for weight, expected in one_process["gradients"].items():
            assert_close(result["gradients"][weight], expected, what=f"gradient of {weight}")
        for numbers in ("losses", "grad_norms", "aux_losses"):
            assert_close(result[numbers], one_process[numbers], what=numbers)
        assert torch.equal(result["expert_counts"], one_process["expert_counts"])
        # F68: once per step, by the counts of all ranks.
        for layer, bias_E in result["biases"].items():
            assert bias_E.any()
            assert torch.equal(bias_E, one_process["biases"][layer]), f"bias of layer {layer}"
        for weight, expected in one_process["weights"].items():
            assert_close(result["weights"][weight], expected, what=f"weight {weight} after two steps", tolerance=1e-4)
