"""Applies distributed techniques to a model, in one visible order.

1. Pipeline: only this rank's stages are built (``build.py``).
2. Tensor and sequence parallelism: layers are built in this rank's sizes (``layers/build.py``).
3. Experts over expert-parallel ranks: each rank builds its own (``moe/build.py``).
4. Context parallelism: the attention kernel is wrapped in its exchange (``build.py``).
5. Activations: blocks sit in shells through which the activation manager runs them (``build.py``).
6. Data parallelism, last, around everything: what it wraps must be final.

How passes then run, through a schedule of stages or not, is chosen by ``training/executor.py``.
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
