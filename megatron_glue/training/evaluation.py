"""Loss on held-out documents: the same model, the same packed path, no dropout and no gradients.

Every rank runs the same number of micro-batches, so no collective waits for a rank that has none. Its metadata builds
and host reads are not counted with those of training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.executor import StepExecutor
from megatron_glue.training.metrics import counted_once
from megatron_glue.types import ForwardContext, PackedBatch


@torch.no_grad()
def evaluate(
    module: nn.Module,
    executor: StepExecutor,
    batches: Sequence[PackedBatch],
    mesh: ParallelMesh,
    seed: int = 0,
) -> Tensor:
    """Mean loss over all labelled tokens of all ranks' batches.

    Args:
        module: Switched to evaluation for the duration, and back to what it was.
        executor: Runs it.
        batches: This rank's batches, on the device; equally many on all ranks. What layers derived from their layouts
            is dropped at the end, so that they may be kept for the next time.
        mesh: The run's mesh.
        seed: The run's seed.

    Returns:
        fp32 device scalar, nats per token, on all ranks; 0 if there is no label at all.
    """
    was_training = module.training
    module.eval()
    try:
        loss_sum = executor.evaluate(
            [(batch, _context(batch, index, mesh, seed)) for index, batch in enumerate(batches)]
        )
        num_labels = torch.full_like(loss_sum, sum(batch.num_label_tokens for batch in batches))
        shares = counted_once(torch.stack([loss_sum, num_labels]).double(), mesh)
        sums = all_reduce_sum(shares, mesh.world_group)
    finally:
        module.train(was_training)
        for batch in batches:
            batch.sequence.cache_entries.clear()
    return (sums[0] / sums[1].clamp(min=1)).float()


def _context(batch: PackedBatch, index: int, mesh: ParallelMesh, seed: int) -> ForwardContext:
    rows = mesh.residual_rows(batch.sequence.num_tokens)
    return ForwardContext(sequence=batch.sequence, seed=seed, micro_batch=index, residual_rows=rows)
