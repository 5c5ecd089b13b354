"""One optimizer step: micro-batches forward and backward, reduce, clip, update. No device value is read on the host.

The loss of every token is divided once, before backward, by the labelled tokens of the WHOLE step (all micro-batches,
all ranks), a number every rank knows from the packer. Gradients are therefore plain sums over micro-batches and ranks,
whatever the layout, and nothing here or in an engine divides again. How passes run, in a pipeline or not, is the
executor's business.

Shape suffixes: L MoE layers of the whole model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_glue.config.sections import RunConfig
from megatron_glue.moe.router import update_expert_biases
from megatron_glue.parallel.collectives import all_reduce_sum
from megatron_glue.training.metrics import StepResult, counted_once
from megatron_glue.training.rank_check import check_batches
from megatron_glue.training.session import Rerun, Session, UnsettledStep
from megatron_glue.types import ForwardContext, PackedBatch, RouterRecord, StepInputs


@dataclass(frozen=True, eq=False)
class _Passes:
    """What forward and backward of a step found, before the update.

    Attributes:
        loss_sum: This rank's share of the sum of token losses.
        router_log: Reports of MoE layers.
        num_overflowing: int64 device scalar. Rows of all ranks that reached no expert; ``None`` where that cannot be.
    """

    loss_sum: Tensor
    router_log: list[RouterRecord]
    num_overflowing: Tensor | None


def train_step(session: Session) -> StepResult:
    """Run the next optimizer step.

    Under ``--moe-static-capacity-factor`` rows may find no room. The update is then skipped on the device, the host
    learns of it when the passes of the step behind are queued (where it waits for the skip flag in any case), and both
    steps are run again: the first with exchanges of any size, the second from the weights that this leaves.

    Args:
        session: Advances by one iteration: weights, moments, data position and counters.

    Returns:
        The step's numbers, unread: this rank's share of sums over ranks (see :class:`StepResult`). Where exchanges have
        a fixed size they are final once :func:`settle_step` has been called; if the next step finds that they are not,
        it puts the right ones into ``session.metrics``.

    Raises:
        Exception: Whatever a block raised. Offloaded activations are dropped; the session is not to be used further.
    """
    with _counted_reads(session):
        if not _has_fixed_exchanges(session):
            return _update(session, _run_passes(session, may_overflow=False))
        start = session.start
        passes = _run_passes(session, may_overflow=True)
        if _settle(session) is not None:
            # These gradients are those of weights that the step before had not updated yet.
            session.rewind(start)
            passes = _run_passes(session, may_overflow=True)
        result = _update(session, passes)
        session.unsettled = UnsettledStep(start, result)
        return result


def settle_step(session: Session) -> StepResult | None:
    """Find out whether all rows of the newest step reached their experts; if not, run it again. Every rank calls this
    before numbers are read, and before anything else uses the weights. The host waits for the step's end.

    Args:
        session: Its metrics get the new numbers, if they have the old ones.

    Returns:
        The numbers of the step that was run again; ``None`` if nothing had to be.
    """
    with _counted_reads(session):
        return _settle(session)


def train_settled_step(session: Session) -> StepResult:
    """:func:`train_step` for callers that look at the numbers or the weights of every step."""
    result = train_step(session)
    return settle_step(session) or result


def _settle(session: Session) -> StepResult | None:
    unsettled, session.unsettled = session.unsettled, None
    if unsettled is None or not (num_rows := session.optimizer.num_overflowing):
        return None
    session.rewind(unsettled.start)
    result = _update(session, _run_passes(session, may_overflow=False))
    session.metrics.replace(unsettled.result, result)
    session.reruns.append(Rerun(session.iteration, num_rows))
    return result


def _has_fixed_exchanges(session: Session) -> bool:
    moe = session.config.moe
    has_exchanges = moe.num_experts > 0 and session.mesh.ep_etp_group is not None
    return has_exchanges and moe.moe_static_capacity_factor is not None


@contextmanager
def _counted_reads(session: Session) -> Iterator[None]:
    reads_before = session.host_reader.count
    yield
    session.num_step_host_reads += session.host_reader.count - reads_before


def _run_passes(session: Session, *, may_overflow: bool) -> _Passes:
    router_log: list[RouterRecord] = []
    overflow_log: list[Tensor] | None = [] if may_overflow else None
    loss_sum = accumulate_gradients(session, router_log, overflow_log)
    num_overflowing = None
    if overflow_log is not None:
        nothing = torch.zeros((), dtype=torch.int64, device=session.device)
        num_overflowing = all_reduce_sum(torch.stack([nothing, *overflow_log]).sum(), session.mesh.world_group)
    return _Passes(loss_sum, router_log, num_overflowing)


def _update(session: Session, passes: _Passes) -> StepResult:
    """Clip, update and count."""
    session.beat("clipping and update")
    norm = session.engine.clip_gradients(session.config.optimizer.clip_grad)
    # An update that was skipped does not move the schedule.
    lr = session.schedule.at(session.iteration - session.optimizer.num_skipped_updates)
    session.optimizer.step(lr, norm, passes.num_overflowing)
    session.optimizer.zero_grad()
    counts_LE, dropped, aux_losses = _router_statistics(session, passes.router_log)
    if counts_LE is not None:
        is_update = torch.isfinite(norm)
        if passes.num_overflowing is not None:
            is_update = is_update & (passes.num_overflowing == 0)
        _update_biases(session, counts_LE, is_update)
    session.iteration += 1
    loader = session.data.loader
    return StepResult(
        loss=passes.loss_sum / max(loader.step_label_tokens, 1),
        grad_norm=norm,
        lr=lr,
        num_tokens=loader.step_valid_tokens,
        expert_counts_LE=counts_LE,
        num_dropped=dropped,
        aux_losses=aux_losses,
    )


def accumulate_gradients(
    session: Session, router_log: list[RouterRecord] | None = None, overflow_log: list[Tensor] | None = None
) -> Tensor:
    """Forward and backward of all micro-batches of the next step, and the reduction over ranks.

    Args:
        session: Its loader advances by one step; its parameters hold the summed gradients afterwards.
        router_log: Where MoE layers report to.
        overflow_log: Where they count rows that found no room; ``None``: exchanges take every row.

    Returns:
        fp32 device scalar: this rank's share of the sum of token losses. The shares of all ranks add up to the sum.

    Raises:
        RanksDifferError: Under ``--check-ranks``, if ranks that must see the same micro-batches do not.
    """
    session.beat("data")
    batches = session.data.loader.next_step()
    session.beat("forward and backward")
    if session.config.training.check_ranks:
        check_batches(session, batches)
    inputs = step_inputs(session, batches, router_log, overflow_log)
    loss_sum = session.executor.train(inputs, 1.0 / max(session.data.loader.step_label_tokens, 1))
    session.num_micro_batches += len(batches)
    return counted_once(loss_sum, session.mesh)


def step_inputs(
    session: Session,
    batches: Sequence[PackedBatch],
    router_log: list[RouterRecord] | None = None,
    overflow_log: list[Tensor] | None = None,
) -> StepInputs:
    """Put beside each micro-batch what blocks see of it.

    Args:
        session: At the step that the micro-batches belong to.
        batches: This rank's micro-batches of the step, all of them.
        router_log: Where MoE layers report to.
        overflow_log: Where they count rows that found no room; ``None``: exchanges take every row.

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
                overflow_log=overflow_log,
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


STEP_FUNCTIONS = (train_step, _settle, _run_passes, accumulate_gradients, _update)
"""What a step consists of; what these call names its phases in ``tools/sync_audit.py``."""
