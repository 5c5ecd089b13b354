"""The gradient norm of the whole model, each logical slice counted once, without reading the device.

Where a gradient lies follows from its layout: a DTensor knows its placements, a plain parameter its ShardSpec. A slice
that r of the data-parallel ranks hold contributes 1/r on each of them, so one sum over dp is right for every layout:
replicated or sharded, dense or expert, in any mixture.

Stands between ``engine.finish_backward()`` and the optimizer. It knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import is_expert_parameter


def global_grad_norm(params: Iterable[nn.Parameter], mesh: ParallelMesh) -> Tensor:
    """Euclidean norm over the gradients of all ranks.

    Args:
        params: The model's trainable parameters, the same on all ranks; those without a gradient count as zeros.
        mesh: The run's mesh.

    Returns:
        fp32 scalar on the parameters' device, bit-equal on all ranks. NaN or infinity anywhere shows in it.
    """
    params = list(params)
    by_replicas: dict[int, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            by_replicas.setdefault(num_replicas(param, mesh), []).append(local_gradient(param.grad))
    total = torch.zeros((), dtype=torch.float32, device=params[0].device if params else None)
    for replicas, grads in sorted(by_replicas.items()):
        total = total + torch.nn.utils.get_total_norm(grads).float().square() / replicas
    if mesh.dp_group is not None:
        dist.all_reduce(total, group=mesh.dp_group)
    return total.sqrt()


def clip_gradients(params: Iterable[nn.Parameter], max_norm: float, mesh: ParallelMesh) -> Tensor:
    """Scale all gradients down to a global norm of at most ``max_norm``.

    Args:
        params: As for :func:`global_grad_norm`.
        max_norm: Largest norm, the same on all ranks; 0 measures only.
        mesh: The run's mesh.

    Returns:
        The norm before clipping, fp32 scalar on the device. With a NaN in it the gradients are left useless: the caller
        decides on all ranks alike whether to skip the step.
    """
    params = list(params)
    norm = global_grad_norm(params, mesh)
    if max_norm > 0:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_: a zero gradient must not become NaN.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(params, scale)
    return norm


def scale_gradients(params: Iterable[nn.Parameter], scale: Tensor) -> None:
    """Multiply all gradients in place by a scalar tensor, equal on all ranks."""
    grads = [local_gradient(param.grad) for param in params if param.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]


def num_replicas(param: Tensor, mesh: ParallelMesh) -> int:
    """How many data-parallel ranks hold the same slice of a parameter.

    Args:
        param: A parameter, plain or DTensor.
        mesh: The run's mesh.

    Returns:
        dp_size for a replicated parameter, 1 for a fully sharded one.
    """
    if isinstance(param, DTensor):
        num_shards = 1
        for axis, placement in enumerate(param.placements):
            num_shards *= 1 if placement.is_replicate() else param.device_mesh.size(axis)
        return mesh.dp_size // num_shards
    return mesh.edp_size if is_expert_parameter(param) else mesh.dp_size


def local_gradient(grad: Tensor) -> Tensor:
    """This rank's part of a gradient, sharing its memory."""
    return grad.to_local() if isinstance(grad, DTensor) else grad
