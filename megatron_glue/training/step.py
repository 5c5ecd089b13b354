"""One optimizer step: micro-batches forward and backward, reduce, clip, update. No device value is read on the host.

The loss of every token is divided once, before backward, by the labelled tokens of the WHOLE step (all micro-batches,
all ranks), a number every rank knows from the packer. Gradients are therefore plain sums over micro-batches and ranks,
whatever the layout, and nothing here or in an engine divides again. How passes run, in a pipeline or not, is the
executor's business.

Shape suffixes: L MoE layers of the whole model, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.moe.router import update_expert_biases
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.training.metrics import StepResult, counted_once
from megatron_glue.training.rank_check import check_batches
from megatron_glue.training.session import Session
from megatron_glue.types import ForwardContext, PackedBatch, RouterRecord, StepInputs


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
    norm = session.engine.clip_gradients(session.config.optimizer.clip_grad)
    # An update that was skipped does not move the schedule.
    lr = session.schedule.at(session.iteration - session.optimizer.num_skipped_updates)
    session.optimizer.step(lr, norm)
    session.optimizer.zero_grad()
    counts_LE, dropped, aux_losses = _router_statistics(session, router_log)
    if counts_LE is not None:
        _update_biases(session, counts_LE, torch.isfinite(norm))
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
        fp32 device scalar: this rank's share of the sum of token losses. The shares of all ranks add up to the sum.

    Raises:
        RanksDifferError: Under ``--check-ranks``, if ranks that must see the same micro-batches do not.
    """
    batches = session.data.loader.next_step()
    if session.config.training.check_ranks:
        check_batches(session, batches)
    inputs = step_inputs(session, batches, router_log)
    loss_sum = session.executor.train(inputs, 1.0 / max(session.data.loader.step_label_tokens, 1))
    session.num_micro_batches += len(batches)
    return counted_once(loss_sum, session.mesh)


def step_inputs(
    session: Session, batches: Sequence[PackedBatch], router_log: list[RouterRecord] | None = None
) -> StepInputs:
    """Put beside each micro-batch what blocks see of it.

    Args:
        session: At the step that the micro-batches belong to.
        batches: This rank's micro-batches of the step, all of them.
        router_log: Where MoE layers report to.

    Returns:
        The pairs.
    """
    mesh = session.mesh
    return [
        (
            batch,
            ForwardContext(
                sequence=batch.sequence,
                seed=session.config.training.seed,
                step=session.iteration,
                micro_batch=index * mesh.dp_size + mesh.dp_rank,
                aux_loss_scale=1.0 / (len(batches) * mesh.dp_size),
                router_log=router_log,
                residual_rows=mesh.residual_rows(batch.sequence.num_tokens),
            ),
        )
        for index, batch in enumerate(batches)
    ]


def _router_statistics(
    session: Session, router_log: Sequence[RouterRecord]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sum this rank's records: counts [L, E] over micro-batches, dropped pairs, [aux, z] as this rank's mean share.

    All MoE layers of the model have a row, zeros where another pipeline stage holds the layer, so that ranks of all
    stages can be summed.
    """
    config, device = session.config, session.device
    rows = _row_of_moe_layer(config)
    if not rows:
        return None, None, None
    counts: list[list[Tensor]] = [[] for _ in rows]
    for record in router_log:
        counts[rows[record.layer_index]].append(record.counts_E)
    nothing_E = torch.zeros(config.moe.num_experts, dtype=torch.int64, device=device)
    counts_LE = torch.stack([torch.stack(of_layer).sum(dim=0) if of_layer else nothing_E for of_layer in counts])
    if not router_log:
        return counts_LE, counts_LE.new_zeros(()), torch.zeros(2, device=device)
    num_records = max(len(of_layer) for of_layer in counts) * session.mesh.dp_size * len(rows)
    losses = torch.stack([torch.stack([record.aux_loss, record.z_loss]) for record in router_log])
    dropped = torch.stack([record.num_dropped_pairs for record in router_log]).sum()
    return counts_LE, dropped, losses.sum(dim=0) / num_records


def _row_of_moe_layer(config: RunConfig) -> dict[int, int]:
    """Global index of each MoE layer of the whole model -> its row in statistics."""
    layers = filter(config.moe.is_moe_layer, range(config.model.num_layers))
    return {layer_index: row for row, layer_index in enumerate(layers)}


def _update_biases(session: Session, counts_LE: Tensor, is_update: Tensor) -> None:
    """Move the biases of this stage's layers. Its ranks hold the same layers, so all or none of them come here."""
    routers, moe = session.built.routers, session.config.moe
    if not moe.moe_router_enable_expert_bias or not routers:
        return
    rows = _row_of_moe_layer(session.config)
    own_LE = torch.stack([counts_LE[rows[layer_index]] for layer_index in routers])
    own_LE = all_reduce_sum(own_LE, session.mesh.stage_group)
    update_expert_biases(list(routers.values()), list(own_LE), moe.moe_router_bias_update_rate, is_update)
