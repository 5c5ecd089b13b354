"""The whole decoder on a CPU: what no part of it can show alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_glue.models.build import BuildPlace, BuiltModel, build_model
from megatron_glue.models.gpt import GPT, ModelParts
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import IGNORE_LABEL, ForwardContext, PackedBatch, PackedSequence
from tests.support.cases import small_config
from tests.support.tolerances import RELATIVE_NORM, assert_close

VOCAB_SIZE = 50


def build(**sections: Any) -> BuiltModel:
    config = small_config("unused", **sections)
    return build_model(config, VOCAB_SIZE, BuildPlace(ParallelMesh(), torch.device("cpu"), HostReader()))


def batch_of(lengths: list[int], num_pad_tokens: int = 0) -> PackedBatch:
    sequence = PackedSequence.from_lengths(lengths, num_pad_tokens)
    ids_T = torch.randint(VOCAB_SIZE, (sequence.num_tokens,), generator=torch.Generator().manual_seed(0))
    labels_T = torch.where(sequence.segment_ids_T < 0, IGNORE_LABEL, ids_T.roll(-1))
    return PackedBatch(ids_T, labels_T, sequence, sequence.num_valid_tokens)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_f26_every_parameter_gets_zeros_from_padding_alone(num_experts: int) -> None:
    built = build(
        model={"qk_layernorm": True, "untie_embeddings_and_output_weights": True}, moe={"num_experts": num_experts}
    )
    batch = batch_of([], 8)
    built.model(batch, ForwardContext(batch.sequence)).backward()
    for name, param in built.model.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


@pytest.mark.parametrize("untied", [True, False])
def test_in_bf16_the_output_weight_gets_its_gradient_unrounded(untied: bool) -> None:
    built = build(
        model={"untie_embeddings_and_output_weights": untied},
        moe={"num_experts": 0},
        training={"precision": "bf16"},
        # The product of one chunk is bf16, their sum is not.
        backend={"cross_entropy_chunk_tokens": 8},
    )
    model, batch = built.model, batch_of([40])
    model(batch, ForwardContext(batch.sequence)).backward()
    layer = model.output_head or model.embedding
    assert layer is not None
    weight = layer.weight
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    # The embedding's own gradient reaches only rows of tokens that occur.
    rows = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    if not untied:
        rows[batch.input_ids_T] = False
    gradient = weight.grad[:VOCAB_SIZE][rows]
    assert gradient.any()
    assert not torch.equal(gradient, gradient.bfloat16().float())


def test_logits_in_bf16_predict_what_the_loss_is_computed_from() -> None:
    built = build(moe={"num_experts": 0}, training={"precision": "bf16"})
    batch = batch_of([2])
    context = ForwardContext(batch.sequence)
    labels_T = torch.tensor([7, IGNORE_LABEL])
    loss = built.model(PackedBatch(batch.input_ids_T, labels_T, batch.sequence, 1), context)
    logits = built.model.logits(batch.input_ids_T, context, 0)
    assert logits.dtype == torch.float32
    assert_close(-torch.log_softmax(logits, 0)[7], loss, tolerance=RELATIVE_NORM[torch.bfloat16])


def split(model: GPT, boundary: int) -> list[GPT]:
    """The same modules as two parts of a pipeline."""
    blocks = [(int(index), block) for index, block in model.blocks.items()]
    shared = model.dropout, model.output
    assert model.output_head is not None
    return [
        GPT(model.embedding, dict(blocks[:boundary]), None, None, *shared),
        GPT(None, dict(blocks[boundary:]), model.final_norm, model.output_head, *shared),
    ]


def test_parts_in_a_row_compute_what_the_whole_does() -> None:
    built = build(model={"untie_embeddings_and_output_weights": True, "num_layers": 3})
    batch = batch_of([20, 11], 1)
    context = ForwardContext(batch.sequence)
    loss = built.model(batch, context)
    loss.backward()
    expected = {name: param.grad for name, param in built.model.named_parameters() if param.grad is not None}
    expected_logits = built.model.logits(batch.input_ids_T, context, 7)
    built.model.zero_grad()
    first, last = split(built.model, 2)
    x_TD = first(batch, context)
    assert x_TD.shape == (32, 32)
    actual = last(batch, context, x_TD)
    assert torch.equal(actual, loss)
    actual.backward()
    for name, param in built.model.named_parameters():
        assert param.grad is not None, name
        assert torch.equal(param.grad, expected[name]), name
    x_TD = first.activations(batch.input_ids_T, context)
    assert torch.equal(last.logits(batch.input_ids_T, context, 7, x_TD), expected_logits)


def test_names_in_a_part_are_those_in_the_whole() -> None:
    whole = build(model={"untie_embeddings_and_output_weights": True, "num_layers": 3}).model
    parts = ModelParts(split(whole, 1))
    names = [canonical_name(name) for name, _ in parts.named_parameters()]
    assert sorted(names) == sorted(canonical_name(name) for name, _ in whole.named_parameters())
