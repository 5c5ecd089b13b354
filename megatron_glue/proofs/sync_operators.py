"""The operators that make the host of a CUDA device wait, told by name and arguments.

A table for ``sync_watch.py``: whether an operator of a CPU run would read its inputs on the host if these lay on a
CUDA device. Sources: ``aten/src/ATen/native/cuda`` of torch 2.11 to 2.13. What waits only under conditions is decided
by them: a boolean ``index_put`` of one host number is a ``masked_fill`` and does not wait, ``repeat_interleave`` with
an ``output_size`` does not, ``histc`` with bounds does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IsIn = Callable[[Any], bool]

# The size or the value of the result has to reach the host.
_ALWAYS = {
    "_local_scalar_dense": "item",
    "allclose": "allclose",
    "bincount": "bincount",
    "equal": "equal",
    "is_nonzero": "item",
    "item": "item",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "nonzero_numpy": "nonzero",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_consecutive": "unique",
    "unique_dim": "unique",
    "unique_dim_consecutive": "unique",
}
_INDEX = frozenset({"index", "_unsafe_index"})
_INDEX_PUT = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})


def host_wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: IsIn, on_host: IsIn) -> str:
    """Say for what the host would wait in an operator.

    Args:
        func: The overload, as ``__torch_dispatch__`` gets it.
        args: Its positional arguments.
        kwargs: Its named ones.
        on_device: Whether any tensor in a value would be on the device.
        on_host: Whether any tensor in a value is known to be on the host.

    Returns:
        The kind of read, e.g. ``item``; an empty text if it would not wait.
    """
    namespace, _, name = func.name().split(".")[0].partition("::")
    if namespace != "aten":
        return ""
    if name == "copy_":
        return _copy(args, kwargs, on_device, on_host)
    if not on_device((args, kwargs)):
        return ""
    if name in _ALWAYS:
        return _ALWAYS[name]
    if name in _INDEX and any(map(_is_mask, _argument(1, "indices", args, kwargs))):
        return "boolean index"
    if name in _INDEX_PUT and any(map(_is_mask, _argument(1, "indices", args, kwargs))):
        return "" if _is_masked_fill(args, kwargs, on_device) else "boolean index_put"
    if name == "repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None:
        return "repeat_interleave"
    if name == "histc" and _bounds(args, kwargs) == (0, 0):
        return "histc"
    return ""


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], on_device: IsIn, on_host: IsIn) -> str:
    """A blocking copy between the two sides. With ``non_blocking`` the caller waits for an event of its own choice."""
    destination, source = args[0], args[1]
    if _argument(2, "non_blocking", args, kwargs) or destination.numel() == 0:
        return ""
    if on_device(source) and on_host(destination):
        return "copy to the host"
    if on_device(destination) and on_host(source):
        return "upload"
    return ""


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any], on_device: IsIn) -> bool:
    """Whether torch turns the call into ``masked_fill`` with a number that the host has."""
    given = [index for index in _argument(1, "indices", args, kwargs) if index is not None]
    value = _argument(2, "values", args, kwargs)
    is_number = value.numel() == 1 and not on_device(value)
    return is_number and len(given) == 1 and not _argument(3, "accumulate", args, kwargs)


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """``histc`` finds the bounds in the tensor when both are 0."""
    return _argument(2, "min", args, kwargs) or 0, _argument(3, "max", args, kwargs) or 0


def _argument(index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument that may be given by place or by name, or not at all."""
    return args[index] if len(args) > index else kwargs.get(name)
