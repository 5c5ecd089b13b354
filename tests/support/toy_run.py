"""A run small enough to be saved and restored many times in a test of checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron_glue.config.sections import ModelConfig, OptimizerConfig, RunConfig
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.training.checkpoint.store import CheckpointStore, TrainingState
from megatron_glue.training.optimizer import build_optimizer

CPU = torch.device("cpu")


class Run:
    """A toy run: its gradient is drawn from the default generator, so the generator's state matters."""

    def __init__(self, root: Path, *, seed: int = 0, backend: str = "fused", num_layers: int = 2, **config) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        self.model.register_buffer("balance", torch.randn(3))
        self.optimizer = build_optimizer(self.model.named_parameters(), OptimizerConfig(), backend, CPU)
        self.config = RunConfig(model=ModelConfig(num_layers=num_layers), **config)
        self.store = CheckpointStore(root, 2, ParallelMesh())
        self.iteration = 0

    def state(self, *, weights_only: bool = False) -> TrainingState:
        optimizer = None if weights_only else self.optimizer
        return TrainingState(
            self.model, optimizer, self.config, {"iteration": self.iteration}, {"epoch": 1, "pack": self.iteration}
        )

    def train(self, num_steps: int, norm: float = 1.0) -> None:
        for _ in range(num_steps):
            for param in self.model.parameters():
                param.grad = torch.randn_like(param)
            self.optimizer.step(0.1, torch.tensor(norm))
            self.iteration += 1

    def save(self) -> Path:
        self.store.save(self.iteration, self.state())
        return self.store.path_of(self.iteration)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, _, state in self.optimizer.named_state():
            found |= {f"{name}/{key}": value.clone() for key, value in state.items()}
        return found
