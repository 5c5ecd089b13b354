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

import torch
from torch import nn

from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.shard_spec import ShardSpec, get_shard_spec, set_shard_spec


class DataParallelEngine(ABC):
    """Wraps a model so that its gradients become sums over the data-parallel ranks.

    The order of a step: for each micro-batch ``with engine.micro_batch(is_last): loss = engine.module(...);
    loss.backward()``, then ``engine.finish_backward()``, then gradient norm and optimizer. All ranks run the same
    number of micro-batches; one without valid tokens counts too.

    Attributes:
        module: What to call for forward.
        model: The model inside it: same parameters, names without the engine's prefix. For sampling and checkpoints.
    """

    module: nn.Module
    model: nn.Module

    @abstractmethod
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward AND backward.

        Args:
            is_last: Whether this is the last micro-batch of the optimizer step.
        """

    @abstractmethod
    def finish_backward(self) -> None:
        """Reduce what backward itself did not, and give zeros to trainable parameters without a gradient."""

    def reset(self) -> None:
        """Drop all gradients and forget a forward that an exception ended, so that a next step can run.

        All ranks must have failed at the same place. An aborted backward is forgotten by fsdp2 (torch 2.12 and later),
        but not by ddp, whose buckets would stay half filled.
        """
        self.module.zero_grad(set_to_none=True)

    def gradient_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters as the optimizer sees them, in the model's order."""
        return [param for param in self.model.parameters() if param.requires_grad]

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""


class SingleEngine(DataParallelEngine):
    """One data-parallel rank: nothing to reduce, no process group needed."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.model = model

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
