"""Where a layer gets its weight from, and in which dtype: ``local(weight, dtype)``.

Master weights are fp32 and so are their gradients and the sums of gradients over ranks. The compute dtype may be bf16.
There is no autocast: a layer asks for its weight in the dtype of its activations. Who casts depends on the engine:

- ddp and one process: parameters are the fp32 masters. ``local`` hands out a compute copy that hangs on the parameter
  and is refreshed only when the parameter has changed, so all micro-batches of a step, and recompute, share one cast.
  Fused optimizers write without telling autograd: ``track_updates`` makes them tell.
- deepspeed: as the first, except where ZeRO keeps bf16 weights beside its fp32 masters. Then the parameter is bf16, and
  one that is read in fp32 all the same comes with its unrounded values (``set_unrounded``).
- fsdp2: the all-gather hands the layer parameters in the compute dtype already (``MixedPrecisionPolicy``), and the
  gradient is reduced in fp32. ``local`` then only strips the DTensor.

This file knows nothing of process groups. It stands at the first line of every layer's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of

_CACHE_ATTRIBUTE = "_compute_copy"
_UNROUNDED_ATTRIBUTE = "_unrounded"
_FULL_PRECISION_ATTRIBUTE = "_keeps_full_precision"
_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Dtypes of one run.

    Attributes:
        compute_dtype: Dtype of activations and of the weights that products read.
    """

    compute_dtype: torch.dtype

    @classmethod
    def from_name(cls, name: str, device_type: str) -> Precision:
        """Translate the configured word.

        Args:
            name: ``fp32``, ``bf16``, or ``auto``: bf16 on an accelerator, fp32 on a CPU.
            device_type: ``cpu`` or ``cuda``.

        Returns:
            The precision.

        Raises:
            ConfigError: If the word is unknown.
        """
        if name == "auto":
            name = "fp32" if device_type == "cpu" else "bf16"
        if name not in _COMPUTE_DTYPES:
            raise ConfigError(flag_of("precision"), name, "unknown", f"use auto or one of {sorted(_COMPUTE_DTYPES)}")
        return cls(_COMPUTE_DTYPES[name])

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of parameters as the optimizer sees them, of their gradients and of sums over ranks."""
        return torch.float32

    @property
    def is_mixed(self) -> bool:
        """Whether weights are computed with in another dtype than they are kept in."""
        return self.compute_dtype != self.master_dtype


def local(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the plain local tensor of a weight in the dtype it is to be computed with.

    Differentiable: the gradient arrives at ``weight`` in the dtype of ``weight``, so an fp32 master accumulates its
    micro-batches in fp32.

    Args:
        weight: A parameter, plain or DTensor (then its local shard is meant).
        dtype: Compute dtype.

    Returns:
        ``weight`` itself if it is plain and of that dtype, else its local shard or compute copy. Never write to it.
    """
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    if weight.dtype == dtype:
        return weight
    if dtype == torch.float32 and (unrounded := getattr(weight, _UNROUNDED_ATTRIBUTE, None)) is not None:
        return _Unrounded.apply(weight, unrounded)
    if weight.dtype != torch.float32 or not weight.is_leaf or weight.is_inference():
        # Only masters are cached. FSDP2 refills its low-precision parameters without changing their version, an
        # intermediate lives for one use, and an inference tensor keeps no version.
        return weight.to(dtype)
    return _CachedCast.apply(weight, dtype)


def keep_full_precision(param: Tensor) -> None:
    """Mark a small parameter that layers read in fp32 even when they compute in bf16, such as a router's weight.

    Without the mark FSDP2 would hand the layer a value rounded to bf16, and the engines would route differently.
    """
    setattr(param, _FULL_PRECISION_ATTRIBUTE, True)


def keeps_full_precision(param: Tensor) -> bool:
    """Whether :func:`keep_full_precision` marked the parameter."""
    return getattr(param, _FULL_PRECISION_ATTRIBUTE, False)


def set_unrounded(param: Tensor, values: Tensor) -> None:
    """Give a low-precision parameter the fp32 values that it was rounded from, for layers that read it in fp32.

    Args:
        param: The parameter.
        values: fp32, of its shape. Whoever updates the parameter updates them.
    """
    setattr(param, _UNROUNDED_ATTRIBUTE, values)


def track_updates(optimizer: torch.optim.Optimizer) -> None:
    """Make every step of an optimizer count as a write to its parameters, so that compute copies are refreshed.

    ``AdamW(fused=True)`` changes parameters without changing their ``_version`` (torch 2.13, CPU; the foreach and loop
    variants do change it). Without this, layers would go on computing with the copies of the first step.

    Args:
        optimizer: Any optimizer over parameters that layers read through :func:`local`.
    """
    optimizer.register_step_post_hook(_increment_versions)


def _increment_versions(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    plain = [p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, DTensor)]
    if plain:
        increment_version(plain)


class _CachedCast(torch.autograd.Function):
    """A cast whose forward reuses the copy kept on the parameter and whose backward casts the gradient back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.master_dtype = weight.dtype
        # detach(): autograd marks a Function's output as its own, so each use needs a tensor object of its own.
        return _compute_copy(weight, dtype).detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].to(ctx.master_dtype), None


class _Unrounded(torch.autograd.Function):
    """The fp32 values in forward; the gradient goes to the rounded parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        ctx.weight_dtype = weight.dtype
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].to(ctx.weight_dtype), None


def _compute_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The copy on the parameter, refreshed in place if the parameter was written to since."""
    key = (weight._version, weight.data_ptr(), weight.shape)
    entry: tuple[Any, Tensor] | None = getattr(weight, _CACHE_ATTRIBUTE, None)
    if entry is not None and entry[0] == key and entry[1].dtype == dtype:
        return entry[1]
    # A copy born under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False), torch.no_grad():
        if entry is not None and (entry[1].dtype, entry[1].shape, entry[1].device) == (
            dtype,
            weight.shape,
            weight.device,
        ):
            copy = entry[1].copy_(weight)
        else:
            copy = weight.detach().to(dtype)
    setattr(weight, _CACHE_ATTRIBUTE, (key, copy))
    return copy
