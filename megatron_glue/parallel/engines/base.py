"""What every data-parallel engine promises to the training step, and the one-process engine.

The loss is divided once, by the valid tokens of the whole optimizer step over all ranks and micro-batches. So every
gradient is a plain SUM over ranks and micro-batches: no engine divides, neither dense parameters by dp nor expert
parameters by edp or ep.

Stands around forward and backward of each micro-batch, and between the last backward and the gradient norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_glue.parallel.gather import gather_full_gradients
from megatron_glue.parallel.grad_norm import clip_gradients, local_gradient
from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, set_shard_spec


class DataParallelEngine(ABC):
    """Wraps a model so that its gradients become sums over the data-parallel ranks.

    The order of a step: for each micro-batch ``with engine.micro_batch(is_last): loss = engine.module(...);
    engine.backward(loss)``, then ``engine.finish_backward()``, then ``engine.clip_gradients()`` and the optimizer. A
    pipeline schedule, which orders passes itself, says ``engine.begin_pipeline(n)`` instead of ``micro_batch``. All
    ranks run the same number of micro-batches; one without valid tokens counts too.

    Attributes:
        module: What to call for forward.
        model: The model inside it: same parameters, names without the engine's prefix. For sampling and checkpoints.
        mesh: The run's mesh.
    """

    module: nn.Module
    model: nn.Module
    mesh: ParallelMesh

    @abstractmethod
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward AND backward.

        Args:
            is_last: Whether this is the last micro-batch of the optimizer step.
        """

    def begin_pipeline(self, num_micro_batches: int) -> None:
        """A pipeline schedule is about to run this many backward passes through every part of the model."""
        del num_micro_batches

    def backward(self, loss: Tensor) -> None:
        """Run backward from a micro-batch's loss, already divided by the labels of the step."""
        loss.backward()

    @abstractmethod
    def finish_backward(self) -> None:
        """Reduce what backward itself did not, and give zeros to trainable parameters without a gradient."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Measure the global gradient norm, and scale all gradients down to it if they exceed ``max_norm``.

        Args:
            max_norm: Largest norm, the same on all ranks; 0 measures only.

        Returns:
            The norm before clipping, fp32 scalar on the device, the same on all ranks.
        """
        return clip_gradients(self.gradient_parameters(), max_norm, self.mesh)

    def attach_optimizer(self, optimizer: Any) -> Any:
        """Take the run's optimizer and return the one to use; the same, unless the engine brings its own.

        Args:
            optimizer: Built from :meth:`gradient_parameters`.
        """
        return optimizer

    def after_load(self) -> None:
        """A checkpoint was read into weights and moments: bring copies of them up to date.

        Collective: what may fail on one rank alone goes through ``agreement.together`` before ranks meet.
        """
        return

    def end_inference(self) -> None:
        """Forward passes without a backward are over: leave parameters as the optimizer and checkpoints expect them."""
        return

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient as one whole CPU tensor by global name, on every rank, after :meth:`finish_backward`."""
        return gather_full_gradients(self.model, self.mesh)

    def reset(self) -> None:
        """Drop all gradients and forget a forward that an exception ended, so that a next step can run.

        All ranks must have failed at the same place. An aborted backward is forgotten by fsdp2 (torch 2.12 and later),
        but not by ddp, whose buckets would stay half filled.
        """
        self.module.zero_grad(set_to_none=True)

    def gradient_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters as the optimizer sees them, in the model's order."""
        return [param for param in self.model.parameters() if param.requires_grad]

    def num_local_parameters(self) -> int:
        """Trainable numbers whose values this rank keeps between steps."""
        return sum(local_gradient(param).numel() for param in self.gradient_parameters())

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""


class SingleEngine(DataParallelEngine):
    """One data-parallel rank: nothing to reduce, no process group needed."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.model = model
        self.mesh = ParallelMesh()

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing to hold back."""
        return nullcontext()

    def finish_backward(self) -> None:
        """Only fill missing gradients."""
        fill_missing_gradients(self.gradient_parameters())

    def describe(self) -> str:
        """One line for the log."""
        return "data parallel: one rank, nothing to reduce"


def fill_missing_gradients(params: list[nn.Parameter]) -> None:
    """Give zeros to parameters that no token reached.

    Otherwise the optimizer would skip their decay and momentum on this step, and, with replicas, on some ranks only.
    """
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


@contextmanager
def keep_shard_specs(model: nn.Module) -> Iterator[None]:
    """Give every parameter of a model a spec, and attach specs again to what wrapping inside the context replaced.

    A parameter without a spec is replicated: it gets its canonical name and its own shape.

    Args:
        model: The model before wrapping; names inside it must not change.
    """
    specs: dict[str, ShardSpec] = {}
    for name, param in model.named_parameters():
        specs[name] = get_shard_spec(param) or ShardSpec(canonical_name(name), tuple(param.shape))
    yield
    for name, param in model.named_parameters():
        set_shard_spec(param, specs[name])
