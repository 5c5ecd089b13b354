"""Everything a block needs to know about the micro-batch it works on, passed explicitly.

Built by the training step (or by evaluation) once per micro-batch and handed down to every block. Nothing in the model
keeps it, so a block never depends on what ran before it.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_glue.types.packed_sequence import PackedSequence


@dataclass(frozen=True, eq=False)
class RouterRecord:
    """What one MoE layer reports about one micro-batch. All tensors are detached and stay on their device.

    Attributes:
        layer_index: Global index of the layer.
        counts_E: int64. (token, choice) pairs routed to each expert by this rank.
        aux_loss: fp32 scalar, before its coefficient. Like the z-loss this rank's share: the shares of all ranks that
            hold rows of the micro-batch (tensor and context parallelism) add up to its loss.
        z_loss: fp32 scalar, before its coefficient.
        num_dropped_pairs: int64 scalar. Pairs that no expert processed.
    """

    layer_index: int
    counts_E: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    num_dropped_pairs: Tensor


class SelectiveRecompute(Protocol):
    """Runs stretches of a layer's forward so that backward computes again what they keep (``--recompute-modules``)."""

    def run(
        self, name: str, stretch: Callable[..., Tensor], inputs: Sequence[Tensor], context: ForwardContext
    ) -> Tensor:
        """See ``ForwardContext.recompute``."""
        ...

    def rebuilds(self, name: str) -> bool:
        """See ``ForwardContext.rebuilds``."""
        ...

    def rebuild(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> AbstractContextManager[Tensor]:
        """See ``ForwardContext.rebuilt``."""
        ...


class SavedDecisions:
    """Decisions of one block's forward pass that its recompute must repeat, keyed by the layer that made them.

    The activation manager creates one per block call and drops it after that block's backward.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """Return what was saved under ``key``, or None."""
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Save ``value`` under ``key``; a key is written once."""
        assert key not in self._entries, f"decision {key!r} was already saved in this forward pass"
        self._entries[key] = value


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """One micro-batch, as blocks see it.

    Attributes:
        sequence: The packed layout, on the model's device; under context parallelism this rank's share of it.
        seed: The run's seed.
        step: Optimizer step, counted from 0.
        micro_batch: GLOBAL index of the micro-batch in the step, the same under every layout.
        aux_loss_scale: Factor on auxiliary losses, 1 / (micro-batches of the whole step), so that gradients are sums.
        decisions: Where a block saves and finds its routing decision; ``None`` when nothing will be recomputed.
        is_recompute: True when the block runs a second time, for backward.
        router_log: List that MoE layers append a :class:`RouterRecord` to, in forward only; ``None`` to log nothing.
        overflow_log: List that MoE layers append int64 scalars to, in forward only: pairs of theirs that found no room
            in an exchange of fixed size (``--moe-static-capacity-factor``). Whoever gives one must drop the step's
            results where the sum over ranks is not 0. ``None``: exchanges take every pair.
        residual_rows: Rows of the layout that the residual stream holds on this rank, under sequence parallelism;
            ``None`` for all.
        saved_tensor_regions: Returns the context manager of a named stretch of a layer's forward that uses some
            weights; tensors that autograd saves inside may be kept elsewhere. ``None``: autograd keeps them.
        selective: Recomputes chosen modules of the block; ``None``: none.
    """

    sequence: PackedSequence
    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    aux_loss_scale: float = 1.0
    decisions: SavedDecisions | None = None
    is_recompute: bool = False
    router_log: list[RouterRecord] | None = field(default=None, repr=False)
    overflow_log: list[Tensor] | None = field(default=None, repr=False)
    residual_rows: slice | None = None
    saved_tensor_regions: Callable[[str, Sequence[Tensor]], AbstractContextManager[Any]] | None = field(
        default=None, repr=False
    )

    selective: SelectiveRecompute | None = field(default=None, repr=False)

    def recompute(self, name: str, stretch: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run ``stretch(*inputs, context)``, whose intermediate results backward may compute again.

        Args:
            name: One of the names in ``config.sections.RECOMPUTE_MODULES``.
            stretch: A pure function of its inputs, of parameters and of the context that it is given.
            inputs: Floating-point tensors.

        Returns:
            Its result.
        """
        if self.selective is None:
            return stretch(*inputs, self)
        return self.selective.run(name, stretch, inputs, self)

    def rebuilds(self, name: str) -> bool:
        """Whether backward computes again what :meth:`rebuilt` gives under this name."""
        return self.selective is not None and self.selective.rebuilds(name)

    def rebuilt(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> AbstractContextManager[Tensor]:
        """Enter the stretch of a layer's forward that uses ``function(x)``, which backward may compute again.

        Args:
            name: One of the names in ``config.sections.RECOMPUTE_MODULES``.
            function: Deterministic; its result shares no memory with ``x``.
            x: Not written to before backward.

        Returns:
            The context, which gives the result. Autograd's saved tensors inside that are views of it may not be kept.
        """
        return nullcontext(function(x)) if self.selective is None else self.selective.rebuild(name, function, x)

    def region(self, name: str, *weights: Tensor) -> AbstractContextManager[Any]:
        """Enter a named stretch of a layer's forward, whose saved tensors may be offloaded (``--offload-modules``).

        Args:
            name: One of the names in ``config.sections.OFFLOAD_REGIONS``.
            weights: Used inside; they stay where they are.
        """
        return nullcontext() if self.saved_tensor_regions is None else self.saved_tensor_regions(name, weights)
