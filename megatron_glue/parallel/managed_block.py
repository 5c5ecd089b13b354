"""The shell around a block in which the activation manager runs it, and the names that do not depend on shells.

FSDP2 gathers a module's weights in hooks around that module's call. Recompute calls a block a second time, from within
backward, and breaks that call off: hooks on the block itself would fire there too, the one after it not always. So the
hooks sit one level further out, where a block is called once::

    shell.__call__   <- hooks: gather before forward, free after it; gather before backward, reduce after it
      run_block      <- the activation manager: a plain call, or one whose intermediate results are recomputed
        block        <- called twice under recompute; both runs see the weights that the shell gathered

A module inside the block may still be sharded on its own: gradients flow through the graph of the first run (see
``activation/recompute.py``), so its hooks reduce as without recompute; it may be gathered once more.

DDP needs no hooks around blocks; the shell is there all the same, so that the model is one model under every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_SHELL_ATTRIBUTE = "managed"
PARTS_ATTRIBUTE = "parts"
"""Where a module holds the several parts of the model that one pipeline rank has, as a list."""

_WRAPPER_SEGMENTS = frozenset({_SHELL_ATTRIBUTE, "_orig_mod"})


class ManagedBlock(nn.Module):
    """Calls a block through ``run_block``. This, not the block, is what an engine may shard.

    Args:
        block: Called as ``block(x_TD, context)``.
        run_block: ``ActivationManager.run_block`` or anything of its form: ``run_block(block, x_TD, context)``. It may
            call the block again in backward. It must not keep the block's parameters in between: under FSDP2 the
            gathered ones are freed after forward, and new ones stand in their place in backward.
    """

    def __init__(self, block: nn.Module, run_block: Callable[[nn.Module, Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.managed = block
        self._run_block = run_block

    def forward(self, x_TD: Tensor, context: Any) -> Tensor:
        """Run the block.

        Args:
            x_TD: [T, D] activations.
            context: Passed on as it is.

        Returns:
            [T, D] activations.
        """
        return self._run_block(self.managed, x_TD, context)


def model_parts(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that one rank holds: those of a pipeline rank, or the model itself."""
    parts = getattr(model, PARTS_ATTRIBUTE, None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [model]


def canonical_name(name: str) -> str:
    """Remove what wrappers add to a parameter's name.

    That is DDP's leading ``module``, the ``parts.N`` of a pipeline rank that holds several parts of the model, shells,
    and the segment of ``torch.compile``.
    """
    segments = name.split(".")
    while segments and segments[0] == "module":
        segments = segments[1:]
    if segments[0] == PARTS_ATTRIBUTE and len(segments) > 1 and segments[1].isdigit():
        segments = segments[2:]
    return ".".join(segment for segment in segments if segment not in _WRAPPER_SEGMENTS)
