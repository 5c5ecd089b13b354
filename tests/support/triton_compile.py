"""Compiles every Triton kernel for a GPU that need not be there, as its own launches ask for; prints their names.

``python -m tests.support.triton_compile CAPABILITY``, e.g. 90. The interpreter accepts what the compiler does not, so a
machine without a GPU should try both. Must run in a process of its own, with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_glue.backends.triton.trial import TRIALS

POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32"}


def type_of(value: Any) -> str:
    """A value's type in Triton's notation."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **kwargs: Any) -> None:
    """Take the place of a launch."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    constants = {param.name: values[param.name] for param in kernel.params if param.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in kernel.arg_names}
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=indexed)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    assert compiled.asm["cubin"], "compiled to the end"
    print(kernel.fn.__name__)


def main() -> None:
    """Let each role's trial run launch its kernels; what they would have computed is not looked at."""
    triton.JITFunction.run = compile_launch  # pyright: ignore[reportAttributeAccessIssue]
    for trial in TRIALS.values():
        trial(torch.device("cpu"))


if __name__ == "__main__":
    main()
