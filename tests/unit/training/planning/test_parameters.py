"""Parameters counted from a configuration are those that are built, rank by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.training.planning.memory import axis_sizes
from megatron_glue.training.planning.parameters import rank_parameters
from tests.support.cases import small_config
from tests.support.processes import run_distributed

VOCAB_SIZE = 259
MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"moe": {"num_experts": 0}},
    "wide": {
        "model": {"swiglu": False, "qk_layernorm": True, "normalization": "LayerNorm", "num_layers": 3},
        "moe": {"moe_layer_freq": [0, 1, 0], "moe_shared_expert_intermediate_size": 24},
    },
    "biases": {
        "model": {"add_bias_linear": True, "untie_embeddings_and_output_weights": True},
        "moe": {"num_experts": 0},
    },
    "learned": {"model": {"position_embedding_type": "learned", "num_query_groups": 1}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "experts": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
}


def built_sizes(config: Any, mesh: ParallelMesh) -> list[tuple[int, bool]]:
    """(numbers, whether of an expert) of each parameter of this rank, sorted."""
    place = BuildPlace(mesh, torch.device("cpu"), HostReader())
    parameters = build_model(config, VOCAB_SIZE, place).model.parameters()
    specs = [(parameter.numel(), get_shard_spec(parameter)) for parameter in parameters]
    return sorted((numel, spec is not None and spec.is_expert) for numel, spec in specs)


def counted_sizes(config: Any, world_size: int, pp_rank: int) -> list[tuple[int, bool]]:
    tensors = rank_parameters(config, axis_sizes(config, world_size), pp_rank, VOCAB_SIZE)
    return sorted((tensor.numel, tensor.is_expert) for tensor in tensors)


def sizes_on_rank(rank: int, world_size: int, overrides: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    config = small_config("corpus.jsonl", **overrides)
    mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    return built_sizes(config, mesh), counted_sizes(config, world_size, mesh.pp_rank)


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_of_one_rank(overrides: dict[str, Any]) -> None:
    config = small_config("corpus.jsonl", **overrides)
    assert counted_sizes(config, 1, 0) == built_sizes(config, ParallelMesh())


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_of_each_rank_of_a_layout(parallel: dict[str, Any]) -> None:
    for built, counted in run_distributed(sizes_on_rank, 4, {"parallel": parallel}):
        assert counted == built


def test_routers_are_marked() -> None:
    config = small_config(Path("corpus.jsonl"))
    marked = [t.numel for t in rank_parameters(config, axis_sizes(config, 1), 0, VOCAB_SIZE) if t.keeps_fp32]
    assert marked == [4 * 32] * 2
