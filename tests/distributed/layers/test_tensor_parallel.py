"""Blocks cut over 2 and 4 ranks against whole ones: output, gradient of the input and of every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.activation.recompute import InputInMemory, run_recomputed
from megatron_glue.config.errors import ConfigError
from megatron_glue.config.sections import ModelConfig
from megatron_glue.layers.attention import build_attention
from megatron_glue.layers.embedding import build_token_embedding
from megatron_glue.layers.mlp import build_feed_forward
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.types import ForwardContext, PackedSequence
from tests.support.collective_watch import CollectiveWatch
from tests.support.layer_cases import build_blocks, layer_build, run_blocks, small_model
from tests.support.processes import run_distributed
from tests.support.tensor_cases import assert_same_gradients, make_vectors_uneven, own_rows, tensor_mesh
from tests.support.tolerances import assert_close

MODELS: dict[str, dict[str, Any]] = {
    "two kv heads": {},
    "one kv head": {"num_query_groups": 1},
    "one kv head, every part": {
        "num_query_groups": 1,
        "qk_layernorm": True,
        "add_bias_linear": True,
        "attention_dropout": 0.2,
    },
    "as many kv heads": {"num_query_groups": 4, "rotary_percent": 0.5},
    "biases, GELU, LayerNorm": {"add_bias_linear": True, "swiglu": False, "normalization": "LayerNorm"},
    "norms of heads": {"qk_layernorm": True},
    "norms of heads, LayerNorm, window": {"qk_layernorm": True, "normalization": "LayerNorm", "window_size": 5},
    "dropout": {"attention_dropout": 0.2, "hidden_dropout": 0.3},
}
worlds = pytest.mark.parametrize("world_size", [2, 4])
sequence_parallel = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all rows", "own rows"])


def run(blocks: nn.Module, sequence: PackedSequence, mesh: ParallelMesh, *, recompute: bool = False) -> list[Tensor]:
    """Output and gradient of the input on this rank's rows."""
    generator = torch.Generator().manual_seed(11)
    x_TD, probe_TD = (torch.randn(sequence.num_tokens, 32, generator=generator) for _ in range(2))
    x = own_rows(x_TD, mesh).clone().requires_grad_()
    context = ForwardContext(sequence, step=3, residual_rows=mesh.residual_rows(sequence.num_tokens))
    y = x
    if recompute:
        for block in blocks.children():
            y = run_recomputed(block, [y], context, [InputInMemory(y)], preserve_rng=False)
    else:
        assert isinstance(blocks, nn.ModuleList)
        y = run_blocks(blocks, x, context)
    y.backward(own_rows(probe_TD, mesh))
    assert x.grad is not None
    return [y.detach(), x.grad]


def build(model: ModelConfig, mesh: ParallelMesh) -> nn.ModuleList:
    blocks, _ = build_blocks(model, mesh=mesh)
    make_vectors_uneven(blocks, mesh)
    return blocks


def compare(rank: int, world_size: int, is_sequence_parallel: bool, recompute: bool) -> None:
    sequence = PackedSequence.from_lengths([9, 4, 1, 12], 6)
    for what, overrides in MODELS.items():
        model = small_model(**({"num_layers": 2} | overrides))
        mesh = tensor_mesh(world_size, is_sequence_parallel, model)
        whole, part = build(model, ParallelMesh()), build(model, mesh)
        expected = run(whole, sequence, ParallelMesh())
        actual = run(part, sequence, mesh, recompute=recompute)
        for name, a, e in zip(("output", "gradient of the input"), actual, expected, strict=True):
            assert_close(a, own_rows(e, mesh), what=f"{what}: {name}")
        assert_same_gradients(part, mesh, whole, what)


@sequence_parallel
@worlds
def test_blocks_equal_those_of_one_process(world_size: int, sequence_parallel: bool) -> None:
    run_distributed(compare, world_size, sequence_parallel, False)


@sequence_parallel
def test_recomputed_blocks_equal_those_of_one_process(sequence_parallel: bool) -> None:
    run_distributed(compare, 2, sequence_parallel, True)


def compare_few_tokens(rank: int, world_size: int) -> None:
    model = small_model(num_layers=1, qk_layernorm=True, num_query_groups=1)
    mesh = tensor_mesh(world_size, True, model)
    whole, part = build(model, ParallelMesh()), build(model, mesh)
    for num_valid in range(1, 9):
        sequence = PackedSequence.from_lengths([num_valid], 8 - num_valid)
        for blocks in (whole, part):
            blocks.zero_grad()
        expected, actual = run(whole, sequence, ParallelMesh()), run(part, sequence, mesh)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, own_rows(e, mesh), what=f"{num_valid} tokens")
        assert all(param.grad is not None for param in part.parameters())
    assert_same_gradients(part, mesh, whole, "8 tokens")


def test_f78_fewer_tokens_than_ranks() -> None:
    run_distributed(compare_few_tokens, 4)


def look_up(rank: int, world_size: int, is_sequence_parallel: bool) -> None:
    sequence = PackedSequence.from_lengths([7, 3], 2, position_starts=[4, 0])
    ids_T = torch.randint(0, 100, (12,), generator=torch.Generator().manual_seed(0))
    for kind in ("rope", "learned", "sinusoidal"):
        model = small_model(position_embedding_type=kind)
        mesh = tensor_mesh(world_size, is_sequence_parallel, model)
        whole, part = (build_token_embedding(model, 100, layer_build(model, mesh=m)) for m in (ParallelMesh(), mesh))
        for dtype in (torch.float32, torch.bfloat16):
            expected = whole(ids_T, ForwardContext(sequence), dtype)
            actual = part(ids_T, ForwardContext(sequence, residual_rows=mesh.residual_rows(12)), dtype)
            assert actual.dtype == dtype
            assert torch.equal(actual, own_rows(expected, mesh)), kind


