"""One rank's place in a pipeline: torch's stages and schedules around the parts of the model that this rank holds.

Every rank builds all micro-batches of the step itself, since the loader is the same for all ranks that see the same
data. So only activations and their gradients travel between stages; beside them goes an index on the CPU, by which each
stage finds the micro-batch and its context.

Training runs one of torch's schedules (``torch.distributed.pipelining``). Evaluation and sampling, which have no
backward and, in sampling, another length at every call, pass activations on from stage to stage directly. Losses are
sums and gradients are sums of sums: nothing here divides.

Stands between the training step and the parts of the model. It builds no part and reduces no gradient over replicas.

Shape suffixes: S rows of the residual stream on this rank, D model, V vocabulary, N micro-batches of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.stage_plan import ScheduleKind, StagePlan
from megatron_glue.parallel.grad_norm import scaled_loss
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, PackedBatch, StepInputs

_ONE_STAGE_PER_RANK: dict[ScheduleKind, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_STAGES_PER_RANK: dict[ScheduleKind, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
}


class PartModule(Protocol):
    """What a part of a model offers, see ``models/gpt.py``."""

    def __call__(self, batch: PackedBatch, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        """Run the part: to activations, or to the summed loss if it is the last."""
        ...

    def activations(self, input_ids_T: Tensor, context: ForwardContext, x_TD: Tensor | None = None) -> Tensor:
        """Run the part to activations."""
        ...

    def logits(self, input_ids_T: Tensor, context: ForwardContext, row: int, x_TD: Tensor | None = None) -> Tensor:
        """Run the last part to the logits of one token."""
        ...


@dataclass(frozen=True, eq=False)
class StagePart:
    """One stage that this rank holds.

    Attributes:
        index: Its number in the pipeline.
        module: Its part of the model, wrapped by the engine.
        end_forward: Called after each of its forward passes in training.
    """

    index: int
    module: PartModule
    end_forward: Callable[[], None]


@dataclass(frozen=True)
class PipelineShape:
    """Sizes that torch's stages must know beforehand; they are constant over a run.

    Attributes:
        num_micro_batches: Micro-batches of one optimizer step on this rank.
        num_rows: S in training.
        hidden_size: D.
        vocab_size: V.
        dtype: Of activations.
        device: Where this rank computes.
    """

    num_micro_batches: int
    num_rows: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device


class Pipeline:
    """The stages of one rank and the schedule that runs them. All ranks of the pipeline make the same calls.

    Args:
        parts: This rank's stages, first to last.
        plan: All stages.
        kind: Schedule.
        shape: Sizes.
        mesh: The run's mesh, with more than one pipeline rank.

    Raises:
        ConfigError: If this torch cannot run the schedule.
    """

    def __init__(
        self,
        parts: Sequence[StagePart],
        plan: StagePlan,
        kind: ScheduleKind,
        shape: PipelineShape,
        mesh: ParallelMesh,
    ) -> None:
        assert mesh.pp_group is not None, "a pipeline has more than one rank"
        self._parts = tuple(parts)
        self._last_stage = plan.num_stages - 1
        self._shape = shape
        self._group = mesh.pp_group
        self._num_ranks = mesh.pp_size
        self._loss_scale = 1.0
        self._description = f"{kind}, {plan.describe()}, {shape.num_micro_batches} micro-batches per step"
        if kind == "zb":
            if not splits_backward_of_functions():
                raise ConfigError(
                    flag_of("pipeline_schedule"),
                    kind,
                    f"torch {torch.__version__} cannot compute gradients of weights apart from those of activations "
                    "where an autograd Function is among the operators",
                    "use torch 2.13, or another schedule",
                )
            _keep_gathered(parts)
        # An error of a stage is raised; torch would also log it, with all tensors and the whole schedule.
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
        self._stages = [_Stage(part, plan.num_stages, shape, mesh) for part in parts]
        if kind == "1f1b":
            for stage in self._stages:
                stage.max_in_flight = plan.num_stages - stage.stage_index
        options = {"n_microbatches": shape.num_micro_batches, "loss_fn": self._scaled_loss, "scale_grads": False}
        self._schedule: Any
        if kind in _ONE_STAGE_PER_RANK:
            (stage,) = self._stages
            self._schedule = _ONE_STAGE_PER_RANK[kind](stage, **options)
        else:
            self._schedule = _STAGES_PER_RANK[kind](self._stages, **options)

    def train(self, inputs: StepInputs, loss_scale: float) -> Tensor:
        """Forward and backward of all micro-batches of one step.

        Args:
            inputs: As many as the shape says.
            loss_scale: Factor on the loss in front of backward.

        Returns:
            fp32 device scalar: the sum of token losses, without the factor; 0 on ranks without the last stage.

        Raises:
            Exception: Whatever a block raised. The pipeline is not to be used further.
        """
        index_N = torch.arange(len(inputs))
        self._loss_scale = loss_scale
        for stage in self._stages:
            stage.begin_step(inputs)
        first_args = (index_N,) if self._parts[0].index == 0 else ()
        try:
            self._schedule.step(*first_args, target=index_N, return_outputs=False, index=index_N)
        except RuntimeError as error:
            # torch wraps errors of a stage into one that shows all its tensors.
            raise _first_cause(error) from None
        return self._stages[-1].end_step()

    @torch.no_grad()
    def evaluate(self, inputs: StepInputs) -> Tensor:
        """Forward of some micro-batches, as many on all ranks.

        Returns:
            fp32 device scalar: the sum of token losses; 0 on ranks without the last stage.
        """
        loss_sum = torch.zeros((), device=self._shape.device)
        for batch, context in inputs:
            for part in self._parts:
                out = part.module(batch, context, self._receive(part, context))
                if part.index == self._last_stage:
                    loss_sum += out.float()
                else:
                    self._send(part, out)
        return loss_sum

    @torch.no_grad()
    def next_logits(self, input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        """Logits of one token, on all ranks of the pipeline.

        Args:
            input_ids_T: int64 token ids, of any number, the same on all ranks.
            context: Their layout.
            row: Token whose successor is asked for.

        Returns:
            fp32 [V].
        """
        logits_V = torch.empty(self._shape.vocab_size, device=self._shape.device)
        for part in self._parts:
            x_SD = self._receive(part, context)
            if part.index == self._last_stage:
                logits_V = part.module.logits(input_ids_T, context, row, x_SD).contiguous()
            else:
                self._send(part, part.module.activations(input_ids_T, context, x_SD))
        dist.broadcast(logits_V, group=self._group, group_src=self._last_stage % self._num_ranks)
        return logits_V

    def describe(self) -> str:
        """Schedule and stages in a few words."""
        return self._description

    def _scaled_loss(self, loss_1: Tensor, _index_1: Tensor) -> Tensor:
        return scaled_loss(loss_1.sum(), self._loss_scale)

    def _receive(self, part: StagePart, context: ForwardContext) -> Tensor | None:
        """The activations of the stage before. Ranks go through stages and micro-batches in one order: no deadlock."""
        if part.index == 0:
            return None
        rows = context.residual_rows
        num_rows = context.sequence.num_tokens if rows is None else rows.stop - rows.start
        x_SD = torch.empty(num_rows, self._shape.hidden_size, dtype=self._shape.dtype, device=self._shape.device)
        dist.recv(x_SD, group=self._group, group_src=(part.index - 1) % self._num_ranks)
        return x_SD

    def _send(self, part: StagePart, x_SD: Tensor) -> None:
        dist.send(x_SD.contiguous(), group=self._group, group_dst=(part.index + 1) % self._num_ranks)


class _Stage(PipelineStage):
    """A stage whose forward looks its micro-batch up by the index that travels beside the activations.

    The look-up cannot be a module around the part: torch treats a part that FSDP2 has sharded in its own way (weights
    stay gathered and gradients whole until the last backward), and recognises it by its type.

    Attributes:
        max_in_flight: Micro-batches between their forward and the end of their backward at one time; ``None``: all.
    """

    max_in_flight: int | None = None

    def __init__(self, part: StagePart, num_stages: int, shape: PipelineShape, mesh: ParallelMesh) -> None:
        def activations() -> Tensor:
            size = (shape.num_rows, shape.hidden_size)
            # On the meta device: only sizes are read. Without them torch would run an extra forward.
            return torch.empty(size, dtype=shape.dtype, device="meta", requires_grad=True)

        is_first, is_last = part.index == 0, part.index == num_stages - 1
        super().__init__(
            cast(nn.Module, part.module),
            part.index,
            num_stages,
            shape.device,
            input_args=torch.empty(1, dtype=torch.int64, device="meta") if is_first else activations(),
            output_args=torch.empty(1, device="meta", requires_grad=True) if is_last else activations(),
            group=mesh.pp_group,
        )
        self._part = part
        self._inputs: StepInputs = ()
        self._loss_sum = torch.zeros((), device=shape.device)

    def begin_step(self, inputs: StepInputs) -> None:
        """Take over the micro-batches of a step."""
        self._inputs = inputs
        self._loss_sum = torch.zeros_like(self._loss_sum)

    def end_step(self) -> Tensor:
        """Let go of them and return the sum of their losses, 0 if this is not the last stage."""
        self._inputs = ()
        return self._loss_sum

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the part on one micro-batch; called by torch in place of the part itself.

        Args:
            *args: Activations; of the first stage the index.
            **kwargs: ``index``, a CPU tensor of one element.

        Returns:
            Activations; of the last stage the summed loss [1].
        """
        self._share_buffers()
        batch, context = self._inputs[int(kwargs["index"])]
        out = self._part.module(batch, context, None if self.is_first else args[0])
        self._part.end_forward()
        if not self.is_last:
            return out
        self._loss_sum += out.detach().float()
        return out.reshape(1)

    def _share_buffers(self) -> None:
        """Let go of the buffers, one for every micro-batch of the step, that can never be in use at one time.

        Torch makes them before the first forward. Micro-batches end in the order in which they began, and one is
        received only after the backward of the one that had its buffer.
        """
        if self.max_in_flight is None:
            return
        for infos in (self.args_recv_info, self.grad_recv_info):
            for index in range(self.max_in_flight, len(infos)):
                for info, first in zip(infos[index], infos[index % self.max_in_flight], strict=True):
                    if isinstance(getattr(first, "buffer", None), Tensor):
                        info.buffer = first.buffer
        self.max_in_flight = None


class _Product(torch.autograd.Function):
    """x * w, to try the splitting of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_outputs[0] * weight, grad_outputs[0] * x


def splits_backward_of_functions() -> bool:
    """Whether torch can start a backward pass at an autograd Function inside a graph, as the zero-bubble schedule does.

    Torch 2.11 cannot.
    """
    x, weight = (torch.ones(1, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        node = _Product.apply(x, weight).grad_fn
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [weight], [torch.ones(1)])
    except RuntimeError:
        return False
    return True


def _keep_gathered(parts: Sequence[StagePart]) -> None:
    """Let FSDP2 keep gathered weights from forward to backward.

    The zero-bubble schedule looks weights up in the graph of the forward pass, before backward would gather them again;
    where it does not find them it computes no gradient for them.
    """
    for part in parts:
        if isinstance(part.module, FSDPModule):
            part.module.set_reshard_after_forward(False)


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
