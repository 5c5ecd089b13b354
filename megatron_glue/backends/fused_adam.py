"""The fused AdamW of another library, apex or Transformer Engine, behind the interface of torch's.

Both libraries have a class ``FusedAdam`` with the same "capturable" kernels: learning rate, step counter and the flag
of a gradient that is not finite stay on the device, so an update that must be skipped is skipped there and the host
waits for nothing. This file drives them so that the contract of ``training/optimizer.py`` holds:

- ``found_inf`` set: weights, moments and step counters keep their values. The libraries count by the flag that the step
  BEFORE left in their buffer, so it is put there ahead of the step, and counters are kept here.
- State has the names, dtypes and shapes of torch's fused AdamW, so checkpoints of either are read by the other. The
  libraries keep one counter per group; every parameter has a gradient in every step, so those of a group are equal.
- Parameters may be DTensors. The kernels know plain tensors only and are shown this rank's shards.

It imports no library: the class comes from the file of its backend. Clipping, schedule and reduction happen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of

MAX_ELEMENTS = 2**31 - 1
"""The capturable kernels of both libraries index with 32 bits."""


def initial_adam_state(values: Tensor, counter_device: torch.device | str) -> dict[str, Tensor]:
    """What torch's AdamW itself would create in its first step.

    Args:
        values: A parameter.
        counter_device: Where the step counter lives; fused kernels want it on the device of the parameter.

    Returns:
        ``step``, an fp32 scalar, ``exp_avg`` and ``exp_avg_sq``, of the parameter's shape and dtype; all zero.
    """
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counter_device),
        "exp_avg": torch.zeros_like(values, requires_grad=False, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(values, requires_grad=False, memory_format=torch.preserve_format),
    }


class LibraryAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) computed by a library's ``FusedAdam``.

    Args:
        library_class: The library's ``FusedAdam``.
        name: As in ``--optimizer-backend``, for messages.
        groups: Parameter groups with ``weight_decay``; parameters in fp32, on one device.
        defaults: ``lr``, ``betas`` and ``eps``.

    Attributes:
        found_inf: fp32 scalar on the device, 1 if the next step must change nothing. Set before each step.

    Raises:
        ConfigError: If a parameter, or this rank's shard of it, has more elements than the kernels can index.
    """

    found_inf: Tensor

    def __init__(
        self,
        library_class: Callable[..., torch.optim.Optimizer],
        name: str,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
    ) -> None:
        super().__init__(groups, {**defaults, "weight_decay": 0.0, "fused": True})
        self._local_params: dict[Tensor, torch.nn.Parameter] = {}
        shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in self.param_groups:
            for param in group["params"]:
                values = _local(param)
                _check_size(values, name)
                # A rank may hold nothing of a parameter. apex forgets updates when its last tensor is empty.
                if values.numel() > 0:
                    is_plain = values is param
                    self._local_params[param] = param if is_plain else torch.nn.Parameter(values.detach())
            held = [self._local_params[param] for param in group["params"] if param in self._local_params]
            if held:
                shown.append((group, {"params": held, "weight_decay": group["weight_decay"]}))
        self._library: Any = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if shown:
            theirs = [group for _, group in shown]
            self._library = library_class(theirs, adam_w_mode=True, capturable=True, **defaults)
            self._groups = list(zip([group for group, _ in shown], self._library.param_groups, strict=True))
        for _, group in self._groups:
            device = group["params"][0].device
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)
            group["step"] = torch.zeros(1, dtype=torch.int32, device=device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters, or none if ``found_inf`` is set; the host waits for nothing.

        Args:
            closure: Not supported.
        """
        assert closure is None, "gradients are there already"
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            if not self.state[param]:
                self.state[param] = initial_adam_state(param, param.device)
        for param, plain in self._local_params.items():
            self._hand_over(param, plain)
        if self._library is not None:
            for group, theirs in self._groups:
                theirs["lr"].fill_(group["lr"])
                theirs["step"].copy_(self.state[group["params"][0]]["step"].reshape(1))
            self._library._dummy_overflow_buf.copy_(self.found_inf.reshape(1))
            self._library.step(grad_scaler=_DeviceFlag(self.found_inf))
        counters = [self.state[param]["step"] for param in params]
        torch._foreach_add_(counters, 1.0 - self.found_inf)  # pyright: ignore[reportPrivateImportUsage]
        for param, plain in self._local_params.items():
            if plain is not param:
                plain.grad = None

    def _hand_over(self, param: Tensor, plain: torch.nn.Parameter) -> None:
        """Show the library this rank's part of a parameter, its gradient and its moments."""
        if plain is not param:
            assert param.grad is not None, "engines give every parameter a gradient"
            plain.data = _local(param)
            plain.grad = _local(param.grad)
        if plain.grad is not None and not plain.grad.is_contiguous():
            plain.grad = plain.grad.contiguous()
        state = self.state[param]
        self._library.state[plain] = {key: _local(state[key]) for key in ("exp_avg", "exp_avg_sq")}


class _DeviceFlag:
    """What a capturable optimizer asks of ``torch.amp.GradScaler``: the flag, and a scale, which is 1 here."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {self._flag.device: self._flag}

    def _get_scale_async(self) -> Tensor:
        return torch.ones(1, dtype=torch.float32, device=self._flag.device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_size(values: Tensor, name: str) -> None:
    if values.numel() > MAX_ELEMENTS:
        raise ConfigError(
            flag_of("optimizer_backend"),
            name,
            f"its kernels index with 32 bits, and a parameter has {values.numel()} elements on this rank",
            "use fused, or split the model over more ranks",
        )
