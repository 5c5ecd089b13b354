"""Run a block now, forget what it computed, and compute it again when backward needs it.

The block's autograd graph is built in forward as always; only the tensors that the graph would keep are replaced by
their numbers. The first number that backward turns back into a tensor makes the block run a second time, from its kept
input, under the same decisions and random numbers, and the tensors it saves this time are handed out in order. The
second run stops at the last tensor that is needed, so a block's last matrix product is not repeated.

Gradients flow through the one graph of forward. So they are accumulated once, by autograd itself, whatever shares a
parameter (no nested ``autograd.backward``), and the hooks of DDP and FSDP2, also of a module inside the block that is
sharded on its own, fire as in a run without recompute. (A custom Function that runs the block and differentiates it
inside its backward sees a sharded parameter of such a module in forward and its gathered copy in recompute, and loses
the gradient.) The method is that of ``torch.utils.checkpoint`` with ``use_reentrant=False``; what differs is that the
input is fetched from somewhere and its memory given back at a known point, the end of the block's backward.

A block must save the same tensors in both runs: what it takes from ``context.decisions`` may replace values, not
operators that autograd sees. It must keep tensors for backward through ``save_for_backward`` and read
``ctx.saved_tensors`` once. It must not write to its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_glue.types import ForwardContext, SavedDecisions

Block = Callable[..., Tensor]
"""``block(x, context)``, or a stretch of one with several inputs, ``stretch(x, y, ..., context)``."""


class KeptInput(Protocol):
    """The input of a block between its forward and the end of its backward."""

    def fetch(self) -> Tensor:
        """Return the input. Called at most once."""
        ...

    def release(self) -> None:
        """Everything that reads the input has been issued. Called once."""
        ...


class InputInMemory:
    """The input stays where it is.

    Args:
        x: It must not be written to before backward.
    """

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x.detach()
        self._version = x._version

    def fetch(self) -> Tensor:
        """Return the input.

        Raises:
            RuntimeError: It was written to since forward.
        """
        assert self._x is not None
        if self._x._version != self._version:
            raise RuntimeError("the input of a recomputed block was modified in place between forward and backward")
        return self._x

    def release(self) -> None:
        """Let go of the input."""
        self._x = None


def run_recomputed(
    block: Block, inputs: Sequence[Tensor], context: ForwardContext, kept: Sequence[KeptInput], preserve_rng: bool
) -> Tensor:
    """Run a block so that backward computes its intermediate results again.

    Args:
        block: Called as ``block(*inputs, context)``, now and in backward.
        inputs: Floating-point tensors of any shapes, at least one.
        context: Must not carry decisions.
        kept: Provide the inputs in backward, one each.
        preserve_rng: Restore torch's global generators for the second run.

    Returns:
        The block's output.
    """
    assert context.decisions is None, "a block inside a recomputed block belongs to the outer one"
    call = _BlockCall(block, replace(context, decisions=SavedDecisions()), kept, inputs[0].device, preserve_rng)
    entered = enter_block(call, *inputs)
    with saved_tensors_hooks(call.forget, call.recall):
        y = block(*entered, call.context)
    if not y.requires_grad:
        call.finish()
    return y


class EndsWithBackward(Protocol):
    """Something that one block call keeps until its backward has ended."""

    def finish(self) -> None:
        """End of the block's backward. May be called again."""
        ...


def enter_block(call: EndsWithBackward, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs for a block whose backward ``call`` is told the end of."""
    # Without an input that needs a gradient, nothing would tell when the block's backward ends.
    anchor = None if any(x.requires_grad for x in inputs) else torch.empty(0, requires_grad=True)
    return _BlockInputs.apply(call, anchor, *inputs)


class _BlockInputs(torch.autograd.Function):
    """The identity. Its backward runs last in the block's backward: autograd prefers nodes that were made later."""

    @staticmethod
    def forward(ctx: Any, call: EndsWithBackward, anchor: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.call.finish()
        needed = ctx.needs_input_grad[2:]
        return None, None, *(grad if is_needed else None for grad, is_needed in zip(grad_outputs, needed, strict=True))


class _EverythingRecomputedError(Exception):
    """Leaves the block's second run once nothing more of it is needed."""


class _BlockCall:
    """One block call between its forward and the end of its backward."""

    def __init__(
        self, block: Block, context: ForwardContext, kept: Sequence[KeptInput], device: torch.device, preserve_rng: bool
    ) -> None:
        self.context = context
        self._block = block
        self._kept = kept
        self._autocast = current_autocast(device.type)
        self._rng_state = _read_rng_state(device) if preserve_rng else None
        self._device = device
        self._forgotten: list[tuple[torch.Size, torch.dtype]] = []
        self._recomputed: dict[int, Tensor] | None = None
        self._is_finished = False

    def forget(self, tensor: Tensor) -> int:
        """Replace a tensor that autograd saves by its number."""
        self._forgotten.append((tensor.shape, tensor.dtype))
        return len(self._forgotten) - 1

    def recall(self, number: int) -> Tensor:
        """Return the tensor of a number, once; the first call runs the block again."""
        if self._recomputed is None and not self._is_finished:
            self._recomputed = self._run_again()
        if self._recomputed is None or number not in self._recomputed:
            raise RuntimeError(
                "a tensor of a recomputed block was asked for twice: either backward ran through the block a second "
                "time (retain_graph), or a custom Function in it reads ctx.saved_tensors more than once"
            )
        return self._recomputed.pop(number)

    def finish(self) -> None:
        """End of the block's backward: nothing issued from now on reads its input."""
        if not self._is_finished:
            self._is_finished = True
            self._recomputed = None
            for kept in self._kept:
                kept.release()

    def _run_again(self) -> dict[int, Tensor]:
        saved: dict[int, Tensor] = {}

        def capture(tensor: Tensor) -> None:
            number = len(saved)
            if number < len(self._forgotten):
                self._check_same(number, tensor)
            saved[number] = tensor.detach()  # without its graph, which would keep the whole second run alive
            if len(saved) == len(self._forgotten):
                raise _EverythingRecomputedError

        # Logs were written by the first run; a second entry would count everything twice.
        context = replace(self.context, is_recompute=True, router_log=None)
        inputs = [kept.fetch().detach().requires_grad_() for kept in self._kept]
        rng = nullcontext() if self._rng_state is None else _restored_rng(self._device, self._rng_state)
        with rng, self._autocast(), torch.enable_grad(), saved_tensors_hooks(capture, _never_unpacked):
            try:
                self._block(*inputs, context)
            except _EverythingRecomputedError:
                return saved
        raise RuntimeError(
            f"a recomputed block saved {len(saved)} tensors for backward, {len(self._forgotten)} in forward: "
            "it must run the same operators both times"
        )

    def _check_same(self, number: int, tensor: Tensor) -> None:
        shape, dtype = self._forgotten[number]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise RuntimeError(
                f"tensor {number} that a recomputed block saved for backward was {dtype} {tuple(shape)} in forward and "
                f"is {tensor.dtype} {tuple(tensor.shape)} now: the block must make the same decisions both times"
            )


def _never_unpacked(_: None) -> Tensor:
    raise AssertionError("the graph of the second run is not differentiated")


def current_autocast(device_type: str) -> Callable[[], torch.autocast]:
    """Return what enters the autocast state of this moment again."""
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    cache_enabled = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _read_rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _write_rng_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def _restored_rng(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Draw from ``state`` inside, and leave the generators as they were."""
    present = _read_rng_state(device)
    _write_rng_state(device, state)
    try:
        yield
    finally:
        _write_rng_state(device, present)
