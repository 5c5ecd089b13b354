"""The whole decoder cut over tensor-parallel ranks against one process: loss, every gradient, three steps, sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.models.build import BuildPlace, build_model
from megatron_glue.models.gpt import GPT
from megatron_glue.models.parallelize import parallelize
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.data_parallel import DataParallelEngine
from megatron_glue.parallel.gather import differing_replicas, gather_full_gradients, gather_full_parameters
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import IGNORE_LABEL, ForwardContext, PackedBatch, PackedSequence
from tests.support.cases import small_config
from tests.support.processes import run_distributed
from tests.support.tensor_cases import make_vectors_uneven
from tests.support.tolerances import RELATIVE_NORM, assert_close

VOCAB_SIZE = 50
# 64 rows: the vocabulary ends inside the last rank. 128 rows: on several ranks there is only padding.
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"make_vocab_size_divisible_by": 64},
    "tied, much padding, one kv head": {"num_query_groups": 1},
    "untied": {"untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 64},
    "learned positions": {"position_embedding_type": "learned", "normalization": "LayerNorm", "swiglu": False},
    "sinusoids, dropout": {"position_embedding_type": "sinusoidal", "hidden_dropout": 0.2, "attention_dropout": 0.1},
    "everything": {
        # Values that stand out from their bias: else the gradient of the scores is a difference of near-equal numbers.
        "init_method_std": 0.2,
        "add_bias_linear": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "learned",
    },
}
LAYOUTS = [(2, False), (2, True), (4, True)]
layouts = pytest.mark.parametrize(
    ("world_size", "sequence_parallel"), LAYOUTS, ids=["2, all rows", "2, own rows", "4, own rows"]
)


def build(
    overrides: dict[str, Any], world_size: int, sequence_parallel: bool, **sections: Any
) -> tuple[DataParallelEngine, ParallelMesh]:
    parallel = {"tensor_model_parallel_size": world_size, "sequence_parallel": sequence_parallel}
    config = small_config("unused", model=overrides, moe={"num_experts": 0}, parallel=parallel, **sections)
    mesh = ParallelMesh()
    if world_size > 1:
        mesh = ParallelMesh.build(config.parallel, "cpu", config.model.num_kv_heads)
    built = build_model(config, VOCAB_SIZE, BuildPlace(mesh, torch.device("cpu"), HostReader()))
    make_vectors_uneven(built.model, mesh)
    return parallelize(built, mesh, config.parallel), mesh


def run(engine: DataParallelEngine, mesh: ParallelMesh, step: int = 0) -> Tensor:
    """Gradients of one step of two micro-batches; returns the loss."""
    loss = torch.zeros(())
    for micro_batch in range(2):
        sequence = PackedSequence.from_lengths([9, 20 + micro_batch], 3 - micro_batch)
        generator = torch.Generator().manual_seed(10 * step + micro_batch)
        ids_T = torch.randint(VOCAB_SIZE, (sequence.num_tokens,), generator=generator)
        labels_T = torch.where(sequence.segment_ids_T < 0, IGNORE_LABEL, ids_T.roll(-1))
        context = ForwardContext(
            sequence, step=step, micro_batch=micro_batch, residual_rows=mesh.residual_rows(sequence.num_tokens)
        )
        with engine.micro_batch(micro_batch == 1):
            own_loss = engine.module(PackedBatch(ids_T, labels_T, sequence, sequence.num_valid_tokens), context)
            engine.backward(own_loss / 60)
        loss += own_loss.detach()
    engine.finish_backward()
    return loss


def compare(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for what, overrides in MODELS.items():
        whole, single = build(overrides, 1, False)
        part, mesh = build(overrides, world_size, sequence_parallel)
        assert differing_replicas(part.model, mesh) == []
        assert_close(run(part, mesh), run(whole, single), what=f"{what}: loss")
        expected, actual = gather_full_gradients(whole.model, single), gather_full_gradients(part.model, mesh)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, what=f"{what}: gradient of {name}")
        assert_close(part.clip_gradients(0.1), whole.clip_gradients(0.1), what=f"{what}: norm")


@layouts
def test_loss_gradients_and_norm_equal_one_process(world_size: int, sequence_parallel: bool) -> None:
    run_distributed(compare, world_size, sequence_parallel)


def train(engine: DataParallelEngine, mesh: ParallelMesh) -> list[float]:
    optimizer = torch.optim.AdamW(engine.gradient_parameters(), lr=0.01)
    norms = []
    for step in range(3):
        run(engine, mesh, step)
        norms.append(float(engine.clip_gradients(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def three_steps(rank: int, world_size: int, sequence_parallel: bool) -> list[float]:
    whole, single = build(MODELS["everything"], 1, False)
    part, mesh = build(MODELS["everything"], world_size, sequence_parallel)
    train(whole, single)
    norms = train(part, mesh)
    assert differing_replicas(part.model, mesh) == []
    expected, actual = gather_full_parameters(whole.model, single), gather_full_parameters(part.model, mesh)
    for name, weight in expected.items():
        assert_close(actual[name], weight, what=name, tolerance=1e-4)
    return norms


@layouts
def test_f75_weights_that_ranks_share_stay_bit_equal(world_size: int, sequence_parallel: bool) -> None:
    norms = run_distributed(three_steps, world_size, sequence_parallel)
    assert all(of_rank == norms[0] for of_rank in norms)


def compare_bf16(rank: int, world_size: int, sequence_parallel: bool) -> None:
    bf16 = {"training": {"precision": "bf16"}}
    # Norms of heads get sums of near-equal numbers, on which two roundings may differ by more.
    overrides = MODELS["everything"] | {"qk_layernorm": False}
    whole, single = build(overrides, 1, False, **bf16)
    part, mesh = build(overrides, world_size, sequence_parallel, **bf16)
    run(whole, single)
    run(part, mesh)
    expected, actual = gather_full_gradients(whole.model, single), gather_full_gradients(part.model, mesh)
    for name, gradient in expected.items():
        assert actual[name].dtype == torch.float32
        assert_close(actual[name], gradient, what=name, tolerance=RELATIVE_NORM[torch.bfloat16])


def test_bf16() -> None:
    run_distributed(compare_bf16, 2, True)


def compare_logits(rank: int, world_size: int, sequence_parallel: bool) -> None:
    whole, _ = build({}, 1, False)
    part, mesh = build({}, world_size, sequence_parallel)
    sequence = PackedSequence.from_lengths([10], 2)
    ids_T = torch.arange(12)
    context = ForwardContext(sequence, residual_rows=mesh.residual_rows(12))
    assert isinstance(whole.model, GPT)
    assert isinstance(part.model, GPT)
    with torch.no_grad():
        for row in (0, 9):
            expected = whole.model.logits(ids_T, ForwardContext(sequence), row)
            assert_close(part.model.logits(ids_T, context, row), expected)


@layouts
def test_logits_for_sampling(world_size: int, sequence_parallel: bool) -> None:
    run_distributed(compare_logits, world_size, sequence_parallel)
