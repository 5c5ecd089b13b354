"""Finds, on CUDA, every place of a step where the host waits for the device: torch's own debug mode says so.

``torch.cuda.set_sync_debug_mode("warn")`` warns at each blocking copy and stream synchronisation, whichever operator or
library asked for it. Each warning becomes a read at the Python line that led to it. In backward that is the line
inside a custom Function, or for torch's own operators the line that called backward: torch collects what their threads
warn of until backward ends.

Not seen, as torch does not warn there: events, ``torch.cuda.synchronize``, collectives, and asynchronous copies, which
is how this project reads late. Threads that Python started, such as the one that prefetches batches, hold nobody up
and are left out.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from types import CodeType
from typing import Any

import torch
from torch import nn

from megatron_glue.proofs.host_read import HostRead, LayerMap, locate

KIND = "synchronisation"
_MESSAGE = "called a synchronizing CUDA operation"


class CudaSyncWatch:
    """Counts reads between entering and leaving, as :class:`~megatron_glue.proofs.sync_watch.SyncWatch` does on a CPU.

    Args:
        model: The model, for names of layers.
        stations: Functions that make up a step; see :func:`~megatron_glue.proofs.host_read.locate`.

    Attributes:
        reads: How often each read happened.
    """

    def __init__(self, model: nn.Module, stations: frozenset[CodeType] = frozenset()) -> None:
        self.reads: Counter[HostRead] = Counter()
        self._stations = stations
        self._layers = LayerMap(model)
        self._filters = warnings.catch_warnings()
        self._show_other: Any = None
        self._previous_mode = 0
        self._thread = 0

    def __enter__(self) -> CudaSyncWatch:
        self._thread = threading.get_ident()
        self._layers.__enter__()
        self._filters.__enter__()
        # By default Python shows a warning once per line.
        warnings.filterwarnings("always", message=_MESSAGE)
        self._show_other, warnings.showwarning = warnings.showwarning, self._show
        self._previous_mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.cuda.set_sync_debug_mode(self._previous_mode)
        self._filters.__exit__(*exception)
        self._layers.__exit__(*exception)

    def put_on_device(self, value: Any) -> None:
        """Nothing: tensors say themselves where they are."""

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if _MESSAGE not in str(message):
            self._show_other(message, category, *rest, **named)
        elif threading.get_ident() == self._thread or isinstance(threading.current_thread(), threading._DummyThread):
            # Autograd's threads are not Python's, which stands a dummy in for them.
            self.reads[locate(KIND, self._layers, self._stations)] += 1
