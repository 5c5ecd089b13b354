"""One MoE layer under a layout against the same layer in one process: the rows of a rank, and what must agree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_glue.activation.manager import ActivationManager
from megatron_glue.activation.plan import ActivationPlan
from megatron_glue.config.sections import ParallelConfig
from megatron_glue.moe.layer import MoELayer
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec
from megatron_glue.types import ForwardContext, PackedSequence, RouterRecord
from tests.support.moe_cases import MoECase, random_rows
from tests.support.tolerances import assert_close

ALIGNMENT = 4


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the segments of each data-parallel rank's micro-batch, which has ``num_tokens`` rows."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    lengths: tuple[tuple[int, ...], ...] = ((7, 5),)
    num_tokens: int = 16
    favoured: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.tp * self.cp * len(self.lengths)

    def mesh(self) -> ParallelMesh:
        """The mesh, built once per process; every rank must call this."""
        return _mesh(self.tp, self.cp, self.ep, self.etp)


@cache
def _mesh(tp: int, cp: int, ep: int, etp: int) -> ParallelMesh:
    sizes = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    return ParallelMesh.build(ParallelConfig.model_validate(sizes), "cpu")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of one micro-batch on one rank, the gradient of the layer's output, and the context.

    Attributes:
        rows_T: Index of each row in the whole micro-batch.
    """

    x: Tensor
    probe: Tensor
    context: ForwardContext
    rows_T: Tensor


def whole_micro_batch(
    layout: Layout, dp_rank: int, hidden_size: int, probe_scale: float = 1.0, pad_value: float = float("nan")
) -> MicroBatch:
    """A data-parallel rank's micro-batch as one process sees it."""
    lengths = layout.lengths[dp_rank]
    x = random_rows(layout.num_tokens, hidden_size, seed=dp_rank)
    with torch.no_grad():
        x[sum(lengths) :] = pad_value
    probe = random_rows(layout.num_tokens, hidden_size, seed=100 + dp_rank).detach() * probe_scale
    sequence = PackedSequence.from_lengths(lengths, num_pad_tokens=layout.num_tokens - sum(lengths))
    context = ForwardContext(sequence, aux_loss_scale=1.0 / len(layout.lengths), router_log=[])
    return MicroBatch(x, probe, context, torch.arange(layout.num_tokens))


def local_micro_batch(whole: MicroBatch, mesh: ParallelMesh) -> MicroBatch:
    """What a rank sees of it: its context-parallel rows, and of those its rows of the residual stream."""
    sequence, rows_T = whole.context.sequence, whole.rows_T
    if mesh.cp_size > 1:
        sequence = sequence.shard(mesh.cp_rank, mesh.cp_size, ALIGNMENT)
        assert sequence.token_ids_T is not None
        rows_T = sequence.token_ids_T
    residual_rows = mesh.residual_rows(sequence.num_tokens)
    rows_T = rows_T if residual_rows is None else rows_T[residual_rows]
    context = ForwardContext(
        sequence,
        aux_loss_scale=whole.context.aux_loss_scale,
        router_log=[],
        overflow_log=[],
        residual_rows=residual_rows,
    )
    return MicroBatch(whole.x.detach()[rows_T].requires_grad_(), whole.probe[rows_T], context, rows_T)


def favour(layer: MoELayer, experts: tuple[int, ...]) -> None:
    """Make every token choose these experts."""
    if experts:
        assert layer.router.expert_bias_E is not None
        layer.router.expert_bias_E[list(experts)] = 100.0


def log_of(context: ForwardContext) -> RouterRecord:
    """The one record of a context."""
    assert context.router_log is not None
    assert len(context.router_log) == 1
    return context.router_log[0]


