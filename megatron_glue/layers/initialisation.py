"""Initial values of parameters, as a function of the run seed and the parameter's GLOBAL name alone.

Every rank draws the same values whatever it holds and whatever was built before, so the first loss is the same under
every layout, and replicated parameters are equal at step 0 without a broadcast. Values are drawn on the CPU in fp32
and then copied, so a GPU run starts where a CPU run starts.

It runs once, while the model is built. It does not choose names; the room that builds a module does.

Shape suffixes: e local experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_glue.ops.dropout import derive_seed, seed_of_name
from megatron_glue.parallel.shard_spec import ShardSpec


def residual_std(std: float, num_layers: int) -> float:
    """Return the deviation for projections that end on the residual stream: std / sqrt(2 * num_layers) (GPT-2)."""
    return std / math.sqrt(2 * num_layers)


def _draw(shape: Sequence[int], std: float, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_normal_(param: Tensor, std: float, seed: int, name: str) -> None:
    """Fill a replicated parameter with N(0, std^2).

    Args:
        param: The whole parameter, any shape, dtype and device.
        std: Standard deviation.
        seed: The run's seed.
        name: Global name of the parameter, e.g. ``blocks.3.attention.qkv_weight``.
    """
    param.copy_(_draw(param.shape, std, derive_seed(seed, seed_of_name(name))))


@torch.no_grad()
def init_part_normal_(param: Tensor, std: float, seed: int, spec: ShardSpec, slices: tuple[slice, ...]) -> None:
    """Fill a part of a parameter with what :func:`init_normal_` would have put there.

    Args:
        param: This rank's part, any dtype and device.
        std: Standard deviation.
        seed: The run's seed.
        spec: Global name and shape.
        slices: Where this rank's part lies in the whole, see :meth:`ShardSpec.local_slices`.
    """
    whole = _draw(spec.global_shape, std, derive_seed(seed, seed_of_name(spec.global_name)))
    param.copy_(whole[slices])


@torch.no_grad()
def init_expert_normal_(param_e: Tensor, std: float, seed: int, spec: ShardSpec, slices: tuple[slice, ...]) -> None:
    """Fill a stack of experts, each from its own GLOBAL expert id, so that the layout of experts never matters.

    Args:
        param_e: [num_local_experts, ...] this rank's part.
        std: Standard deviation.
        seed: The run's seed.
        spec: Global name and shape of the stack; dim 0 counts experts.
        slices: Where this rank's part lies in it, see :meth:`ShardSpec.local_slices`. Each expert is drawn whole.
    """
    experts, *inside = slices
    for expert_id, param in zip(range(experts.start, experts.stop), param_e, strict=True):
        expert_seed = derive_seed(seed, seed_of_name(spec.global_name), expert_id)
        param.copy_(_draw(spec.global_shape[1:], std, expert_seed)[tuple(inside)])
