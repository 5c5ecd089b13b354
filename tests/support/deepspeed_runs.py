"""The toy model under DeepSpeed or in one process, and the mark of tests that need DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_glue.config.sections import OptimizerConfig, ParallelConfig, RunConfig
from megatron_glue.parallel.data_parallel import wrap_data_parallel
from megatron_glue.parallel.engines.deepspeed_config import DeepSpeedRun
from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.gather import gather_full_parameters, gather_full_tensors
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.precision import Precision
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.training.checkpoint.store import CheckpointStore, TrainingState
from megatron_glue.training.optimizer import build_optimizer
from tests.support.toy_moe import STEP, ToyModel, run_step

CPU = torch.device("cpu")
needs_deepspeed = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs pip install 'megatron_glue[deepspeed]'"),
]


class ToyRun:
    """The toy model, its engine and its optimizer on this rank.

    Args:
        engine_name: The engine; on one process none is used.
        zero_stage: For ``deepspeed``.
        ep_size: Expert-parallel ranks.
        bf16: Compute in bf16.
        has_experts: Whether the model has experts; stage 3 can have none.
        config_path: A file for ``--deepspeed-config``.
    """

    def __init__(
        self,
        engine_name: str = "ddp",
        zero_stage: int | None = None,
        ep_size: int = 1,
        *,
        bf16: bool = False,
        has_experts: bool = True,
        config_path: str | None = None,
    ) -> None:
        precision = Precision(torch.bfloat16 if bf16 else torch.float32)
        parallel = ParallelConfig(
            data_parallel_engine=engine_name,
            zero_stage=zero_stage,
            expert_model_parallel_size=ep_size,
            deepspeed_config=config_path,
        )
        self.mesh = ParallelMesh.build(parallel, "cpu")
        model = ToyModel(self.mesh, dtype=precision.compute_dtype, has_experts=has_experts)
        run = DeepSpeedRun.from_parallel(parallel, self.mesh, precision)
        self.engine = wrap_data_parallel(model, self.mesh, parallel, precision, run)
        # A large eps keeps Adam from turning rounding noise of tiny gradients into full steps.
        config = OptimizerConfig(adam_eps=0.1, weight_decay=0.3)
        optimizer = build_optimizer(self.engine.module.named_parameters(), config, "fused", CPU)
        self.optimizer = self.engine.attach_optimizer(optimizer)

    def backward(self, step: list[list[int]] = STEP) -> float:
        """Forward and backward of a step; returns the loss of all ranks."""
        loss = torch.tensor(run_step(self.engine, self.mesh, step), dtype=torch.float64)
        if self.mesh.world_group is not None:
            torch.distributed.all_reduce(loss)
        return loss.item()

    def update(self, max_norm: float = 0.5) -> float:
        """Clip and update; returns the norm before clipping."""
        norm = self.engine.clip_gradients(max_norm)
        self.optimizer.step(0.1, norm)
        self.optimizer.zero_grad()
        return float(norm)

    def train(self, num_steps: int, step: list[list[int]] = STEP) -> list[float]:
        """Whole steps; returns the norms."""
        norms = []
        for _ in range(num_steps):
            self.backward(step)
            norms.append(self.update())
        return norms

    def weights(self) -> dict[str, Tensor]:
        """Whole fp32 weights by global name, on every rank."""
        return gather_full_parameters(self.engine.module, self.mesh)

    def tensors(self) -> dict[str, Tensor]:
        """Whole weights, moments and counters, gathered without the checkpoint's code."""
        found = self.weights()
        states = [(name, param, dict(state)) for name, param, state in self.optimizer.named_state()]
        for key in ("exp_avg", "exp_avg_sq"):
            whole = gather_full_tensors(
                ((name, param, self._whole(param, s[key])) for name, param, s in states), self.mesh
            )
            found |= {f"{name}/{key}": tensor for name, tensor in whole.items()}
        return found | {f"{name}/step": state["step"].clone() for name, _, state in states}

    def scramble(self) -> None:
        """Make sure that what is right after a load was read."""
        with torch.no_grad():
            for _, param, state in self.optimizer.named_state():
                master = getattr(param, "master_range", None)
                for tensor in (param if master is None else master.values, *state.values()):
                    (tensor.values if isinstance(tensor, FlatRange) else tensor).fill_(-3.0)

    def state(self) -> TrainingState:
        """What its checkpoint holds."""
        return TrainingState(self.engine.module, self.optimizer, RunConfig(), {}, {}, after_load=self.engine.after_load)

    def store(self, root: str | Path) -> CheckpointStore:
        """Checkpoints of this run."""
        return CheckpointStore(root, 4, self.mesh)

    def _whole(self, param: Tensor, moment: Any) -> Tensor:
        if not isinstance(moment, FlatRange):
            return moment
        spec = get_shard_spec(param)
        assert spec is not None
        group = self.mesh.edp_group if spec.is_expert else self.mesh.dp_group
        return moment.whole(spec.local_shape(self.mesh.axis_sizes), group)
