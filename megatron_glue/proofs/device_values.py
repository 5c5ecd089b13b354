"""Knows which tensors of a CPU run a GPU run would hold on the device, by their storages.

The watch of a step marks parameters, buffers and batches, and then what operators compute from them. It decides
nothing about reads; see ``sync_watch.py``. A storage is held by a weak reference, which keeps the storage's identity
but not its memory: memory that is freed and taken again belongs to a new storage and bears no mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FIRST_SWEEP = 4096


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses; those inside a wrapper such as a DTensor for itself.

    Args:
        value: Anything; what is no container of tensors yields nothing.
    """
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from tensors_in(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


class StorageSet:
    """A set of tensors in which all views of one storage are one element, and dead storages are forgotten."""

    def __init__(self) -> None:
        self._references: set[StorageWeakRef] = set()
        self._next_sweep = _FIRST_SWEEP

    def add(self, value: Any) -> None:
        """Add every tensor in a value (see :func:`tensors_in`)."""
        for tensor in tensors_in(value):
            if (reference := _reference(tensor)) is not None:
                self._references.add(reference)
        if len(self._references) > self._next_sweep:
            self._references = {reference for reference in self._references if not reference.expired()}
            self._next_sweep = max(_FIRST_SWEEP, 2 * len(self._references))

    def discard(self, value: Any) -> None:
        """Remove every tensor in a value."""
        for tensor in tensors_in(value):
            if (reference := _reference(tensor)) is not None:
                self._references.discard(reference)

    def has_any(self, value: Any) -> bool:
        """Whether one of the tensors in a value is here."""
        return any(_reference(tensor) in self._references for tensor in tensors_in(value))

    def __len__(self) -> int:
        return len(self._references)


def _reference(tensor: Tensor) -> StorageWeakRef | None:
    """The storage of a tensor; ``None`` for layouts that have none, sparse ones."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except RuntimeError:
        return None
