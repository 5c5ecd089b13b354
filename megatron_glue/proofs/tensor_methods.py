"""Replaces, for the duration of a watch, the tensor methods and functions that no dispatch mode sees.

``tolist``, ``numpy``, DLPack and printing reach memory below the dispatcher; on a CPU tensor ``cpu()`` and ``to`` do
nothing at all. Factories are replaced to learn on which side a new tensor would stand: with ``device=`` a device
object, which this project passes on from tensors and sessions, it would be on the device; without one, or with the
word ``cpu``, on the host.

What this cannot tell on a CPU: ``to(torch.device("cpu"))`` is no read here, as the object is also the run's device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from megatron_glue.proofs.device_values import StorageSet

_READING_METHODS = {
    "tolist": "tolist",
    "numpy": "numpy",
    "__array__": "numpy",
    "__dlpack__": "DLPack",
    "__repr__": "print",
}
_FACTORIES = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    "zeros",
)
_FROM_HOST_DATA = ("tensor", "as_tensor", "asarray")
_MISSING = object()


class Watcher(Protocol):
    """What a replaced method reports to."""

    device: StorageSet
    host: StorageSet

    def put_on_device(self, value: Any) -> None:
        """Every tensor in a value stands on the device from now on."""
        ...

    def put_on_host(self, value: Any) -> None:
        """Every tensor in a value stands on the host from now on."""
        ...

    def is_watching(self) -> bool:
        """Whether this thread is watched, and not inside another replaced method."""
        ...

    def note(self, kind: str) -> None:
        """A read happens now."""
        ...

    def call_unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call without noticing what happens inside."""
        ...


class ReplacedMethods:
    """The replacements, in place while entered. Not for two watches at a time.

    Args:
        watcher: Gets the reads and the sides of new tensors.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._saved: list[tuple[Any, str, Any]] = []
        # Functions that took a device value out through NumPy. See _from_numpy.
        self._array_functions: set[CodeType] = set()

    def __enter__(self) -> ReplacedMethods:
        for name, kind in _READING_METHODS.items():
            self._replace(torch.Tensor, name, self._reading(kind))
        self._replace(torch.Tensor, "cpu", self._cpu)
        self._replace(torch.Tensor, "to", self._to)
        self._replace(torch.Tensor, "new_tensor", self._new_tensor)
        for name in _FACTORIES:
            self._replace(torch, name, self._factory)
        for name in _FROM_HOST_DATA:
            self._replace(torch, name, self._from_host_data)
        for name in ("from_numpy", "frombuffer"):
            self._replace(torch, name, self._from_numpy)
        for module in (torch, dlpack):
            self._replace(module, "to_dlpack", self._reading("DLPack"))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, previous in reversed(self._saved):
            if previous is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)
        self._saved.clear()

    def _replace(self, owner: Any, name: str, behaviour: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not self._watcher.is_watching():
                return original(*args, **kwargs)
            return behaviour(original, *args, **kwargs)

        self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, replaced)

    def _reading(self, kind: str) -> Callable[..., Any]:
        def behaviour(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # First the call: NumPy tries __array__ with an argument that torch refuses, and once more without it.
            result = self._watcher.call_unwatched(original, tensor, *args, **kwargs)
            if self._watcher.device.has_any(tensor):
                self._watcher.note(kind)
                if kind == "numpy":
                    # Two frames further out: behind this function and the replacement stands the caller.
                    self._array_functions.add(sys._getframe(2).f_code)
            return result

        return behaviour

    def _cpu(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self._watcher.call_unwatched(original, tensor, *args, **kwargs)
        return self._to_host(tensor, result, "cpu") if self._watcher.device.has_any(tensor) else result

    def _to(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        is_waiting = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        is_on_device = self._watcher.device.has_any(tensor)
        if isinstance(target, str) and target.startswith("cpu") and is_on_device:
            result = self._watcher.call_unwatched(original, tensor, *args, **kwargs)
            return self._to_host(tensor, result, "to" if is_waiting else "")
        result = original(tensor, *args, **kwargs)
        if isinstance(target, torch.device) and self._watcher.host.has_any(tensor):
            if is_waiting:
                self._watcher.note("upload")
            result = self._watcher.call_unwatched(_copied, tensor, result)
            self._watcher.put_on_device(result)
        return result

    def _to_host(self, tensor: Tensor, result: Tensor, kind: str) -> Tensor:
        """A copy on the host, as it would be one on a GPU, so that later reads of it are none of a device value."""
        if kind:
            self._watcher.note(kind)
        result = self._watcher.call_unwatched(_copied, tensor, result)
        self._watcher.put_on_host(result)
        return result

    def _new_tensor(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self._watcher.call_unwatched(original, tensor, *args, **kwargs)
        if self._watcher.device.has_any(tensor):
            self._watcher.note("upload")
            self._watcher.put_on_device(result)
        return result

    def _factory(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        (self._watcher.put_on_device if _is_device(kwargs) else self._watcher.put_on_host)(result)
        return result

    def _from_host_data(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        data = args[0] if args else kwargs.get("data")
        result = self._watcher.call_unwatched(original, *args, **kwargs)
        if isinstance(data, Tensor):
            if self._watcher.device.has_any(data):
                self._watcher.put_on_device(result)
            return result
        if self._watcher.device.has_any(data):
            # A list of scalar tensors: each of them is read.
            self._watcher.note("item")
        if _is_device(kwargs):
            self._watcher.note("upload")
            self._watcher.put_on_device(result)
        else:
            self._watcher.put_on_host(result)
        return result

    def _from_numpy(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A function that took a device value out through NumPy is a CPU's kernel: it brings device values back."""
        result = original(*args, **kwargs)
        is_kernel = sys._getframe(2).f_code in self._array_functions
        (self._watcher.put_on_device if is_kernel else self._watcher.put_on_host)(result)
        return result


def _is_device(kwargs: dict[str, Any]) -> bool:
    """Whether a factory was told the run's device."""
    device = kwargs.get("device")
    return device is not None and not isinstance(device, str)


def _copied(source: Tensor, result: Tensor) -> Tensor:
    """The result in memory of its own."""
    is_same = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return result.clone() if is_same else result
