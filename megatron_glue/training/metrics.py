"""Numbers of a run, collected on the device and read only when somebody looks.

The training step hands over device scalars; they wait here unread until a logging step, an evaluation or the end of the
run calls :meth:`RunMetrics.flush`, which sums them over ranks and reads them in one go. It prints nothing.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.collectives import all_reduce_sum_many
from megatron_glue.parallel.mesh import ParallelMesh


def counted_once(value: Tensor, mesh: ParallelMesh) -> Tensor:
    """This rank's share of a value that its tensor-parallel peers hold too, and that only the last stage has.

    Args:
        value: A sum over this rank's tokens, e.g. of losses. Ranks of dp and cp have different tokens.
        mesh: The run's mesh.

    Returns:
        ``value`` on one tensor-parallel rank of the last pipeline stage, zeros elsewhere: the sum over all ranks counts
        every token once.
    """
    return value if mesh.is_last_stage and mesh.tp_rank == 0 else torch.zeros_like(value)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports.

    Attributes:
        loss: fp32 device scalar. This rank's share of the mean over the labelled tokens of the whole step: the sum over
            ranks is the loss.
        grad_norm: fp32 device scalar before clipping, the same on all ranks.
        lr: Learning rate of the update.
        num_tokens: Live tokens of the step over all ranks (host integer).
        expert_counts_LE: int64 device tensor, pairs of this rank's tokens in every MoE layer of the model, zeros in
            layers of other pipeline stages; ``None`` for a dense model.
        num_dropped: int64 device scalar, of this rank's tokens; ``None`` for a dense model.
        aux_losses: fp32 device tensor [aux, z], this rank's share of means; ``None`` for a dense model.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    num_tokens: int
    expert_counts_LE: Tensor | None = None
    num_dropped: Tensor | None = None
    aux_losses: Tensor | None = None


@dataclass
class RunMetrics:
    """History of a run, restored on resume.

    Attributes:
        losses: Loss of every step since iteration 0.
        grad_norms: Gradient norm of every step since iteration 0.
        num_tokens: Live tokens trained on since iteration 0.
        num_dropped: (token, choice) pairs dropped by this process' steps.
        expert_counts: Pairs per layer and expert of this process' steps.
        aux_losses: [aux, z] of the last step read.
        step_times_s: Wall time of this process' steps, evaluation and saving excluded.
        step_tokens: Live tokens of this process' steps.
        num_loss_spikes: Losses of this process' steps that jumped (``faults.py``).
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_dropped: int = 0
    expert_counts: list[list[int]] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    num_loss_spikes: int = 0
    _pending: list[StepResult] = field(default_factory=list)

    def add(self, result: StepResult, seconds: float) -> None:
        """Take over the result of a step without reading it."""
        self._pending.append(result)
        self.num_tokens += result.num_tokens
        self.step_times_s.append(seconds)
        self.step_tokens.append(result.num_tokens)

    def replace(self, result: StepResult, repeated: StepResult) -> None:
        """Put the result of a step that was run again in the place of its first one; tokens were counted.

        Args:
            result: The first one. Nothing happens if it was not added; it has not been read yet.
            repeated: The one to keep.
        """
        self._pending = [repeated if pending is result else pending for pending in self._pending]

    def flush(self, reader: HostReader, group: ProcessGroup | None) -> None:
        """Sum everything that waits over ranks and read it; a collective, so all ranks call it on the same iterations.

        Args:
            reader: The door to the host.
            group: All ranks.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        tensors = [torch.stack([result.loss for result in pending]), torch.zeros((), device=pending[0].loss.device)]
        counts = [result.expert_counts_LE for result in pending if result.expert_counts_LE is not None]
        dropped = [result.num_dropped for result in pending if result.num_dropped is not None]
        if counts and dropped and pending[-1].aux_losses is not None:
            tensors[1] = pending[-1].aux_losses
            tensors += [torch.stack(counts).sum(dim=0), torch.stack(dropped).sum()]
        losses, aux_losses, *router = all_reduce_sum_many(tensors, group)
        grad_norms = torch.stack([result.grad_norm for result in pending])
        for loss, grad_norm in reader.read(torch.stack([losses, grad_norms], dim=1)):
            self.losses.append(loss)
            self.grad_norms.append(grad_norm)
        if router:
            self.aux_losses = reader.read(aux_losses)
            self.expert_counts = _add_rows(self.expert_counts, reader.read(router[0]))
            self.num_dropped += reader.read(router[1])

    def tokens_per_second(self, last_steps: int | None = None) -> float:
        """Live tokens over all ranks per second of step time; the first step of a process (warmup) is left out.

        Args:
            last_steps: Only the newest N steps; ``None``: all.
        """
        first = 1 if len(self.step_times_s) > 1 else 0
        times, tokens = self.step_times_s[first:], self.step_tokens[first:]
        if last_steps is not None:
            times, tokens = times[-last_steps:], tokens[-last_steps:]
        return sum(tokens) / sum(times) if times else 0.0

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps (JSON): the history, not this process' timings."""
        assert not self._pending, "flush before saving, or the last losses are lost"
        return {"losses": self.losses, "grad_norms": self.grad_norms, "num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        losses, grad_norms, num_tokens = state["losses"], state["grad_norms"], state["num_tokens"]
        assert isinstance(losses, list)
        assert isinstance(grad_norms, list)
        assert isinstance(num_tokens, int)
        self.losses, self.grad_norms, self.num_tokens = list(losses), list(grad_norms), num_tokens


def _add_rows(old: list[list[int]], new: list[list[int]]) -> list[list[int]]:
    if not old:
        return new
    return [[a + b for a, b in zip(left, right, strict=True)] for left, right in zip(old, new, strict=True)]


class StepTimer:
    """Wall time of a step that has really ended on the device.

    Synchronising each step would serialise host and device, so the device is waited for only on logging steps; between
    them the host's own time is taken, and sums over an interval are exact.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._start = time.perf_counter()

    def stop(self, *, wait_for_device: bool) -> float:
        """End a step and return its seconds."""
        if wait_for_device and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._start
