"""The gradient norm of the whole model, each logical slice counted once, without reading the device.

Where a gradient lies follows from its layout: a DTensor knows its placements, a plain parameter its ShardSpec. A slice
that r ranks hold contributes 1/r on each of them, so one sum over all ranks is right for every layout: replicated or
sharded, dense or expert, on one pipeline stage or tied between two, in any mixture.

Stands between ``engine.finish_backward()`` and the optimizer. It knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_glue.parallel.mesh import ParallelMesh
from megatron_glue.parallel.shard_spec import EMBEDDING_AXIS, get_shard_spec


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
    if mesh.world_group is not None:
        dist.all_reduce(total, group=mesh.world_group)
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


def scaled_loss(loss: Tensor, scale: float) -> Tensor:
    """A loss times a factor, for backward. Where the loss is not finite, so is every gradient.

    A loss can be infinite while its gradient is finite (a label whose logit is -inf). All ranks judge a step by the
    norm of its gradient, so it must show there; the factor carries it, without a collective and without a host read.

    Args:
        loss: fp32 scalar.
        scale: Factor.

    Returns:
        ``loss * scale``, bit for bit if the loss is finite.
    """
    return loss * (loss.detach() * 0.0 + scale)


def scale_gradients(params: Iterable[nn.Parameter], scale: Tensor) -> None:
    """Multiply all gradients in place by a scalar tensor, equal on all ranks."""
    grads = [local_gradient(param.grad) for param in params if param.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]


def num_replicas(param: Tensor, mesh: ParallelMesh) -> int:
    """How many ranks hold the same slice of a parameter.

    Args:
        param: A parameter, plain or DTensor.
        mesh: The run's mesh.

    Returns:
        All ranks of the stage for a replicated parameter, 1 for one that is sharded over all of them; twice that for a
        parameter that the first and the last stage share.
    """
    num_slices = 1
    spec = get_shard_spec(param)
    if isinstance(param, DTensor):
        for axis, placement in enumerate(param.placements):
            num_slices *= 1 if placement.is_replicate() else param.device_mesh.size(axis)
    elif spec is not None:
        num_slices = math.prod(mesh.axis_sizes[axis] for axis, _ in spec.shard_dims)
    is_tied = spec is not None and EMBEDDING_AXIS in spec.partial_axes and mesh.pp_size > 1
    return mesh.stage_size // num_slices * (2 if is_tied else 1)


def local_gradient(grad: Tensor) -> Tensor:
    """This rank's part of a gradient, sharing its memory."""
    return grad.to_local() if isinstance(grad, DTensor) else grad
