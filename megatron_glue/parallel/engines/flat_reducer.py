"""Sums the gradients of some parameters over a group in flat buckets, while backward still runs or after it.

For parameters that torch's own reduction leaves alone: experts are summed over edp only, replicas that see other rows
or heads over their tensor-parallel group, all of them under a pipeline, whose schedules DDP does not know. Every rank
issues the same collectives in the same order whatever its tokens touched: a parameter without a gradient takes part
with zeros, and a bucket is never reduced before the buckets in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_glue.parallel.grad_norm import local_gradient

DEFAULT_BUCKET_BYTES = 64 * 2**20


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together."""

    params: list[nn.Parameter]
    num_pending: int = 0
    grads: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None


class FlatReducer:
    """Sums gradients in place.

    Args:
        params: Plain parameters or DTensors of one layout, the same in order and shape on all ranks of the group.
        group: Ranks to sum over; ``None`` for one.
        bucket_bytes: Largest flat buffer; a larger single gradient gets a buffer of its own.
        overlap: Reduce a bucket during backward, as soon as its last gradient is there; see :meth:`expect_backwards`.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        group: ProcessGroup | None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        overlap: bool = False,
    ) -> None:
        self._group = group
        # Backward reaches the last parameters first.
        self._buckets = [_Bucket(bucket) for bucket in _fill_buckets(params[::-1], bucket_bytes)]
        self._num_launched = 0
        self._num_expected = 0
        self._num_arrived: dict[nn.Parameter, int] = {}
        if overlap and group is not None:
            for bucket in self._buckets:
                for param in bucket.params:
                    param.register_post_accumulate_grad_hook(_Arrival(self, bucket))

    @property
    def num_buckets(self) -> int:
        """Collectives per call of :meth:`reduce`."""
        return len(self._buckets)

    @property
    def num_launched(self) -> int:
        """Buckets whose reduction has begun since the last :meth:`reduce`."""
        return self._num_launched

    def expect_backwards(self, count: int) -> None:
        """Say how many backward passes will still reach each parameter before :meth:`reduce`.

        A parameter that fewer of them reach is waited for until :meth:`reduce`, which is late but right.

        Args:
            count: Passes.
        """
        self._num_expected = count
        self._num_arrived.clear()
        for bucket in self._buckets:
            bucket.num_pending = len(bucket.params)

    def reduce(self) -> None:
        """Replace each gradient by its sum over the group. All collectives start before the first is awaited."""
        if self._group is None:
            return
        for bucket in self._buckets[self._num_launched :]:
            self._launch(bucket)
        for bucket in self._buckets:
            assert bucket.flat is not None, "every bucket was launched"
            if bucket.work is not None:
                bucket.work.wait()
            for grad, part in zip(bucket.grads, bucket.flat.split([g.numel() for g in bucket.grads]), strict=True):
                if grad.data_ptr() != part.data_ptr():
                    grad.copy_(part.view(grad.shape))
            bucket.grads, bucket.flat, bucket.work = [], None, None
        self._num_launched = self._num_expected = 0

    def reset(self) -> None:
        """Forget a backward that an exception ended, on all ranks at the same place."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.grads, bucket.flat, bucket.work = [], None, None
        self._num_launched = self._num_expected = 0

    def arrive(self, bucket: _Bucket, param: nn.Parameter) -> None:
        """A backward pass has added its share to a gradient."""
        if self._num_expected == 0:
            return
        self._num_arrived[param] = arrived = self._num_arrived.get(param, 0) + 1
        assert arrived <= self._num_expected, "a gradient grew after its last expected backward"
        if arrived < self._num_expected:
            return
        bucket.num_pending -= 1
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].num_pending == 0:
            self._launch(self._buckets[self._num_launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._num_launched += 1
        for param in bucket.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        bucket.grads = [local_gradient(param.grad) for param in bucket.params if param.grad is not None]
        if len(bucket.grads) == 1 and bucket.grads[0].is_contiguous():
            bucket.flat = bucket.grads[0].view(-1)
        else:
            bucket.flat = torch.cat([grad.reshape(-1) for grad in bucket.grads])
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


class _Arrival:
    """The hook of one parameter; torch calls it with the parameter after its gradient has grown."""

    def __init__(self, reducer: FlatReducer, bucket: _Bucket) -> None:
        self._reducer = reducer
        self._bucket = bucket

    def __call__(self, param: nn.Parameter) -> None:
        self._reducer.arrive(self._bucket, param)


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
