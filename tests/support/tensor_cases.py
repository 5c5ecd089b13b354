"""Models cut over tensor-parallel ranks, and how to compare their gradients with whole ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_glue.config.sections import ModelConfig, ParallelConfig
from megatron_glue.layers.initialisation import init_part_normal_
from megatron_glue.parallel.engines.partial_sums import PartialSums
from megatron_glue.parallel.gather import gather_full_gradients
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec
from tests.support.tolerances import assert_close


def tensor_mesh(tp_size: int, sequence_parallel: bool, model: ModelConfig) -> ParallelMesh:
    """A mesh of tensor-parallel ranks for a model."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp_size, sequence_parallel=sequence_parallel)
    return ParallelMesh.build(parallel, "cpu", model.num_kv_heads)


def own_rows(whole: Tensor, mesh: ParallelMesh) -> Tensor:
    """Rows of the residual stream that this rank holds."""
    rows = mesh.residual_rows(whole.shape[0])
    return whole if rows is None else whole[rows]


@torch.no_grad()
def make_vectors_uneven(module: nn.Module, mesh: ParallelMesh) -> None:
    """Replace the ones of norms and the zeros of biases, in every layout alike, so that mixing them up would show."""
    for param in module.parameters():
        spec = get_shard_spec(param)
        assert spec is not None
        if "bias" in spec.global_name or "norm" in spec.global_name:
            start = param.clone()
            init_part_normal_(param, 0.3, 5, spec, spec.local_slices(mesh.axis_sizes, mesh.axis_ranks))
            param.add_(start)


def assert_same_gradients(part: nn.Module, mesh: ParallelMesh, whole: nn.Module, what: str = "") -> None:
    """Sum what is a partial sum, gather, and compare with the model of one process."""
    PartialSums(part.parameters(), mesh).reduce()
    expected = gather_full_gradients(whole, ParallelMesh())
    actual = gather_full_gradients(part, mesh)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), f"{what}: nothing reaches {name}"
        assert_close(actual[name], gradient, what=f"{what}: gradient of {name}")
