import pytest
import torch
from torch import nn

from megatron_glue.layers.initialisation import init_normal_
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec, tensor_split
from tests.support.layer_cases import layer_build


def rank_of(tp: int, copy: int = 0, *, sequence_parallel: bool = False) -> ParallelMesh:
    """Rank (tp, copy) of 2 x 2, without a process group."""
    sizes = {"tp": 2, "kv_copy": 2, "tensor": 4}
    return ParallelMesh(sizes=sizes, ranks={"tp": tp, "kv_copy": copy}, sequence_parallel=sequence_parallel)


def test_parts_are_cut_from_what_one_process_draws():
    whole = torch.empty(8, 6)
    init_normal_(whole, 0.02, 7, "a.weight")
    parts = []
    for tp in range(2):
        for copy in range(2):
            part = nn.Parameter(torch.empty(2, 6))
            layer_build(mesh=rank_of(tp, copy)).place(part, "a.weight", tensor_split(0), std=0.02)
            parts.append(part.detach())
    assert torch.equal(torch.cat(parts), whole)


def test_copies_hold_the_same_part():
    parts = []
    for copy in range(2):
        part = nn.Parameter(torch.empty(4, 6))
        layer_build(mesh=rank_of(1, copy)).place(part, "a.weight", (("tp", 0),), ("kv_copy",), 0.02)
        parts.append(part.detach())
    assert torch.equal(*parts)


def test_a_spec_says_name_whole_shape_and_axes():
    part = nn.Parameter(torch.ones(3, 2))
    layer_build(mesh=rank_of(0)).place(part, "a.weight", (("tp", 1),), ("kv_copy",))
    spec = get_shard_spec(part)
    assert spec is not None
    assert (spec.global_name, spec.global_shape) == ("a.weight", (3, 4))
    assert (spec.shard_dims, spec.partial_axes) == ((("tp", 1),), ("kv_copy",))
    assert torch.equal(part, torch.ones(3, 2)), "without a deviation the value stays"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_partial_axes(sequence_parallel):
    build = layer_build(mesh=rank_of(0, sequence_parallel=sequence_parallel))
    assert build.stream_axes == (("tp",) if sequence_parallel else ())
    assert build.head_axes == ("tp",)
    assert layer_build().stream_axes == layer_build().head_axes == ()
