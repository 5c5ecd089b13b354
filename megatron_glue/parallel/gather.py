"""Whole tensors from their parts, and the check that replicas agree: for tests, tools and the start of a run.

Everything here talks to all ranks and reads the device. Nothing of it belongs into a training step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import EXPERT_AXIS, get_shard_spec, is_expert_parameter


def gather_full_parameters(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Every parameter as one whole CPU tensor, on every rank.

    Args:
        model: The model or an engine's ``module``.
        mesh: The run's mesh.

    Returns:
        Global name -> tensor, the same keys and values under every layout.
    """
    return {global_name(name, p): _gather(p.detach(), p, mesh) for name, p in model.named_parameters()}


def gather_full_gradients(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Every gradient as one whole CPU tensor, on every rank.

    Args:
        model: The model or an engine's ``module``, after ``finish_backward``.
        mesh: The run's mesh.

    Returns:
        Global name -> tensor; parameters without a gradient are left out.
    """
    return {
        global_name(name, p): _gather(p.grad, p, mesh) for name, p in model.named_parameters() if p.grad is not None
    }


def global_name(name: str, param: Tensor) -> str:
    """The name of a parameter that no layout changes: its spec's, else what is left of ``name`` without wrappers."""
    spec = get_shard_spec(param)
    return canonical_name(name) if spec is None else spec.global_name


def _gather(value: Tensor, param: Tensor, mesh: ParallelMesh) -> Tensor:
    if isinstance(value, DTensor):
        for axis in range(value.device_mesh.ndim):
            # One axis at a time, outer first: experts are split over ep before they are split over edp.
            placements = list(value.placements)
            placements[axis] = Replicate()
            value = value.redistribute(placements=placements)
        return value.to_local().cpu()
    spec = get_shard_spec(param)
    if spec is None or mesh.ep_group is None or not is_expert_parameter(param):
        return value.detach().cpu().clone()
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(mesh.ep_size)]
    dist.all_gather(parts, value.contiguous(), group=mesh.ep_group)
    return torch.cat(parts, dim=dict(spec.shard_dims)[EXPERT_AXIS]).cpu()


def differing_replicas(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    """Names of parameters that are not bit-equal on the ranks that should hold the same values.

    Compares 64-bit fingerprints, two collectives for the whole model. Sharded (DTensor) parameters have no replicas.

    Args:
        model: The model or an engine's ``module``.
        mesh: The run's mesh.

    Returns:
        Global names, the same list on all ranks; empty if all agree.
    """
    differing: list[str] = []
    plain = [(name, p) for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    for group, of_experts in ((mesh.dp_group, False), (mesh.edp_group, True)):
        members = [(name, p) for name, p in plain if is_expert_parameter(p) == of_experts]
        if group is None or not members:
            continue
        fingerprints = torch.stack([_fingerprint(p) for _, p in members])
        # max(f) == -max(-f) exactly if all are equal.
        extremes = torch.stack([fingerprints, -fingerprints])
        # Experts differ between ep ranks by design, so each group judges for itself; then all learn of it.
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        differs = (extremes[0] != -extremes[1]).to(torch.int64)
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=mesh.dp_group)
        differing += [global_name(*members[i]) for i, flag in enumerate(differs.tolist()) if flag]
    return differing


def _fingerprint(param: Tensor) -> Tensor:
    """int64 scalar of a tensor's bits and their order; collisions are not adversary-proof, only unlikely."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = param.detach().contiguous().view(-1).view(integers[param.element_size()]).to(torch.int64)
    position = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
    # Odd multipliers that depend on the position; int64 products wrap, on every device alike.
    return ((bits + 1) * (2 * position + 1) * 0x5851F42D4C957F2D).sum()
