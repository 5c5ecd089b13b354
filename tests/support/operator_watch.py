"""Watches which torch operators run, to prove on a CPU that a path would never make a GPU's host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result's size or value has to reach the host.
SYNCHRONISING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "bincount",
        "histc",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    )
)


class OperatorWatch(TorchDispatchMode):
    """Records the names of all operators that run inside it, backward included.

    Attributes:
        calls: Operator names in order, e.g. ``aten::mm``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        self.calls.append(name)
        if name == "aten::index" and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.calls.append("aten::nonzero")
        if name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.calls.append("aten::_local_scalar_dense")
        return func(*args, **(kwargs or {}))

    @property
    def synchronising(self) -> list[str]:
        """The recorded calls that would wait for the device."""
        return [name for name in self.calls if name in SYNCHRONISING]
