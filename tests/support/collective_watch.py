"""Records when collectives start and end among the products of a pass, to prove what runs beside what."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_glue.parallel import collectives

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise"})


class _RecordedWork:
    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self._work, self._name, self._events = work, name, events
        self._is_awaited = False

    def wait(self) -> None:
        # Several streams of a GPU may wait for one collective; on a CPU the first to wait has waited for all.
        if not self._is_awaited:
            self._events.append(f"{self._name} done")
        self._is_awaited = True
        self._work.wait()


class CollectiveWatch(TorchDispatchMode):
    """Records, in order, collectives of layers and matrix products.

    Attributes:
        events: ``gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` where one starts without waiting (with
            ``, waits`` where it waits at once), the same word with ``done`` where its result is first awaited,
            and ``product``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._patches = [
            patch.object(collectives, "_all_gather_single", self._recorded("gather", collectives._all_gather_single)),
            patch.object(
                collectives,
                "_reduce_scatter_single",
                self._recorded("reduce_scatter", collectives._reduce_scatter_single),
            ),
            patch.object(dist, "all_reduce", self._recorded("all_reduce", dist.all_reduce)),
            patch.object(dist, "all_to_all_single", self._recorded("all_to_all", dist.all_to_all_single)),
        ]

    def count(self, name: str) -> int:
        """How many collectives of one kind started."""
        return self.events.count(name) + self.events.count(f"{name}, waits")

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            self.events.append(name if async_op else f"{name}, waits")
            work = function(*args, async_op=async_op, **kwargs)
            return _RecordedWork(work, name, self.events) if async_op else work

        return call

    def __enter__(self) -> CollectiveWatch:
        for each in self._patches:
            each.start()
        super().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        for each in self._patches:
            each.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in _PRODUCTS:
            self.events.append("product")
        return func(*args, **(kwargs or {}))
