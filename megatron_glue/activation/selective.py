"""Recompute of chosen modules of a block (``--recompute-granularity selective``); everything else is kept.

Two ways, by what a module costs in memory:

- ``core_attn``, ``mlp``, ``moe``: what lies INSIDE is large. The stretch of forward runs again in backward from its
  inputs, as a whole block does (``recompute.py``), under the same routing decisions and random numbers.
- ``layernorm``, ``moe_act``: the RESULT is large, and kept by whatever uses it. Those uses keep a note of how they look
  at it instead, and the first one that backward asks for computes it again from the module's input, which is kept
  anyway. (Megatron-LM calls this output-discarding checkpointing.)

The chosen modules may contain each other; the outermost counts. Attention metadata comes from the micro-batch's cache
in both runs. It moves nothing off the device; ``module_offload.py`` does that with other modules of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_glue.activation.recompute import InputInMemory, KeptInput, current_autocast, run_recomputed
from megatron_glue.types import ForwardContext


class SelectiveRecompute:
    """The choice of a run, for one block call. Layers reach it through ``context.recompute`` and ``context.rebuilt``.

    Args:
        modules: Names of modules.
        preserve_rng: Restore torch's global generators when a stretch runs again.
    """

    def __init__(self, modules: frozenset[str], preserve_rng: bool) -> None:
        self._modules = modules
        self._preserve_rng = preserve_rng
        self._open: list[_Rebuilt] = []

    def run(
        self, name: str, stretch: Callable[..., Tensor], inputs: Sequence[Tensor], context: ForwardContext
    ) -> Tensor:
        """Run ``stretch(*inputs, context)``, and once more in backward if the module is chosen.

        Args:
            name: The module.
            stretch: A pure function of its inputs, parameters and the context.
            inputs: Floating-point tensors of any shapes.
            context: The micro-batch inside the block.
        """
        if name not in self._modules:
            return stretch(*inputs, context)
        inside = replace(context, selective=None, saved_tensor_regions=None)
        kept = [self._keep(x) for x in inputs]
        return run_recomputed(stretch, tuple(inputs), inside, kept, self._preserve_rng)

    def rebuilds(self, name: str) -> bool:
        """Whether the module is chosen."""
        return name in self._modules

    @contextmanager
    def rebuild(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
        """Yield ``function(x)``; if the module is chosen, what is saved inside of it is computed again in backward.

        Args:
            name: The module.
            function: Deterministic; its result shares no memory with ``x``.
            x: Kept for backward; it must not be written to before.
        """
        y = function(x)
        if name not in self._modules or not y.requires_grad:
            yield y
            return
        rebuilt = _Rebuilt(function, x, y)
        self._open.append(rebuilt)
        try:
            with saved_tensors_hooks(rebuilt.pack, rebuilt.unpack):
                yield y
        finally:
            self._open.remove(rebuilt)

    def _keep(self, x: Tensor) -> KeptInput:
        """Keep an input of a stretch, or a note of it if it is the result of a module that is computed again."""
        for rebuilt in reversed(self._open):
            packed = rebuilt.pack(x)
            if isinstance(packed, _View):
                return _RebuiltInput(rebuilt, packed)
        return InputInMemory(x)


@dataclass(frozen=True)
class _View:
    """How a saved tensor looks at a result: in elements of its dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Rebuilt:
    """A result that is computed again as soon as the first of its uses asks for it, and freed after the last."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self._function: Callable[[Tensor], Tensor] | None = function
        self._input = InputInMemory(x)
        self._autocast = current_autocast(x.device.type)
        # Compared only while the caller of ``rebuild`` holds y, so the number cannot be another storage's.
        self._storage = y.untyped_storage()._cdata
        self._dtype = y.dtype
        self._num_uses = 0
        self._result: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Replace a view of the result by a note."""
        is_result = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dtype == self._dtype
        if not is_result or tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._num_uses += 1
        return _View(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Turn a note into the tensor, once per use."""
        if isinstance(packed, Tensor):
            return packed
        if self._function is None:
            raise RuntimeError(
                "the result of a recomputed module was asked for after its last use: backward ran through the block a "
                "second time (retain_graph)"
            )
        if self._result is None:
            with torch.no_grad(), self._autocast():
                self._result = self._function(self._input.fetch())
        view = self._result.as_strided(packed.shape, packed.stride, packed.offset)
        self.drop()
        return view

    def drop(self) -> None:
        """One use is over."""
        self._num_uses -= 1
        if self._num_uses == 0:
            self._function = self._result = None
            self._input.release()


class _RebuiltInput:
    """An input of a stretch that is the result of a module which is computed again."""

    def __init__(self, rebuilt: _Rebuilt, view: _View) -> None:
        self._rebuilt = rebuilt
        self._view: _View | None = view

    def fetch(self) -> Tensor:
        """Compute it again, or find it."""
        assert self._view is not None
        view, self._view = self._view, None
        return self._rebuilt.unpack(view)

    def release(self) -> None:
        """Let go of it if it was never asked for."""
        if self._view is not None:
            self._view = None
            self._rebuilt.drop()
