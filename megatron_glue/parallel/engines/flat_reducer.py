"""Sums the gradients of some parameters over a group in flat buckets, after backward.

For parameters that the engine's own reduction must leave alone: experts are summed over edp only, and under FSDP2 also
the few that stay replicated. Every rank issues the same collectives whatever its tokens touched: a parameter without a
gradient takes part with zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

DEFAULT_BUCKET_BYTES = 64 * 2**20


class FlatReducer:
    """Sums gradients in place.

    Args:
        params: Plain parameters, the same in order and shape on all ranks of the group.
        group: Ranks that hold the same parameters; ``None`` for one.
        bucket_bytes: Largest flat buffer; a larger single gradient gets a buffer of its own.
    """

    def __init__(
        self, params: list[nn.Parameter], group: ProcessGroup | None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self._group = group
        self._buckets = _fill_buckets(params, bucket_bytes)

    @property
    def num_buckets(self) -> int:
        """Collectives per call of :meth:`reduce`."""
        return len(self._buckets)

    def reduce(self) -> None:
        """Replace each gradient by its sum over the group. All collectives start before the first is awaited."""
        if self._group is None:
            return
        pending: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []
        for bucket in self._buckets:
            for param in bucket:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            grads = [param.grad for param in bucket if param.grad is not None]
            single = len(grads) == 1 and grads[0].is_contiguous()
            flat = grads[0].view(-1) if single else torch.cat([grad.reshape(-1) for grad in grads])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            pending.append(([] if single else grads, flat, work))
        for grads, flat, work in pending:
            if work is not None:
                work.wait()
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]) if grads else (), strict=True):
                grad.copy_(part.view(grad.shape))


def _fill_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device share a bucket until it is full."""
    buckets: list[list[nn.Parameter]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for param in params:
        kind = (param.dtype, param.device)
        size = param.numel() * param.element_size()
        bucket, held = open_bucket.get(kind, ([], 0))
        if not bucket or held + size > bucket_bytes:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(param)
        open_bucket[kind] = (bucket, held + size)
    return buckets
