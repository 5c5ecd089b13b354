"""Every layout computes the same thing: losses, every gradient, norms and token counts against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.config.errors import ConfigError
from megatron_glue.parallel.gather import gather_full_gradients, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.session import build_session
from megatron_glue.training.step import accumulate_gradients, train_step
from tests.support.cases import small_config, write_corpus
from tests.support.processes import run_distributed
from tests.support.tolerances import assert_close

CPU = torch.device("cpu")
ALL_ON = {
    "accelerator": {"enable_metadata_cache": True, "enable_double_buffer": True, "enable_grouped_index": True},
}
MODEL = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_layernorm": True, "window_size": 24}
SHARED_EXPERT, DENSE = {"moe_shared_expert_intermediate_size": 24}, {"num_experts": 0}
TENSOR_2, TENSOR_4, OWN_ROWS = (
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4},
    {"sequence_parallel": True},
)
LAYOUTS = [
    (2, {"expert_model_parallel_size": 2}),
    (2, {"data_parallel_engine": "ddp"}),
    (2, {"data_parallel_engine": "fsdp2"}),
    (4, {"expert_model_parallel_size": 2, "data_parallel_engine": "ddp"}),
    (4, {"expert_model_parallel_size": 2, "data_parallel_engine": "fsdp2"}),
    (2, {**TENSOR_2, **OWN_ROWS}),
    (4, {**TENSOR_4, **OWN_ROWS, "expert_model_parallel_size": 2}),
    (4, {**TENSOR_2, **OWN_ROWS, "expert_model_parallel_size": 2, "data_parallel_engine": "fsdp2"}),
]
DENSE_LAYOUTS = [
    (2, TENSOR_2),
    (4, {**TENSOR_4, **OWN_ROWS}),
    (4, {**TENSOR_2, "data_parallel_engine": "ddp"}),
    (4, {**TENSOR_2, **OWN_ROWS, "data_parallel_engine": "fsdp2"}),
]


def build_on_different_data(rank: int, world_size: int, folder: str) -> str:
    """The error of a rank whose corpus is not the others'."""
    corpus = write_corpus(Path(folder) / f"corpus-{rank}.jsonl", seed=rank)
    config = small_config(corpus)
    with pytest.raises(ConfigError) as error:
        build_session(config, ParallelMesh.build(config.parallel, "cpu"), CPU, Path(folder))
    return str(error.value)


def run_layout(
    rank: int, world_size: int, corpus: str, parallel: dict[str, Any], moe: dict[str, Any]
) -> dict[str, Any]:
    """Gradients of step 0, then two whole steps from the same start."""
    torch.set_num_threads(1)
    config = small_config(corpus, parallel=parallel, training=ALL_ON, model=MODEL, moe=moe)
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
    session.close()
    return {
        "loss": loss,
        "gradients": gradients,
        "losses": torch.tensor(session.metrics.losses),
        "grad_norms": torch.tensor(session.metrics.grad_norms),
        "expert_counts": torch.tensor(session.metrics.expert_counts),
        "aux_losses": torch.tensor(session.metrics.aux_losses),
        "weights": gather_full_parameters(session.engine.module, mesh),
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_corpus(tmp_path_factory.mktemp("layouts") / "corpus.jsonl"))


@pytest.fixture(scope="module")
def one_process(corpus: str) -> dict[str, Any]:
    return run_layout(0, 1, corpus, {}, SHARED_EXPERT)


@pytest.fixture(scope="module")
def one_dense_process(corpus: str) -> dict[str, Any]:
    return run_layout(0, 1, corpus, {}, DENSE)


def assert_equals(results: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    assert_close(sum(result["loss"] for result in results), one_process["loss"], what="first-step loss")
    for result in results:
        assert result["gradients"].keys() == one_process["gradients"].keys()
        for name, expected in one_process["gradients"].items():
            assert_close(result["gradients"][name], expected, what=f"gradient of {name}")
        for name in ("losses", "grad_norms", "aux_losses"):
            assert_close(result[name], one_process[name], what=name)
        assert torch.equal(result["expert_counts"], one_process["expert_counts"])
        for name, expected in one_process["weights"].items():
            assert_close(result["weights"][name], expected, what=f"weight {name} after two steps", tolerance=1e-4)


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS, ids=str)
def test_layout_equals_one_process(
    world_size: int, parallel: dict[str, Any], corpus: str, one_process: dict[str, Any]
) -> None:
    assert_equals(run_distributed(run_layout, world_size, corpus, parallel, SHARED_EXPERT), one_process)


@pytest.mark.parametrize(("world_size", "parallel"), DENSE_LAYOUTS, ids=str)
def test_layout_of_a_dense_model_equals_one_process(
    world_size: int, parallel: dict[str, Any], corpus: str, one_dense_process: dict[str, Any]
) -> None:
    assert_equals(run_distributed(run_layout, world_size, corpus, parallel, DENSE), one_dense_process)


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    for message in run_distributed(build_on_different_data, 2, str(tmp_path)):
        assert "--data-path" in message
        assert "not the same on all ranks" in message
