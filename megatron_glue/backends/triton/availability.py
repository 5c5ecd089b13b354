"""Whether the Triton kernels can serve a device: asked by the registry, once per role at start.

A GPU alone is not enough: Triton compiles at the first launch and needs a C compiler for what launches the kernel, and
a driver that knows its output. So each role makes a trial run on the device, and what it says is the reason.

Importing this module does not import Triton.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def why_not_triton(role: str, device: torch.device) -> str:
    """Say why the kernels of a role cannot run on a device.

    Args:
        role: ``grouping``, ``permutation`` or ``router``.
        device: Where the model computes.

    Returns:
        The reason; empty if they can.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device.type == "cpu":
        if is_interpreted():
            return ""
        return "its kernels are compiled for a GPU; on a CPU they run in Triton's interpreter only (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return f"its kernels run on CUDA, not on {device.type}"
    if not torch.cuda.is_available():
        return "this machine or this build of torch has no CUDA device"
    return _run_trial(role, str(device))


def why_not_by_itself(device: torch.device) -> str:
    """Say why ``auto`` should leave the kernels alone even where they can run.

    Args:
        device: Where the model computes.

    Returns:
        The reason; empty on a GPU that they are compiled for.
    """
    if device.type != "cuda":
        return f"its kernels are for CUDA, not for {device.type}"
    if importlib.util.find_spec("triton") is not None and is_interpreted():
        return "Triton's interpreter is on (TRITON_INTERPRET), which is for tests"
    return ""


def is_interpreted() -> bool:
    """Whether Triton interprets the kernels instead of compiling them, as it was told when they were first imported."""
    from megatron_glue.backends.triton.grouping import IS_INTERPRETED

    return IS_INTERPRETED


@cache
def _run_trial(role: str, device: str) -> str:
    """Compile and run the kernels of a role on a few tokens."""
    try:
        from megatron_glue.backends.triton.trial import TRIALS

        return TRIALS[role](torch.device(device))
    except Exception as error:  # Whatever the compiler, the driver or the device raises is the reason.
        lines = str(error).strip().splitlines() or [""]
        return f"a trial run failed: {type(error).__name__}: {lines[0]}"
