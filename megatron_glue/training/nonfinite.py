"""Runs a step again that was skipped, and names the first tensor in it that is not finite. For the end of a run only.

The step that was skipped has changed nothing: the same micro-batches, weights and dropout make the same values again.
Each rank looks at every module's output and gradient, which waits for the device each time; the earliest find of all
ranks is reported, so that the rank where it began is named, not those that it spread to.

Shape suffixes: none; any tensor is looked at whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_glue.parallel.agreement import first_message
from megatron_glue.parallel.collectives import max_over_ranks
from megatron_glue.parallel.grad_norm import local_gradient
from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.training.session import Session, StepStart
from megatron_glue.training.step import accumulate_gradients

_STAGES = ("weight", "output", "loss", "gradient", "summed gradient")
"""In the order in which a step comes to them."""


@dataclass
class _Finding:
    stage: int = len(_STAGES)
    words: str = ""

    def note(self, stage: str, words: str) -> None:
        """Keep the earliest; of one kind, the first."""
        index = _STAGES.index(stage)
        if index < self.stage:
            self.stage, self.words = index, words


def name_first_nonfinite(session: Session, start: StepStart) -> str:
    """Run a skipped step's passes again and look at everything; every rank must call this.

    Args:
        session: Behind a step that updated nothing. It is not to be used further.
        start: Where that step began.

    Returns:
        What is not finite, on which rank; the same words on all ranks.
    """
    finding, model, rank = _Finding(), session.engine.model, session.mesh.rank
    _look_at("weight", ((name, param) for name, param in model.named_parameters()), finding)
    session.rewind(start)
    handles = [
        module.register_forward_hook(_hook_of(canonical_name(name) or "the model", finding))
        for part in session.built.parts
        for name, module in part.named_modules()
    ]
    try:
        loss_sum = accumulate_gradients(session, [])
    finally:
        for handle in handles:
            handle.remove()
    if not bool(torch.isfinite(loss_sum).all()):
        finding.note("loss", "the loss")
    gradients = ((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)
    _look_at("summed gradient", gradients, finding)
    first = -max_over_ranks(-finding.stage, session.mesh.world_group)
    words = f"{finding.words} on rank {rank}" if finding.stage == first and finding.words else ""
    return first_message(words, session.mesh.world_group) or "nothing; it does not happen each time"


def _look_at(stage: str, named: Iterator[tuple[str, Tensor]], finding: _Finding) -> None:
    for name, tensor in named:
        if not _is_finite(tensor):
            finding.note(stage, f"the {stage} {canonical_name(name)}")


def _is_finite(tensor: Tensor) -> bool:
    local = local_gradient(tensor) if isinstance(tensor, DTensor) else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())


def _hook_of(name: str, finding: _Finding) -> Any:
    """Look at a module's output now and at its gradient in backward."""

    def look(module: torch.nn.Module, args: Sequence[Any], output: Any) -> None:
        kind = type(module).__name__
        inputs_are_finite = all(_is_finite(tensor) for tensor in _tensors_in(args))
        for tensor in _tensors_in(output):
            if not _is_finite(tensor):
                origin = "" if inputs_are_finite else ", whose input is not finite either"
                finding.note("output", f"the output of {name} ({kind}){origin}")
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: _look_at_gradient(gradient, f"{name} ({kind})", finding))

    return look


def _look_at_gradient(gradient: Tensor, where: str, finding: _Finding) -> None:
    if not _is_finite(gradient):
        finding.note("gradient", f"the gradient that reaches the output of {where}")


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors_in(part)]
    return []
