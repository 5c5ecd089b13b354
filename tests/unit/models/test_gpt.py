"""The whole decoder on a CPU: what no part of it can show alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_glue.models.build import BuildPlace, BuiltModel, build_model
from megatron_glue.ops.host_reader import HostReader
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
    weight = model.embedding.weight if model.output_head is None else model.output_head.weight
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
