"""Loss on held-out documents: the same model, the same packed path, no dropout and no gradients.

Every rank runs the same number of micro-batches, so no collective waits for a rank that has none. Its metadata builds
and host reads are not counted with those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.types import ForwardContext, PackedBatch


@torch.no_grad()
def evaluate(
    module: nn.Module,
    run: Callable[[PackedBatch, ForwardContext], Tensor],
    batches: Sequence[PackedBatch],
    group: ProcessGroup | None,
    seed: int = 0,
) -> Tensor:
    """Mean loss over all labelled tokens of all ranks' batches.

    Args:
        module: Switched to evaluation for the duration, and back to what it was.
        run: The engine's forward: (batch, context) to the summed loss.
        batches: This rank's batches, on the device; equally many on all ranks.
        group: Ranks that hold other batches.
        seed: The run's seed.

    Returns:
        fp32 device scalar, nats per token; 0 if there is no label at all.
    """
    was_training = module.training
    module.eval()
    try:
        loss_sum = torch.zeros((), device=_device_of(module))
        for index, batch in enumerate(batches):
            loss_sum += run(batch, ForwardContext(sequence=batch.sequence, seed=seed, micro_batch=index)).float()
        num_labels = torch.full_like(loss_sum, sum(batch.num_label_tokens for batch in batches))
        sums = all_reduce_sum(torch.stack([loss_sum, num_labels]).double(), group)
    finally:
        module.train(was_training)
    return (sums[0] / sums[1].clamp(min=1)).float()


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
