"""Counts the memory that a piece of code leaves alive: what autograd keeps for backward, most of all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveStorages(TorchDispatchMode):
    """Follows every storage that an operator makes while the mode is on; those it is given do not count."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The weak references keep the keys from being taken by other storages.
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._sizes:
                self._given[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._given:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes that are still alive."""
        return sum(num_bytes for reference, num_bytes in self._sizes.values() if not reference.expired())


def _storages(tree: Any) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
