"""Replicated weights: torch's DistributedDataParallel for dense parameters, flat buckets for experts.

DDP reduces dense gradients while backward still runs; its communication hook sums where DDP alone would average.
Experts are unknown to DDP: each ep rank holds other experts, so they are summed over edp only, after backward.

Parameters stay fp32 masters; ``precision.local`` owns the compute copies, and gradients are reduced in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_glue.parallel.engines.base import DataParallelEngine, fill_missing_gradients
from megatron_glue.parallel.engines.flat_reducer import FlatReducer
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import is_expert_parameter


class DdpEngine(DataParallelEngine):
    """DDP over dp, experts over edp.

    Args:
        model: Every rank built it alike; nothing is broadcast here.
        mesh: The run's mesh, with dp_size > 1.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        assert mesh.dp_group is not None
        trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        experts = [(name, param) for name, param in trainable if is_expert_parameter(param)]
        ignored = [name for name, param in model.named_parameters() if is_expert_parameter(param)]
        # Buffers (balancing biases, tables) are their owners' business: never broadcast.
        ignored += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        self.model = model
        self._expert_reducer = FlatReducer([param for _, param in experts], mesh.edp_group)
        self._num_dense, self._num_expert = len(trainable) - len(experts), len(experts)
        # device_ids stays unset: with it DDP would walk through and copy the arguments of every forward.
        self._ddp = DistributedDataParallel(
            model,
            process_group=mesh.dp_group,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(mesh.dp_group, _sum_bucket)
        self.module = self._ddp

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Hold the reduction back until the last micro-batch; its sum then covers all of them."""
        return nullcontext() if is_last else self._ddp.no_sync()

    def finish_backward(self) -> None:
        """Sum experts over edp and fill missing gradients."""
        self._expert_reducer.reduce()
        fill_missing_gradients(self.gradient_parameters())

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"data parallel: ddp, {self._num_dense} dense tensors summed over dp during backward, "
            f"{self._num_expert} expert tensors over edp after it"
        )


def _sum_bucket(group, bucket):
    """Communication hook: the sum over ranks, not their mean. DDP refuses postponed annotations, hence none."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