@sequence_parallel
def test_the_embedding_is_bit_equal_whatever_it_is_cut_into(sequence_parallel: bool) -> None:
    run_distributed(look_up, 2, sequence_parallel)


def places(rank: int, world_size: int, is_sequence_parallel: bool) -> dict[str, list[Any]]:
    model = small_model(num_layers=1, num_query_groups=2, qk_layernorm=True, add_bias_linear=True)
    mesh = tensor_mesh(world_size, is_sequence_parallel, model)
    found = {}
    for name, param in build_blocks(model, mesh=mesh)[0].named_parameters():
        spec = get_shard_spec(param)
        assert spec is not None
        assert spec.global_name == f"blocks.{name}"
        assert spec.local_shape(mesh.axis_sizes) == tuple(param.shape)
        found[name] = [list(spec.global_shape), [dim for _, dim in spec.shard_dims], list(spec.partial_axes)]
    return found


def test_what_each_parameter_is_a_part_of() -> None:
    """Two kv heads on four ranks: two hold the same one."""
    for is_sequence_parallel in (False, True):
        stream = ["tp"] if is_sequence_parallel else []
        for found in run_distributed(places, 4, is_sequence_parallel):
            assert found == {
                "0.attention_norm.weight": [[32], [], stream],
                "0.attention.qkv_weight": [[2, 4, 8, 32], [0], ["kv_copy"]],
                "0.attention.qkv_bias": [[2, 4, 8], [0], ["kv_copy"]],
                "0.attention.out_weight": [[32, 32], [1, 1], []],
                "0.attention.out_bias": [[32], [], stream],
                "0.attention.q_norm.weight": [[8], [], ["tp"]],
                "0.attention.k_norm.weight": [[8], [], ["tp"]],
                "0.ffn_norm.weight": [[32], [], stream],
                "0.ffn.gate_up_weight": [[2, 48, 32], [1, 1], []],
                "0.ffn.gate_up_bias": [[2, 48], [1, 1], []],
                "0.ffn.down_weight": [[32, 48], [1, 1], []],
                "0.ffn.down_bias": [[32], [], stream],
            }


def exchanges(rank: int, world_size: int, is_sequence_parallel: bool) -> list[dict[str, int]]:
    model = small_model(num_layers=1, add_bias_linear=True)
    mesh = tensor_mesh(world_size, is_sequence_parallel, model)
    sequence = PackedSequence.from_lengths([8])
    blocks = build(model, mesh)
    x = own_rows(torch.randn(8, 32), mesh).clone().requires_grad_()
    context = ForwardContext(sequence, residual_rows=mesh.residual_rows(8))
    counts = []
    with CollectiveWatch() as forward:
        y = run_blocks(blocks, x, context)
    with CollectiveWatch() as backward:
        y.backward(torch.ones_like(y))
    for watch in (forward, backward):
        counts.append({name: watch.count(name) for name in ("gather", "reduce_scatter", "all_reduce")})
    return counts


def test_number_of_exchanges_of_a_block() -> None:
    for forward, backward in run_distributed(exchanges, 2, True):
        assert forward == {"gather": 2, "reduce_scatter": 2, "all_reduce": 0}
        # Two gradients of rows that were summed, and two inputs once more.
        assert backward == {"gather": 4, "reduce_scatter": 2, "all_reduce": 0}
    for forward, backward in run_distributed(exchanges, 2, False):
        assert forward == {"gather": 0, "reduce_scatter": 0, "all_reduce": 2}
        assert backward == {"gather": 0, "reduce_scatter": 0, "all_reduce": 2}


def refusals(rank: int, world_size: int) -> list[str]:
    def message(model: ModelConfig, builder: Any, num_kv_heads: int | None = None) -> str:
        known = model if num_kv_heads is None else model.model_copy(update={"num_query_groups": num_kv_heads})
        build = layer_build(model, mesh=tensor_mesh(world_size, False, known))
        with pytest.raises(ConfigError) as error:
            builder(model, build)
        return str(error.value)

    def attention(model: ModelConfig, build: Any) -> None:
        build_attention(model, 0, build)

    six_heads = {"num_attention_heads": 6, "kv_channels": 8}
    return [
        message(small_model(**six_heads, num_query_groups=6), attention),
        message(small_model(num_attention_heads=24, kv_channels=8, num_query_groups=6), attention, 4),
        message(small_model(ffn_hidden_size=50), lambda model, build: build_feed_forward(model, "ffn", build)),
        message(small_model(), lambda model, build: build_feed_forward(model, "ffn", build, ffn_size=30)),
        message(
            small_model(make_vocab_size_divisible_by=6), lambda model, build: build_token_embedding(model, 13, build)
        ),
    ]


def test_what_does_not_split_is_named() -> None:
    heads, kv_heads, ffn, shared, vocabulary = run_distributed(refusals, 4)[0]
    assert "--tensor-model-parallel-size=4: does not divide the 6 query heads" in heads
    assert "--tensor-model-parallel-size=4: neither divides the 6 KV heads nor is a multiple" in kv_heads
    assert "--ffn-hidden-size=50" in ffn
    assert "--moe-shared-expert-intermediate-size=30" in shared
    assert "--make-vocab-size-divisible-by=6: pads the vocabulary to 18 rows" in vocabulary
