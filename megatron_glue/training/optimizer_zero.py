"""The optimizer of a run under DeepSpeed's ZeRO stages 1 to 3: this rank updates its part, DeepSpeed does the rest.

It has the interface of :class:`GuardedAdamW`, whose torch optimizer it goes on with. DeepSpeed clips, skips an update
whose gradient norm is not finite, and brings the new weights to all ranks. For a checkpoint every moment is the range
that this rank holds of it, under its parameter's global name: no rank gathers what others hold, any layout reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_glue.parallel.engines.deepspeed_storage import Partition, ZeroStorage
from megatron_glue.parallel.flat_range import FlatRange
from megatron_glue.parallel.gather import global_name


class ZeroAdamW:
    """AdamW over this rank's parts.

    Args:
        torch_optimizer: AdamW, of which DeepSpeed has replaced the parameters by this rank's flat parts.
        make_state: Creates the moments of one of these parts.
        engine: DeepSpeed's engine.
        storage: Where it keeps things.
    """

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        make_state: Callable[[Tensor], dict[str, Tensor]],
        engine: Any,
        storage: ZeroStorage,
    ) -> None:
        self.torch_optimizer = torch_optimizer
        self.implementation = "fused" if torch_optimizer.defaults["fused"] else "foreach"
        self._make_state = make_state
        self._engine = engine
        self._storage = storage
        self._num_skipped_before = 0
        names = {param: global_name(name, param) for name, param in engine.module.named_parameters()}
        self._parts: dict[str, Partition] = {names[part.param]: part for part in storage.partitions()}
        self._steps: dict[str, Tensor] = {}

    def step(self, learning_rate: float, grad_norm: Tensor, num_overflowing: Tensor | None = None) -> None:
        """Update all parameters, or none if the gradient norm is not finite.

        Args:
            learning_rate: Value of the schedule; each group multiplies it by its ``lr_multiplier``.
            grad_norm: Unused: DeepSpeed looks at its own, which ``engine.clip_gradients`` has shown to us.
            num_overflowing: ``None``: the configuration refuses exchanges of fixed size with DeepSpeed.
        """
        assert num_overflowing is None, "DeepSpeed skips by its own norm only"
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_multiplier"]
        self._engine.step()
        self._storage.refresh_unrounded()

    def zero_grad(self) -> None:
        """Drop all gradients; a step has done so already."""
        self._storage.drop_gradients()

    @property
    def num_overflowing(self) -> int:
        """0: see :meth:`step`."""
        return 0

    @property
    def num_known_skips(self) -> int:
        """Updates skipped so far; DeepSpeed's host knows of each at once."""
        return self.num_skipped_updates

    @property
    def num_skipped_updates(self) -> int:
        """Updates skipped so far."""
        return self._num_skipped_before + self._engine.skipped_steps

    @num_skipped_updates.setter
    def num_skipped_updates(self, value: int) -> None:
        self._num_skipped_before = value - self._engine.skipped_steps

    def named_state(self) -> Iterable[tuple[str, Parameter, dict[str, Tensor | FlatRange]]]:
        """Yield global name, parameter and its state: ``step``, ``exp_avg`` and ``exp_avg_sq``.

        Moments are this rank's parts. One counter serves all parameters of a part; each gets a copy of its own here,
        and :meth:`finish_load` brings what was read into it back.
        """
        for name, part in self._parts.items():
            state = self._state_of(part)
            self._steps[name] = state["step"].clone()
            moments = {key: FlatRange(part.of(state[key]), part.start) for key in ("exp_avg", "exp_avg_sq")}
            yield name, part.param, {"step": self._steps[name], **moments}

    def finish_load(self) -> None:
        """Take the counters over that were read into the tensors of :meth:`named_state`.

        Raises:
            ValueError: If parameters that share a counter were saved with different ones.
        """
        counters: dict[int, int] = {}
        for name, step in self._steps.items():
            part = self._parts[name]
            first = counters.setdefault(id(part.flat), int(step))
            if int(step) != first:
                raise ValueError(f"{name} was updated {int(step)} times, others of its group {first} times")
            self._state_of(part)["step"].copy_(step)
        self._steps = {}

    def _state_of(self, part: Partition) -> dict[str, Tensor]:
        """The moments of a flat part, made before AdamW's first step if somebody asks earlier."""
        state = self.torch_optimizer.state
        if not state.get(part.flat):
            state[part.flat] = self._make_state(part.flat)
        return state[part.flat]
