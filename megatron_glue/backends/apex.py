"""NVIDIA apex as a backend: fused norms and fused AdamW.

apex is installed from its source (docs/backends.md). It is not on PyPI: the package of that name there is an unrelated
project, which :func:`why_not_apex` recognises. This file is the only one that imports the library, and only inside
functions. apex has no versions, so what is asked is whether it has the functions that are called here, which are those
of its source of July 2026.

``auto`` never takes it: torch has fused norms and a fused AdamW of its own, which need no build.

Shape suffixes: D normalised width.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_glue.backends.norm import layer_norm_torch, rms_norm_torch

SOURCE = "https://github.com/NVIDIA/apex"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NORM_MODULE = "apex.normalization.fused_layer_norm"
_COMPILED = {"norm": "fused_layer_norm_cuda", "optimizer": "amp_C"}


def why_not_apex_norm(device: torch.device, dtype: torch.dtype) -> str:
    """Say why apex's norms cannot serve, or return an empty string.

    Args:
        device: Where the model computes.
        dtype: Compute dtype.
    """
    if device.type == "cuda" and dtype not in _DTYPES:
        return f"its kernels compute in bf16, fp16 or fp32, not in {dtype}"
    return _why_not_on(device, "norm")


def why_not_apex_optimizer(device: torch.device) -> str:
    """Say why apex's fused AdamW cannot serve, or return an empty string.

    Args:
        device: Where the parameters live.
    """
    return _why_not_on(device, "optimizer")


def _why_not_on(device: torch.device, role: str) -> str:
    if device.type != "cuda":
        return f"its kernels run on CUDA, not on {device.type}"
    return why_not_apex(role)


@cache
def why_not_apex(role: str) -> str:
    """Say why apex cannot be used, or return an empty string. Imports it, once per process.

    Args:
        role: ``norm`` or ``optimizer``; each has a compiled module of its own.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return f"NVIDIA apex is not installed (from source, {SOURCE}; not the package apex of PyPI)"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "normalization").is_dir() and (folder / "optimizers").is_dir() for folder in folders):
        return f"the installed package apex is not NVIDIA's but another one of that name; uninstall it, see {SOURCE}"
    try:
        importlib.import_module("apex")
        importlib.import_module(_COMPILED[role])
    except Exception as error:  # A build for another torch or CUDA fails in its loader, with whatever that raises.
        lines = str(error).strip().splitlines() or [""]
        return (
            f"apex cannot be used: {type(error).__name__}: {lines[0]} (it must be built for this torch, with its CUDA "
            "extensions)"
        )
    missing = _missing_norms() if role == "norm" else _missing_of_optimizer()
    return f"this apex is too old: it lacks {', '.join(missing)}" if missing else ""


def _missing_norms() -> list[str]:
    module = importlib.import_module(_NORM_MODULE)
    return [name for name in ("fused_rms_norm_affine", "fused_layer_norm_affine") if not hasattr(module, name)]


def _missing_of_optimizer() -> list[str]:
    """The capturable kernels are those that take the flag of a gradient that is not finite on the device."""
    parameters = inspect.signature(fused_adam_apex()).parameters
    return [f"FusedAdam({name}=)" for name in ("adam_w_mode", "capturable") if name not in parameters]


def rms_norm_apex(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """apex's RMSNorm. See :class:`~megatron_glue.backends.norm.RMSNormKernel`."""
    if x.numel() == 0:
        return rms_norm_torch(x, weight_D, epsilon)
    return _norms().fused_rms_norm_affine(x, weight_D, tuple(weight_D.shape), epsilon)


def layer_norm_apex(x: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float) -> Tensor:
    """apex's LayerNorm. See :class:`~megatron_glue.backends.norm.LayerNormKernel`."""
    if x.numel() == 0:
        return layer_norm_torch(x, weight_D, bias_D, epsilon)
    return _norms().fused_layer_norm_affine(x, weight_D, bias_D, tuple(weight_D.shape), epsilon)


def fused_adam_apex() -> Callable[..., torch.optim.Optimizer]:
    """Return apex's class ``FusedAdam``, for :class:`~megatron_glue.backends.fused_adam.LibraryAdamW`."""
    return importlib.import_module("apex.optimizers").FusedAdam


@cache
def _norms() -> Any:
    return importlib.import_module(_NORM_MODULE)
