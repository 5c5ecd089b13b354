"""Collectives with explicit groups: the few that layers, engines and the training loop need.

A group of ``None`` means size 1 and makes every function here the identity, so one process needs no process group.
This file knows no mesh and no module, and it reads no device value: splits are host integers.

Stands wherever a batch crosses ranks: the exchange of expert rows in the middle of a block, sums of counts and metrics
after a step, agreement on flags between steps.

Shape suffixes: S sent rows, R received rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 has new names for both and warns about the old ones.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class Pending:
    """A collective under way, so that what does not depend on it can be computed meanwhile.

    Attributes:
        result: Where its result will stand; not to be read before :meth:`wait`.
        work: The running collective; ``None`` if there is nothing to wait for.
    """

    result: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Return the result. On a GPU the present stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_all_gather_rows(x_TD: Tensor, group: ProcessGroup) -> Pending:
    """Start to put the rows of all ranks after each other, in the order of ranks.

    Args:
        x_TD: [T, ...] rows, the same number on every rank; it must not be written to before the end.
        group: Ranks that take part.

    Returns:
        [P * T, ...] to come, P the size of the group.
    """
    x_TD = x_TD.detach().contiguous()
    gathered = x_TD.new_empty((group.size() * x_TD.shape[0], *x_TD.shape[1:]))
    return Pending(gathered, _all_gather_single(gathered, x_TD, group=group, async_op=True))


def start_reduce_scatter_rows(x_TD: Tensor, group: ProcessGroup) -> Pending:
    """Start to sum over ranks, of which each keeps its share of the rows.

    Args:
        x_TD: [T, ...], T a multiple of the size of the group; it must not be written to before the end.
        group: Ranks that take part.

    Returns:
        [T / P, ...] to come: rank p's is part p of the sum.
    """
    x_TD = x_TD.detach().contiguous()
    assert x_TD.shape[0] % group.size() == 0, f"{x_TD.shape[0]} rows do not split over {group.size()} ranks"
    share = x_TD.new_empty((x_TD.shape[0] // group.size(), *x_TD.shape[1:]))
    return Pending(share, _reduce_scatter_single(share, x_TD, group=group, async_op=True))


def start_all_reduce_(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Start to overwrite a contiguous tensor by its sum over ranks.

    Args:
        tensor: Not to be touched before the end.
        group: Ranks that take part.

    Returns:
        The tensor itself, to come.
    """
    assert tensor.is_contiguous(), "collectives work on contiguous memory"
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def start_all_reduce_max_(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Start to overwrite a contiguous tensor by its elementwise maximum over ranks.

    Args:
        tensor: Not to be touched before the end. One on the host goes over the host's own backend.
        group: Ranks that take part.

    Returns:
        The tensor itself, to come.
    """
    assert tensor.is_contiguous(), "collectives work on contiguous memory"
    return Pending(tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))


def all_to_all_rows(
    x_SD: Tensor,
    send_splits: Sequence[int] | None,
    receive_splits: Sequence[int] | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Exchange rows with every rank of a group; differentiable, the backward is the reverse exchange.

    The autograd edge and both collectives exist even when this rank sends or receives no row, so that a rank without
    tokens never leaves its peers waiting.

    Args:
        x_SD: [S, ...] rows, those for rank 0 first.
        send_splits: Rows for each rank (host integers, sum S); ``None`` only without a group.
        receive_splits: Rows from each rank (host integers, sum R); ``None`` only without a group.
        group: Ranks that take part.

    Returns:
        [R, ...] rows in the order of the ranks that sent them, same dtype.

    Raises:
        ValueError: If a split list does not fit the group or the rows.
    """
    if group is None:
        return x_SD
    if send_splits is None or receive_splits is None:
        raise ValueError("send_splits and receive_splits: needed with a process group; got None")
    num_ranks = dist.get_world_size(group)
    for name, splits in (("send_splits", send_splits), ("receive_splits", receive_splits)):
        if len(splits) != num_ranks:
            raise ValueError(f"{name}: {len(splits)} entries for a group of {num_ranks} ranks")
    if sum(send_splits) != x_SD.shape[0]:
        raise ValueError(f"send_splits={tuple(send_splits)}: sum {sum(send_splits)} for {x_SD.shape[0]} rows")
    return _AllToAllRows.apply(x_SD, list(send_splits), list(receive_splits), group)


class _AllToAllRows(torch.autograd.Function):
    """Uneven all-to-all over dim 0."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, send_splits: list[int], receive_splits: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.send_splits, ctx.receive_splits, ctx.group = send_splits, receive_splits, group
        return _exchange(x_SD, send_splits, receive_splits, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_SD = _exchange(grad_outputs[0], ctx.receive_splits, ctx.send_splits, ctx.group)
        return grad_SD, None, None, None


def _exchange(x: Tensor, send_splits: list[int], receive_splits: list[int], group: ProcessGroup) -> Tensor:
    received = x.new_empty((sum(receive_splits), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), receive_splits, send_splits, group=group)
    return received


def all_to_all_equal(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send chunk p of dim 0 to rank p; for counts and other small tensors, not differentiable.

    Args:
        x: [P * n, ...], P the size of the group, n rows for each rank.
        group: Ranks that take part.

    Returns:
        Same shape; chunk p came from rank p.
    """
    return x if group is None else start_all_to_all_equal(x, group).wait()


def start_all_to_all_equal(x: Tensor, group: ProcessGroup) -> Pending:
    """Start what :func:`all_to_all_equal` does.

    Args:
        x: [P * n, ...]; it must not be written to before the end.
        group: Ranks that take part.

    Returns:
        Same shape, to come.
    """
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    return Pending(received, dist.all_to_all_single(received, x.detach().contiguous(), group=group, async_op=True))


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the group as a new, detached tensor; the input stays as it is."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def all_reduce_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the elementwise maximum over the group as a new, detached tensor; the input stays as it is."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def _all_reduce(tensor: Tensor, operation: Any, group: ProcessGroup | None) -> Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(result, operation, group=group)
    return result


def all_reduce_sum_many(tensors: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Sum several small tensors over the group in one collective per (dtype, device).

    For a step's metrics: loss sum, token counts, router counts. Order and number must agree on all ranks.

    Args:
        tensors: Any shapes and dtypes.
        group: Ranks that take part.

    Returns:
        New detached tensors of the same shapes and dtypes, in the same order.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    results: list[Tensor] = [tensor.detach() for tensor in tensors]
    for indices in by_kind.values():
        flat = torch.cat([results[index].reshape(-1) for index in indices])
        if group is not None:
            dist.all_reduce(flat, group=group)
        for index, part in zip(indices, flat.split([results[index].numel() for index in indices]), strict=True):
            results[index] = part.view(results[index].shape)
    return results


def gather_rows(x_TD: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Bring the rows of every rank to every rank; not differentiable, for small tables of the host.

    Args:
        x_TD: [T, ...] rows, as many as this rank has.
        group: Ranks that take part.

    Returns:
        Each rank's rows, in the order of ranks.
    """
    if group is None:
        return [x_TD.detach()]
    num_rows = torch.tensor([x_TD.shape[0]])
    counts = [torch.zeros_like(num_rows) for _ in range(group.size())]
    dist.all_gather(counts, num_rows, group=group)
    padded = x_TD.new_zeros((max(int(count) for count in counts), *x_TD.shape[1:]))
    padded[: x_TD.shape[0]] = x_TD.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return [rows[: int(count)] for rows, count in zip(gathered, counts, strict=True)]


def broadcast_(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Overwrite ``tensor`` in place by what the first rank of the group holds, and return it."""
    if group is not None:
        dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def max_over_ranks(value: int, group: ProcessGroup | None) -> int:
    """The largest host integer over the group; the same answer on all ranks. Blocks the host, not the device."""
    if group is None:
        return value
    host_value = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(host_value, dist.ReduceOp.MAX, group=group)
    return int(host_value[0])


def maxima_over_ranks(values: Sequence[float], group: ProcessGroup | None) -> list[float]:
    """The largest of each host number over the group, in one collective. Blocks the host, not the device.

    Args:
        values: As many on all ranks; infinities are numbers like any other.
        group: Ranks that take part.
    """
    return [float(value) for value in all_reduce_max(torch.tensor(list(values), dtype=torch.float64), group)]


def is_same_on_all_ranks(value: int, group: ProcessGroup | None) -> bool:
    """Whether all ranks of the group hold the same host integer (below 2**62). Blocks the host, not the device."""
    return max_over_ranks(value, group) == -max_over_ranks(-value, group)
