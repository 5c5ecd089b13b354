"""Replicated weights: torch's DistributedDataParallel for dense parameters, flat buckets for experts.

DDP reduces dense gradients while backward still runs; its communication hook sums where DDP alone would average.
Experts are unknown to DDP: each ep rank holds other experts, so they are summed over edp only, by buckets of their own
that start during backward too. Pipeline schedules do not run DDP's hooks (zero bubble computes weight gradients outside
of them): under a pipeline all parameters are in such buckets.

Parameters stay fp32 masters; ``precision.local`` owns the compute copies, and gradients are reduced in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_glue.parallel.engines.base import DataParallelEngine, fill_missing_gradients
from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from megatron_glue.parallel.engines.partial_sums import PartialSums
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import is_expert_parameter


class DdpEngine(DataParallelEngine):
    """DDP over dp x cp, experts over edp.

    Args:
        model: Every rank built its part alike; nothing is broadcast here.
        mesh: The run's mesh, with more than one rank.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self.model = self.module = model
        self.mesh = mesh
        trainable = self.gradient_parameters()
        experts = [param for param in trainable if is_expert_parameter(param)]
        dense = [param for param in trainable if not is_expert_parameter(param)]
        self._reducers = [FlatReducer(experts, mesh.edp_group, overlap=True)]
        self._partial_sums = PartialSums(trainable, mesh)
        self._ddp: DistributedDataParallel | None = None
        if mesh.pp_size > 1:
            self._reducers.append(FlatReducer(dense, mesh.dp_cp_group, overlap=True))
        elif mesh.dp_cp_group is not None:
            self._ddp = self.module = _wrap(model, mesh)
        self._counts = len(dense), len(experts)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Hold the reduction back until the last micro-batch; its sum then covers all of them."""
        if is_last:
            self.begin_pipeline(1)
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def begin_pipeline(self, num_micro_batches: int) -> None:
        """Reduce each bucket as soon as this many backward passes have reached all of it."""
        for reducer in self._reducers:
            reducer.expect_backwards(num_micro_batches)

    def finish_backward(self) -> None:
        """Sum what backward has not, and fill missing gradients."""
        for reducer in self._reducers:
            reducer.reduce()
        fill_missing_gradients(self.gradient_parameters())
        self._partial_sums.reduce()

    def reset(self) -> None:
        """See the base class."""
        for reducer in self._reducers:
            reducer.reset()
        super().reset()

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"data parallel: ddp, {self._counts[0]} dense tensors summed over dp and {self._counts[1]} expert tensors "
            "over edp during backward"
        )


def _wrap(model: nn.Module, mesh: ParallelMesh) -> DistributedDataParallel:
    ignored = [name for name, param in model.named_parameters() if is_expert_parameter(param)]
    # Buffers (balancing biases, tables) are their owners' business: never broadcast.
    ignored += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    # device_ids stays unset: with it DDP would walk through and copy the arguments of every forward.
    ddp = DistributedDataParallel(model, process_group=mesh.dp_cp_group, init_sync=False, gradient_as_bucket_view=True)
    ddp.register_comm_hook(mesh.dp_cp_group, _sum_bucket)
    return ddp


def _sum_bucket(group, bucket):
    """Communication hook: the sum over ranks, not their mean. DDP refuses postponed annotations, hence none."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
