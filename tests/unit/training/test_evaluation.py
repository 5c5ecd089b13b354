from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_glue.training.evaluation import evaluate
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


def test_mean_is_over_tokens_not_over_batches() -> None:
    module = Toy().train()
    loss = evaluate(module, module, [batch(1), batch(3), batch(0)], None)
    assert loss.item() == pytest.approx((1 + 9) / 4)
    assert module.training


def test_no_label_at_all_is_zero_not_nan() -> None:
    module = Toy().eval()
    assert evaluate(module, module, [batch(0)], None).item() == 0.0
    assert not module.training
