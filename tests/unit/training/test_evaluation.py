from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.activation.parts import PartManagers
from megatron_glue.models.gpt import GPT
from megatron_glue.parallel.engines.base import SingleEngine
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.evaluation import evaluate
from megatron_glue.training.executor import DirectExecutor
from megatron_glue.types import IGNORE_LABEL, ForwardContext, PackedBatch, PackedSequence


def batch(num_labels: int) -> PackedBatch:
    labels = torch.full((4,), IGNORE_LABEL)
    labels[:num_labels] = 1
    sequence = PackedSequence.from_lengths([num_labels + 1] if num_labels else [], 3 - num_labels if num_labels else 4)
    return PackedBatch(torch.zeros(4, dtype=torch.int64), labels, sequence, num_labels)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: PackedBatch, context: ForwardContext) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.weight * batch.num_label_tokens**2


def executor_of(module: Toy) -> DirectExecutor:
    return DirectExecutor(SingleEngine(module), cast(GPT, module), PartManagers([]), torch.device("cpu"))


def test_mean_is_over_tokens_not_over_batches() -> None:
    module = Toy().train()
    loss = evaluate(module, executor_of(module), [batch(1), batch(3), batch(0)], ParallelMesh())
    assert loss.item() == pytest.approx((1 + 9) / 4)
    assert module.training


def test_no_label_at_all_is_zero_not_nan() -> None:
    module = Toy().eval()
    assert evaluate(module, executor_of(module), [batch(0)], ParallelMesh()).item() == 0.0
    assert not module.training


def test_what_layers_derived_from_a_layout_is_not_kept_with_the_batch() -> None:
    class Deriving(Toy):
        def forward(self, batch: PackedBatch, context: ForwardContext) -> Tensor:
            context.sequence.cache_entries["key"] = 1
            return super().forward(batch, context)

    module, kept = Deriving(), batch(1)
    evaluate(module, executor_of(module), [kept], ParallelMesh())
    assert not kept.sequence.cache_entries
