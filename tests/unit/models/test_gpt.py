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
