"""Whole tensors from their parts, and the check that replicas agree: for tests, tools and the start of a run.

Everything here talks to all ranks and reads the device. Nothing of it belongs into a training step.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from megatron_glue.ops.dropout import derive_seed, seed_of_name
from megatron_glue.parallel.collectives import gather_rows
from megatron_glue.parallel.flat_range import get_master
from megatron_glue.parallel.managed_block import canonical_name
from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import get_shard_spec


class StagesDifferError(RuntimeError):
    """Two pipeline stages hold the same tensor with other values."""


def gather_full_parameters(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Every parameter of the whole model as one CPU tensor, on every rank.

    Args:
        model: The model or an engine's ``module``.
        mesh: The run's mesh.

    Returns:
        Global name -> tensor, the same keys and values under every layout.
    """
    return gather_full_tensors(((name, p, _values(p, mesh)) for name, p in model.named_parameters()), mesh)


def gather_full_gradients(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Every gradient of the whole model as one CPU tensor, on every rank.

    Args:
        model: The model or an engine's ``module``, after ``finish_backward``.
        mesh: The run's mesh.

    Returns:
        Global name -> tensor; parameters without a gradient are left out.
    """
    return gather_full_tensors(((name, p, p.grad) for name, p in model.named_parameters() if p.grad is not None), mesh)


def gather_full_tensors(items: Iterable[tuple[str, Tensor, Tensor]], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Gather anything that is laid out like parameters.

    Args:
        items: Local name, parameter, and a tensor of the parameter's layout; in one order on all ranks of a stage.
        mesh: The run's mesh.

    Returns:
        Global name -> CPU tensor, of all pipeline stages, on every rank.

    Raises:
        StagesDifferError: If stages hold one tensor (a tied embedding) with other bits.
    """
    whole = {global_name(name, param): _gather(value, param, mesh) for name, param, value in items}
    if mesh.pp_group is None:
        return whole
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    parts = _gather_bytes(buffer.getvalue(), mesh.pp_group)
    return merge_stages([torch.load(io.BytesIO(data), weights_only=True) for data in parts])


def merge_stages(stages: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all pipeline stages in one mapping.

    Args:
        stages: Global name -> whole tensor, of each stage.

    Returns:
        Global name -> tensor, each name once.

    Raises:
        StagesDifferError: If two stages bring one name with other bits: there is no whole tensor then, and taking
            either would hide what is wrong with the other.
    """
    merged: dict[str, Tensor] = {}
    owners: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name, tensor in stage.items():
            owner = owners.setdefault(name, index)
            if not _same_bits(merged.setdefault(name, tensor), tensor):
                raise StagesDifferError(f"{name} is not the same on pipeline stages {owner} and {index}")
    return merged


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same to the last bit; a NaN is the same as itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(*bits)


def _gather_bytes(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    """What each rank of a group holds, on all of them."""
    rows = gather_rows(torch.frombuffer(bytearray(data), dtype=torch.uint8), group)
    return [bytes(row.numpy()) for row in rows]


def global_name(name: str, param: Tensor) -> str:
    """The name of a parameter that no layout changes: its spec's, else what is left of ``name`` without wrappers."""
    spec = get_shard_spec(param)
    return canonical_name(name) if spec is None else spec.global_name


def _values(param: Tensor, mesh: ParallelMesh) -> Tensor:
    """A parameter's fp32 values on this rank, also where the engine keeps them beside the parameter, and cut."""
    master, spec = get_master(param), get_shard_spec(param)
    if master is None or spec is None:
        return param.detach()
    return master.whole(spec.local_shape(mesh.axis_sizes), mesh.edp_group if spec.is_expert else mesh.dp_group)


def _gather(value: Tensor, param: Tensor, mesh: ParallelMesh) -> Tensor:
    if isinstance(value, DTensor):
        for axis in range(value.device_mesh.ndim):
            # One axis at a time, outer first: parameters are split over tp or ep before they are split over dp.
            placements = list(value.placements)
            placements[axis] = Replicate()
            value = value.redistribute(placements=placements)
        return value.to_local().cpu()
    value = value.detach()
    spec = get_shard_spec(param)
    # Inner axes first: each step restores what the next outer axis has split.
    for axis, dim in reversed(spec.shard_dims if spec else ()):
        group = mesh.groups.get(axis)
        if group is None:
            continue
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(mesh.sizes[axis])]
        dist.all_gather(parts, value, group=group)
        value = torch.cat(parts, dim=dim)
    return value.cpu().clone()


def differing_replicas(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    """Names of parameters and buffers that are not bit-equal on the ranks that should hold the same values.

    Every rank sends (name, slice, fingerprint) of each of them as three 64-bit numbers; whoever has the same name and
    slice must have the same fingerprint, whatever the layout. One collective for the whole model.

    Args:
        model: The model or an engine's ``module``.
        mesh: The run's mesh.

    Returns:
        Global names with the ranks that hold them, the same list on all ranks; empty if all agree.
    """
    if mesh.world_group is None:
        return []
    own = {global_name(name, tensor): tensor for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    rows = [
        torch.stack(
            [torch.tensor(seed_of_name(name)), torch.tensor(_slice_id(tensor, mesh)), fingerprint(tensor).cpu()]
        )
        for name, tensor in own.items()
    ]
    table = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.int64)
    differing = _disagreements([rows.numpy() for rows in gather_rows(table, mesh.world_group)])
    if not differing:
        return []
    names = _gather_bytes("\n".join(own).encode(), mesh.world_group)
    by_hash = {seed_of_name(name): name for lines in names for name in lines.decode().splitlines()}
    return [f"{by_hash[key]} (ranks {ranks})" for key, ranks in differing.items()]


def _disagreements(tables: list[np.ndarray]) -> dict[int, str]:
    """Hash of each name whose holders differ -> their ranks in words.

    Args:
        tables: int64 [parameters, 3] of (name, slice, fingerprint), of each rank.
    """
    rows = np.concatenate(tables)
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.lexsort((ranks, rows[:, 1], rows[:, 0]))
    rows, ranks = rows[order], ranks[order]
    differing: dict[int, str] = {}
    starts = np.flatnonzero(np.r_[True, (rows[1:, :2] != rows[:-1, :2]).any(axis=1)]) if len(rows) else []
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        if (rows[start:end, 2] != rows[start, 2]).any():
            differing[int(rows[start, 0])] = ", ".join(map(str, ranks[start:end]))
    return differing


def _slice_id(param: Tensor, mesh: ParallelMesh) -> int:
    """A number that ranks share if they hold the same slice of the same parameter."""
    parts: list[int] = []
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside the mesh holds no parameter on it"
        for index, placement in zip(coordinate, param.placements, strict=True):
            parts.append(-1 if placement.is_replicate() else index)
    elif (spec := get_shard_spec(param)) is not None:
        parts = [mesh.axis_ranks[axis] for axis, _ in spec.shard_dims]
    return derive_seed(*parts)


def fingerprint(param: Tensor) -> Tensor:
    """int64 scalar of a tensor's bits and their order; collisions are not adversary-proof, only unlikely."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = param.to_local() if isinstance(param, DTensor) else param
    bits = local.detach().contiguous().view(-1).view(integers[param.element_size()]).to(torch.int64)
    position = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
    # Odd multipliers that depend on the position; int64 products wrap, on every device alike.
    return ((bits + 1) * (2 * position + 1) * 0x5851F42D4C957F2D).sum()
