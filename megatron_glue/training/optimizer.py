"""AdamW that skips an update as a whole when the gradient is not finite, without asking the device.

The last station of a step: gradients arrive reduced and clipped, the learning rate comes from ``lr_schedule.py``. It
neither reduces nor clips, and hyperparameters are no state: only moments, step counters and the number of skipped
updates go into a checkpoint, so a resumed run follows its present configuration.

No part is updated before the last gradient has been reduced, not even without clipping: whether there is an update at
all depends on every gradient being finite, and a part that was updated early could not be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from megatron_glue.backends.apex import fused_adam_apex
from megatron_glue.backends.fused_adam import LibraryAdamW, initial_adam_state
from megatron_glue.backends.transformer_engine import fused_adam_te
from megatron_glue.config.sections import OptimizerConfig
from megatron_glue.ops.host_reader import HostReader
from megatron_glue.parallel.engines.deepspeed_storage import ZeroStorage
from megatron_glue.parallel.gather import global_name
from megatron_glue.parallel.precision import track_updates
from megatron_glue.training.optimizer_zero import ZeroAdamW

_LIBRARY_CLASSES: dict[str, Callable[[], Callable[..., torch.optim.Optimizer]]] = {
    "apex": fused_adam_apex,
    "te": fused_adam_te,
}


class GuardedAdamW:
    """AdamW of torch or of a library, with a device-side guard against gradients that are not finite.

    The fused kernels take the flag as ``found_inf`` and leave weights, moments and step counters as they are when it is
    set. Every rank derives the flag from the same global norm, so all of them skip together. The foreach variant has no
    such argument: there the flag is read on the host before the update, one counted read per step.

    How many updates were skipped has to reach the host, because the schedule stands still for them. The flag travels
    in a copy that is awaited only when somebody asks, one step later: by then a whole forward and backward are queued
    behind it, and the device does not run dry.

    Rows of experts that found no room (``--moe-static-capacity-factor``) make it skip in the same way. That is no
    skipped update: the step is to be run again, and how many rows it was travels in the same copy.

    Args:
        optimizer: The wrapped optimizer; each group carries ``lr_multiplier``.
        names: Global name of each parameter.
        device: Where the parameters live.
        host_reader: Counts the foreach variant's reads.

    Attributes:
        run_update: What updates the parameters; DeepSpeed's engine puts its own step here, which calls the same.
        implementation: ``fused`` for all that take the flag on the device, else ``foreach``.
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW | LibraryAdamW,
        names: dict[Parameter, str],
        device: torch.device,
        host_reader: HostReader,
    ) -> None:
        self.torch_optimizer = optimizer
        self.run_update: Callable[[], Any] = optimizer.step
        self.implementation = "fused" if optimizer.defaults["fused"] else "foreach"
        self._names = names
        self._host_reader = host_reader
        self._num_skipped_updates = 0
        self._num_overflowing = 0
        # [whether the update was skipped, rows that found no room]
        self._flags = torch.zeros(2, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._flags_on_host = self._flags.numpy()
        self._skip_event = torch.cuda.Event() if device.type == "cuda" else None
        track_updates(optimizer)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: Tensor, num_overflowing: Tensor | None = None) -> None:
        """Update all parameters, or none if the gradient norm is not finite or rows found no room.

        Args:
            learning_rate: Value of the schedule; each group multiplies it by its ``lr_multiplier``. A plain number: it
                reaches the kernel as an argument, without a copy to the device.
            grad_norm: fp32 scalar on the device. Global norm before clipping, the same on all ranks.
            num_overflowing: int64 scalar on the device. Rows of all ranks that reached no expert; ``None`` for none.
        """
        self._settle()
        self._num_overflowing = 0
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_multiplier"]
        skip = torch.isfinite(grad_norm).logical_not()
        if num_overflowing is not None:
            skip = skip | (num_overflowing > 0)
        skip = skip.to(torch.float32).reshape(())
        if self.implementation == "fused":
            # The attribute is the protocol between torch.amp.GradScaler and optimizers with fused kernels.
            self.torch_optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
            self.run_update()
        elif self._host_reader.read(skip) == 0:
            self.run_update()
        lost = torch.zeros_like(skip) if num_overflowing is None else num_overflowing.to(skip.dtype).reshape(())
        self._flags.copy_(torch.stack([skip, lost]), non_blocking=True)
        if self._skip_event is not None:
            self._skip_event.record()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.torch_optimizer.zero_grad(set_to_none=True)

    @property
    def num_skipped_updates(self) -> int:
        """Updates skipped so far, the last step included; waits for that step's end if it is still running.

        A step whose rows found no room is not among them.
        """
        self._settle()
        return self._num_skipped_updates

    @num_skipped_updates.setter
    def num_skipped_updates(self, value: int) -> None:
        self._settle()
        self._num_skipped_updates = value

    @property
    def num_known_skips(self) -> int:
        """Updates skipped so far, as far as the host knows: to the step before the last. Waits for nothing."""
        return self._num_skipped_updates

    @property
    def num_overflowing(self) -> int:
        """Rows of the last step that found no room, on all ranks: if there are any, it was no update and is to be run
        again. Waits for that step's end if it is still running."""
        self._settle()
        return self._num_overflowing

    def named_state(self) -> Iterable[tuple[str, Parameter, dict[str, Tensor]]]:
        """Yield global name, parameter and its state: ``step``, ``exp_avg`` and ``exp_avg_sq``, all tensors.

        A state that no step has made yet is made here, so a checkpoint can be read into it before the first step.
        """
        for param, name in self._names.items():
            state = self.torch_optimizer.state
            if not state.get(param):
                state[param] = self.initial_state(param)
            yield name, param, state[param]

    def initial_state(self, values: Tensor) -> dict[str, Tensor]:
        """What AdamW itself would create in its first step; fused kernels want the counter on the device.

        Args:
            values: A parameter.
        """
        return initial_adam_state(values, values.device if self.implementation == "fused" else "cpu")

    def under_zero(self, engine: Any, storage: ZeroStorage) -> ZeroAdamW:
        """Hand the torch optimizer over to DeepSpeed's ZeRO.

        Args:
            engine: DeepSpeed's engine, made from the model and the torch optimizer.
            storage: Where it keeps this rank's parts.

        Returns:
            The optimizer to go on with; this one is not to be used any more.
        """
        return ZeroAdamW(self.torch_optimizer, self.initial_state, engine, storage)

    def _settle(self) -> None:
        """Take over the previous step's flags, once."""
        if self._skip_event is not None:
            self._skip_event.synchronize()
        is_skipped, num_overflowing = map(int, self._flags_on_host)
        if num_overflowing:
            self._num_overflowing = num_overflowing
        else:
            self._num_skipped_updates += is_skipped
        self._flags_on_host[...] = 0


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]],
    config: OptimizerConfig,
    implementation: str,
    device: torch.device,
    *,
    host_reader: HostReader | None = None,
    lr_multiplier_of: Callable[[str], float] = lambda name: 1.0,
) -> GuardedAdamW:
    """Build AdamW (decoupled weight decay, arXiv:1711.05101) over groups of alike parameters.

    Args:
        named_parameters: Names and parameters of the wrapped model; those without ``requires_grad`` are left out.
        config: Optimizer section.
        implementation: ``fused``, ``foreach``, ``apex`` or ``te``, from ``Backends.optimizer``.
        device: Where the parameters live.
        host_reader: Counts device reads of the foreach variant; unset: an own one.
        lr_multiplier_of: Factor on the learning rate by global parameter name.

    Returns:
        The optimizer. Its moments are made in the first step, or when they are asked for.

    Raises:
        ConfigError: If a library's kernels cannot index a parameter.
    """
    assert implementation in ("fused", "foreach", *_LIBRARY_CLASSES), "the registry chooses one of these"
    names: dict[Parameter, str] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for local_name, param in named_parameters:
        if not param.requires_grad:
            continue
        name = global_name(local_name, param)
        assert param not in names, f"{name} is a second name of {names[param]}"
        names[param] = name
        decay = config.weight_decay if is_decayed(name, param) else 0.0
        multiplier = lr_multiplier_of(name)
        # Multi-tensor kernels refuse plain tensors and DTensors in one call, and DTensors of two meshes.
        kind = param.device_mesh if isinstance(param, DTensor) else None
        empty = {"params": [], "weight_decay": decay, "lr_multiplier": multiplier}
        groups.setdefault((decay, multiplier, kind), empty)["params"].append(param)
    defaults: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    optimizer: torch.optim.AdamW | LibraryAdamW
    if implementation in _LIBRARY_CLASSES:
        library_class = _LIBRARY_CLASSES[implementation]()
        optimizer = LibraryAdamW(library_class, implementation, groups.values(), defaults)
    else:
        is_fused = implementation == "fused"
        optimizer = torch.optim.AdamW(list(groups.values()), **defaults, fused=is_fused, foreach=not is_fused)
    return GuardedAdamW(optimizer, names, device, host_reader or HostReader())


def is_decayed(name: str, param: Tensor) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms and biases.

    A bias is known by its name, because the biases of stacked experts or of a fused projection have two dims.
    """
    return param.dim() > 1 and "bias" not in name.rsplit(".", 1)[-1]
