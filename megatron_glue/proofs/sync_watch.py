"""Finds, on a CPU, every place of a step where a GPU run's host would read a device value.

A dispatch mode follows which tensors a GPU run would hold on the device: those it is given (parameters, batches), and
whatever operators compute from them, in forward, in backward (on a CPU autograd runs in the calling thread, under the
same modes), in recompute and inside custom Functions. An operator of ``sync_operators.py`` with such an input is a
read; so is a method of ``tensor_methods.py``. ``HostReader`` is not asked: announced and unannounced reads are found
alike.

Not seen: other threads than the one that entered the watch, kernels below the dispatcher, and what reaches memory past
torch (``data_ptr``, storages). On a GPU, ``cuda_sync_watch.py`` takes its place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatron_glue.proofs.device_values import StorageSet, tensors_in
from megatron_glue.proofs.host_read import HostRead, LayerMap, locate
from megatron_glue.proofs.sync_operators import host_wait_of
from megatron_glue.proofs.tensor_methods import ReplacedMethods


class SyncWatch:
    """Counts reads between entering and leaving.

    Args:
        model: Its parameters and buffers are device values; so are the inputs of its blocks.
        stations: Functions that make up a step; see :func:`~megatron_glue.proofs.host_read.locate`.

    Attributes:
        reads: How often each read happened.
        device: Tensors that a GPU run would hold on the device.
        host: Tensors that it would hold on the host, as far as that is known.
    """

    def __init__(self, model: nn.Module, stations: frozenset[CodeType] = frozenset()) -> None:
        self.reads: Counter[HostRead] = Counter()
        self.device = StorageSet()
        self.host = StorageSet()
        self._model = model
        self._stations = stations
        self._layers = LayerMap(model, self.put_on_device)
        self._methods = ReplacedMethods(self)
        self._mode = _DispatchMode(self)
        self._thread = 0
        self._depth = 0

    def __enter__(self) -> SyncWatch:
        self._thread = threading.get_ident()
        self.put_on_device([*self._model.parameters(), *self._model.buffers()])
        # Tensors that modules hold as plain attributes.
        self.put_on_device([list(vars(module).values()) for module in self._model.modules()])
        self._layers.__enter__()
        self._methods.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self._methods.__exit__(*exception)
        self._layers.__exit__(*exception)

    def put_on_device(self, value: Any) -> None:
        """Every tensor in a value stands on the device from now on; the caller says it of batches and moments."""
        self.host.discard(value)
        self.device.add(value)

    def put_on_host(self, value: Any) -> None:
        """Every tensor in a value stands on the host from now on."""
        self.device.discard(value)
        self.host.add(value)

    def is_watching(self) -> bool:
        """Whether this thread is watched, and not inside a replaced method."""
        return self._depth == 0 and threading.get_ident() == self._thread

    def note(self, kind: str) -> None:
        """Count a read that happens now."""
        self.reads[locate(kind, self._layers, self._stations)] += 1

    def call_unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function without counting reads inside; device values are followed all the same."""
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1


class _DispatchMode(TorchDispatchMode):
    """Sees every operator of the thread."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(value) for value in _flat(args)):
            # A DTensor unpacks itself first; then its local operators come here.
            return NotImplemented
        watch, kwargs = self._watch, kwargs or {}
        device, host = watch.device, watch.host
        if watch.is_watching() and (kind := host_wait_of(func, args, kwargs, device.has_any, host.has_any)):
            watch.note(kind)
        result = func(*args, **kwargs)
        if device.has_any((args, kwargs)) and not _is_started_copy(func, args, kwargs):
            for tensor in tensors_in([result, _written(func, args, kwargs)]):
                # A blocking copy leaves its value on the host.
                if not host.has_any(tensor):
                    device.add(tensor)
        return result


def _is_started_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes to a buffer on either side that the host does not wait for; then nothing is known of it."""
    return func.name().startswith("aten::copy_") and bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that an operator writes to. Collectives write to what their schema does not mark."""
    is_collective = func.name().startswith("c10d::")
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if is_collective or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """Arguments, those in lists of tensors too."""
    return [item for value in args for item in (value if isinstance(value, list | tuple) else (value,))]