def run(layer: nn.Module, batch: MicroBatch, recompute: bool = False) -> tuple[Tensor, Tensor]:
    """Output and input gradient; parameter gradients accumulate in the layer."""
    plan = ActivationPlan(recompute=recompute)
    out = ActivationManager(plan, "cpu").run_block(layer, batch.x, batch.context)
    (out * batch.probe).sum().backward()
    assert batch.x.grad is not None
    return out.detach(), batch.x.grad


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes:
        layout: Sizes and micro-batches.
        case: The layer.
        recompute: Compute the layer again in backward.
        probe_scale: Of the gradient of the output; 0 leaves the auxiliary losses alone.
    """

    layout: Layout
    case: MoECase
    recompute: bool = False
    probe_scale: float = 1.0


def compare_with_one_process(rank: int, world_size: int, jobs: list[Job]) -> list[int]:
    """Body of a rank. The one process is each rank's own, over all micro-batches in turn.

    Args:
        rank: This rank.
        world_size: All ranks.
        jobs: What to compare, one after the other.

    Returns:
        Host reads of each job's layer.
    """
    num_reads = []
    for job in jobs:
        try:
            num_reads.append(_compare(job))
        except Exception as error:
            raise AssertionError(str(job)) from error
    return num_reads


def _compare(job: Job) -> int:
    layout, case = job.layout, job.case
    mesh = layout.mesh()
    assert (mesh.ep_size, mesh.etp_size, mesh.dp_size) == (layout.ep, layout.etp, len(layout.lengths))
    reference = case.with_(one_pass=False).build()
    favour(reference, layout.favoured)
    expected = []
    for dp_rank in range(mesh.dp_size):
        batch = whole_micro_batch(layout, dp_rank, case.hidden_size, job.probe_scale)
        expected.append((*run(reference, batch), log_of(batch.context)))

    layer = case.build(mesh)
    favour(layer, layout.favoured)
    batch = local_micro_batch(whole_micro_batch(layout, mesh.dp_rank, case.hidden_size, job.probe_scale), mesh)
    out, x_grad = run(layer, batch, job.recompute)
    expected_out, expected_x_grad, expected_record = expected[mesh.dp_rank]
    for what, actual, wanted in (("output", out, expected_out), ("input gradient", x_grad, expected_x_grad)):
        # Against the norm of the whole, or a rank with few rows would be held to more than one process is.
        whole = wanted.clone()
        whole[batch.rows_T] = actual
        assert_close(whole, wanted, what=what)
    assert not any(batch.context.overflow_log or []), "what overflows cannot be compared"
    _compare_statistics(log_of(batch.context), expected_record, mesh)
    _compare_parameters(layer, reference, mesh)
    return layer.config.host_reader.count


def _compare_statistics(record: RouterRecord, expected: RouterRecord, mesh: ParallelMesh) -> None:
    """Each rank's share of a micro-batch's statistics; their sum is the micro-batch's."""
    assert record.num_dropped_pairs == 0
    totals = [record.counts_E.clone(), record.aux_loss.clone(), record.z_loss.clone()]
    if mesh.tp_cp_group is not None:
        for total in totals:
            dist.all_reduce(total, group=mesh.tp_cp_group)
    assert torch.equal(totals[0], expected.counts_E)
    assert_close(totals[1], expected.aux_loss, what="auxiliary loss")
    assert_close(totals[2], expected.z_loss, what="z-loss")


def _compare_parameters(layer: MoELayer, reference: MoELayer, mesh: ParallelMesh) -> None:
    """Router gradients sum over all ranks; F73: those of experts over edp, whatever ranks share or split them."""
    router_grad, expected = layer.router.weight.grad, reference.router.weight.grad
    assert router_grad is not None
    assert expected is not None
    dist.all_reduce(router_grad)
    assert_close(router_grad, expected, what="router gradient")
    for (name, param), whole in zip(layer.experts.named_parameters(), reference.experts.parameters(), strict=True):
        spec = get_shard_spec(param)
        assert spec is not None
        assert spec.global_shape == whole.shape
        own = spec.local_slices(mesh.axis_sizes, mesh.axis_ranks)
        assert torch.equal(param, whole[own]), f"{name}: initialised by global expert id, then sliced"
        # F55: zeros, not None, where no token came.
        assert param.grad is not None, name
        assert whole.grad is not None, name
        if mesh.edp_group is not None:
            dist.all_reduce(param.grad, group=mesh.edp_group)
        assert_close(param.grad, whole.grad[own], what=f"{name} gradient")
