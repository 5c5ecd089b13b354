"""Runs the passes of a step, an evaluation or a sample through the model, whether or not it is cut into stages.

The training step, the evaluation and the sampling prepare micro-batches and read sums; what lies between (one engine
around a whole model, or a pipeline of parts) is chosen here, once, when the session is built.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_glue.activation.parts import PartManagers
from megatron_glue.config.sections import RunConfig
from megatron_glue.config.stage_plan import schedule_kind
from megatron_glue.models.build import BuiltModel
from megatron_glue.models.gpt import GPT
from megatron_glue.parallel.data_parallel import DataParallelEngine
from megatron_glue.parallel.grad_norm import scaled_loss
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.types import ForwardContext, StepInputs

if TYPE_CHECKING:
    from megatron_glue.parallel.pipeline import Pipeline


class StepExecutor(ABC):
    """The passes. Every rank calls the same methods in the same order."""

    @abstractmethod
    def train(self, inputs: StepInputs, loss_scale: float) -> Tensor:
        """Forward and backward of all micro-batches of one optimizer step, and the reduction of gradients over ranks.

        Args:
            inputs: The step's micro-batches on this rank.
            loss_scale: Factor on the loss in front of backward.

        Returns:
            fp32 device scalar: the sum of token losses, without the factor; 0 where the loss is not computed.

        Raises:
            Exception: Whatever a block raised. Offloaded activations are dropped.
        """

    @abstractmethod
    def evaluate(self, inputs: StepInputs) -> Tensor:
        """Forward of some micro-batches, as many on all ranks.

        Returns:
            fp32 device scalar: the sum of token losses; 0 where the loss is not computed.
        """

    @abstractmethod
    def next_logits(self, input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        """Logits of one token, for sampling.

        Args:
            input_ids_T: int64 token ids of any number, the same on all ranks.
            context: Their layout.
            row: Token whose successor is asked for.

        Returns:
            fp32 [V], on every rank.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""


class DirectExecutor(StepExecutor):
    """Micro-batch after micro-batch through a whole model.

    Args:
        engine: Around the model.
        model: The model, for sampling.
        activation: Of its blocks.
        device: Where it computes.
    """

    def __init__(self, engine: DataParallelEngine, model: GPT, activation: PartManagers, device: torch.device) -> None:
        self._engine = engine
        self._model = model
        self._activation = activation
        self._device = device

    def train(self, inputs: StepInputs, loss_scale: float) -> Tensor:
        """See the base class."""
        loss_sum = torch.zeros((), device=self._device)
        (manager,) = self._activation.managers
        self._activation.begin_step()
        try:
            for index, (batch, context) in enumerate(inputs):
                with self._engine.micro_batch(is_last=index == len(inputs) - 1):
                    loss = self._engine.module(batch, context)
                    manager.end_forward()
                    self._engine.backward(scaled_loss(loss, loss_scale))
                loss_sum += loss.detach()
                # The batches live until the step's end; masks of all of them would add up.
                context.sequence.cache_entries.clear()
            self._engine.finish_backward()
        finally:
            self._activation.reset()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, inputs: StepInputs) -> Tensor:
        """See the base class."""
        loss_sum = torch.zeros((), device=self._device)
        for batch, context in inputs:
            loss_sum += self._engine.module(batch, context).float()
        self._engine.end_inference()
        return loss_sum

    @torch.no_grad()
    def next_logits(self, input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        """See the base class."""
        logits_V = self._model.logits(input_ids_T, context, row)
        self._engine.end_inference()
        return logits_V

    def describe(self) -> str:
        """One line for the log."""
        return "pipeline: none"


class PipelineExecutor(StepExecutor):
    """All micro-batches of a step through the stages of a pipeline.

    Args:
        engine: Around the parts of this rank.
        pipeline: Its stages.
        activation: Of their blocks.
    """

    def __init__(self, engine: DataParallelEngine, pipeline: Pipeline, activation: PartManagers) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._activation = activation

    def train(self, inputs: StepInputs, loss_scale: float) -> Tensor:
        """See the base class."""
        self._activation.begin_step()
        try:
            self._engine.begin_pipeline(len(inputs))
            loss_sum = self._pipeline.train(inputs, loss_scale)
            self._engine.finish_backward()
        finally:
            self._activation.reset()
        return loss_sum

    def evaluate(self, inputs: StepInputs) -> Tensor:
        """See the base class."""
        loss_sum = self._pipeline.evaluate(inputs)
        self._engine.end_inference()
        return loss_sum

    def next_logits(self, input_ids_T: Tensor, context: ForwardContext, row: int) -> Tensor:
        """See the base class."""
        logits_V = self._pipeline.next_logits(input_ids_T, context, row)
        self._engine.end_inference()
        return logits_V

    def describe(self) -> str:
        """One line for the log."""
        return f"pipeline: {self._pipeline.describe()}"


def build_executor(
    config: RunConfig, built: BuiltModel, engine: DataParallelEngine, device: torch.device
) -> StepExecutor:
    """Choose how passes run.

    Args:
        config: A validated configuration.
        built: The model, or the parts of it on this rank.
        engine: Around it.
        device: Where this rank computes.

    Returns:
        A pipeline's executor where the model is cut into stages.
    """
    if built.plan.num_stages == 1:
        return DirectExecutor(engine, built.parts[0], built.activation, device)
    # torch's schedules load the compiler, a second that only pipelines should pay.
    from megatron_glue.parallel.pipeline import Pipeline, PipelineShape, StagePart

    mesh, training = engine.mesh, config.training
    stages = built.plan.stages_of(mesh.pp_rank)
    parts = [
        StagePart(stage, part, manager.end_forward)
        for stage, part, manager in zip(stages, built.parts, built.activation.managers, strict=True)
    ]
    shape = PipelineShape(
        num_micro_batches=training.global_batch_size // (training.micro_batch_size * mesh.dp_size),
        num_rows=_num_rows(mesh, training.micro_batch_size * config.data.seq_length // mesh.cp_size),
        hidden_size=config.model.hidden_size,
        vocab_size=built.parts[0].output.chunks.vocab_size,
        dtype=built.precision.compute_dtype,
        device=device,
    )
    return PipelineExecutor(engine, Pipeline(parts, built.plan, schedule_kind(config), shape, mesh), built.activation)


def _num_rows(mesh: ParallelMesh, num_tokens: int) -> int:
    rows = mesh.residual_rows(num_tokens)
    return num_tokens if rows is None else rows.stop - rows.start
