"""Applies distributed techniques to a model, in one visible order.

1. Experts over expert-parallel ranks: done while building, each rank builds its own (``moe/build.py``).
2. Activations: blocks sit in shells through which the activation manager runs them (``build.py``).
3. Data parallelism, last, around everything: what it wraps must be final.
"""

from __future__ import annotations

from megatron_glue.config.sections import ParallelConfig
from megatron_glue.models.build import BuiltModel
from megatron_glue.parallel.data_parallel import DataParallelEngine, wrap_data_parallel
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun
from megatron_glue.parallel.mesh import ParallelMesh


def parallelize(
    built: BuiltModel, mesh: ParallelMesh, parallel: ParallelConfig, deepspeed_run: DeepSpeedRun | None = None
) -> DataParallelEngine:
    """Wrap a built model.

    Args:
        built: On its device, unwrapped.
        mesh: The run's mesh; every rank must call this.
        parallel: Which engine.
        deepspeed_run: What the deepspeed engine wants to know of the run.

    Returns:
        The engine around the model. Build the optimizer from its parameters.
    """
    return wrap_data_parallel(built.model, mesh, parallel, built.precision, deepspeed_run)
