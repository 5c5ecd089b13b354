"""Chooses the data-parallel engine for a model. The last technique that is applied to it.

See ``engines/base.py`` for what an engine promises.
"""

from __future__ import annotations

from torch import nn

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.parallel.engines.base import DataParallelEngine, SingleEngine, keep_shard_specs
from megatron_glue.parallel.engines.ddp import DdpEngine
from megatron_glue.parallel.engines.deepspeed import DeepSpeedEngine
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun
from megatron_glue.parallel.engines.fsdp2 import Fsdp2Engine
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision

__all__ = ["DataParallelEngine", "wrap_data_parallel"]


def wrap_data_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    parallel: ParallelConfig,
    precision: Precision,
    deepspeed_run: DeepSpeedRun | None = None,
) -> DataParallelEngine:
    """Wrap a model whose parameters are fp32, on their device and final.

    Afterwards every parameter has a :class:`ShardSpec`. Optimizers must be built from ``engine.gradient_parameters()``,
    since FSDP2 replaces parameters. Evaluation runs under ``torch.no_grad``, not ``inference_mode``: buffers that FSDP2
    gathers into for the first time would be unusable for training. Every dense parameter must be reached in every
    micro-batch, if need be through zero rows: DDP waits for each of them. DeepSpeed starts when it gets the optimizer:
    no forward before ``engine.attach_optimizer``.

    Args:
        model: Its ``blocks`` are :class:`ManagedBlock` shells. Its loss is computed inside its forward, so that all
            parameters are used under the engine's hooks. Other methods that run its layers (sampling) are named in its
            attribute ``forward_methods``; forward must not call those, and under fsdp2 all ranks call them together.
        mesh: The run's mesh.
        parallel: Which engine.
        precision: Compute dtype.
        deepspeed_run: What the deepspeed engine wants to know of the run; unset: one micro-batch per step.

    Returns:
        The engine; on one process, one that reduces nothing, whichever was asked for.
    """
    with keep_shard_specs(model):
        if mesh.world_size == 1:
            return SingleEngine(model)
        if parallel.data_parallel_engine == "ddp":
            return DdpEngine(model, mesh)
        if parallel.data_parallel_engine == "deepspeed":
            return DeepSpeedEngine(model, mesh, deepspeed_run or DeepSpeedRun.from_parallel(parallel, mesh, precision))
        return Fsdp2Engine(model, mesh, precision, zero_stage=3 if parallel.zero_stage is None else parallel.zero_stage)
