"""The capturable step that apex and Transformer Engine share, computed by torch, for the stand-ins of both.

It keeps what is surprising in them: a step counts by the flag that the step before left in the buffer, and the kernels
take plain, contiguous fp32 tensors, an int32 counter and a learning rate that are tensors. apex launches nothing for
the tensors before an empty last one; so an empty tensor is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def prepare(optimizer: Any, *, capturable: bool, adam_w_mode: bool) -> None:
    """Set the attributes that both constructors set."""
    optimizer.adam_w_mode = 1 if adam_w_mode else 0
    optimizer.capturable = capturable
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].to(group["params"][0].device)
    optimizer._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)


def step(optimizer: Any, grad_scaler: Any) -> None:
    """Update all groups."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if "step" in group:
            group["step"] += (optimizer._dummy_overflow_buf != 1).to(torch.int)
        else:
            group["step"] = torch.tensor([1], dtype=torch.int, device=device)
        found_inf = torch.zeros((1,))
        if grad_scaler is not None:
            found_inf = grad_scaler._check_inf_per_device(optimizer)[device]
        optimizer._dummy_overflow_buf.copy_(found_inf)
        inverse_scale = torch.ones((1,))
        if grad_scaler:
            inverse_scale = grad_scaler._get_scale_async().double().reciprocal().float()
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state[param]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(param.data).float()
                state["exp_avg_sq"] = torch.zeros_like(param.data).float()
            tensors = [param.grad.data, param.data, state["exp_avg"], state["exp_avg_sq"]]
            _adam_capturable(optimizer, tensors, group, inverse_scale)


def _adam_capturable(optimizer: Any, tensors: list[Tensor], group: dict[str, Any], inverse_scale: Tensor) -> None:
    """The kernel of one tensor: ``multi_tensor_adam_capturable``, mode 1."""
    assert optimizer.adam_w_mode == 1
    for tensor in tensors:
        assert not isinstance(tensor, DTensor)
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert tensor.numel() > 0
    assert group["step"].dtype == torch.int32
    assert group["lr"].dtype == torch.float32
    if optimizer._dummy_overflow_buf.item() == 1:
        return
    grad, param, first, second = tensors
    beta1, beta2 = group["betas"]
    count = group["step"].item()
    grad.mul_(inverse_scale)
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (second / (1 - beta2**count)).sqrt() + group["eps"]
    update = first / (1 - beta1**count) / denominator + group["weight_decay"] * param
    param.sub_(group["lr"] * update)
