"""One optimizer step: micro-batches forward and backward, reduce, clip, update. No device value is read on the host.

The loss of every token is divided once, before backward, by the labelled tokens of the WHOLE step (all micro-batches,
all ranks), a number every rank knows from the packer. Gradients are therefore plain sums over micro-batches and ranks,
whatever the layout, and nothing here or in an engine divides again.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glue.moe.router import update_expert_biases
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.parallel.grad_norm import clip_gradients
from megatron_glue.training.metrics import StepResult
from megatron_glue.training.session import Session
from megatron_glue.types import ForwardContext, PackedBatch, RouterRecord


def train_step(session: Session) -> StepResult:
    """Run the next optimizer step.

    Args:
        session: Advances by one iteration: weights, moments, data position and counters.

    Returns:
        The step's numbers, unread: this rank's share of sums over ranks (see :class:`StepResult`).

    Raises:
        Exception: Whatever a block raised. Offloaded activations are dropped; the session is not to be used further.
    """
    router_log: list[RouterRecord] = []
    reads_before = session.host_reader.count
    loss_sum = accumulate_gradients(session, router_log)
    norm = clip_gradients(session.engine.gradient_parameters(), session.config.optimizer.clip_grad, session.mesh)
    # An update that was skipped does not move the schedule.
    lr = session.schedule.at(session.iteration - session.optimizer.num_skipped_updates)
    session.optimizer.step(lr, norm)
    session.optimizer.zero_grad()
    counts_LE, dropped, aux_losses = _router_statistics(session, router_log)
    if counts_LE is not None:
        _update_biases(session, counts_LE)
    session.iteration += 1
    session.num_step_host_reads += session.host_reader.count - reads_before
    loader = session.data.loader
    return StepResult(
        loss=loss_sum / max(loader.step_label_tokens, 1),
        grad_norm=norm,
        lr=lr,
        num_tokens=loader.step_valid_tokens,
        expert_counts_LE=counts_LE,
        num_dropped=dropped,
        aux_losses=aux_losses,
    )


def accumulate_gradients(session: Session, router_log: list[RouterRecord] | None = None) -> Tensor:
    """Forward and backward of all micro-batches of the next step, and the reduction over ranks.

    Args:
        session: Its loader advances by one step; its parameters hold the summed gradients afterwards.
        router_log: Where MoE layers report to.

    Returns:
        fp32 device scalar: this rank's sum of token losses.
    """
    batches = session.data.loader.next_step()
    loss_scale = 1.0 / max(session.data.loader.step_label_tokens, 1)
    activation = session.built.activation
    loss_sum = torch.zeros((), device=session.device)
    activation.begin_step()
    try:
        for index, batch in enumerate(batches):
            context = _context(session, batch, index, len(batches), router_log)
            with session.engine.micro_batch(is_last=index == len(batches) - 1):
                loss = session.engine.module(batch, context)
                activation.end_forward()
                (loss * loss_scale).backward()
            loss_sum += loss.detach()
        session.engine.finish_backward()
    finally:
        activation.reset()
    session.num_micro_batches += len(batches)
    return loss_sum


def _context(
    session: Session, batch: PackedBatch, index: int, num_local: int, router_log: list[RouterRecord] | None
) -> ForwardContext:
    mesh = session.mesh
    return ForwardContext(
        sequence=batch.sequence,
        seed=session.config.training.seed,
        step=session.iteration,
        micro_batch=index * mesh.dp_size + mesh.dp_rank,
        aux_loss_scale=1.0 / (num_local * mesh.dp_size),
        router_log=router_log,
    )


def _router_statistics(
    session: Session, router_log: Sequence[RouterRecord]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sum this rank's records over micro-batches: counts [L, E], dropped pairs, [aux, z] as this rank's mean share."""
    if not router_log:
        return None, None, None
    layers = sorted({record.layer_index for record in router_log})
    counts_LE = torch.stack(
        [torch.stack([r.counts_E for r in router_log if r.layer_index == layer]).sum(dim=0) for layer in layers]
    )
    dropped = torch.stack([record.num_dropped_pairs for record in router_log]).sum()
    losses = torch.stack([torch.stack([record.aux_loss, record.z_loss]) for record in router_log])
    return counts_LE, dropped, losses.mean(dim=0) / session.mesh.dp_size


def _update_biases(session: Session, counts_LE: Tensor) -> None:
    routers = session.built.routers
    if not session.config.moe.moe_router_enable_expert_bias or not routers:
        return
    counts_LE = all_reduce_sum(counts_LE, session.mesh.dp_group)
    update_expert_biases(routers, list(counts_LE), session.config.moe.moe_router_bias_update_rate)
