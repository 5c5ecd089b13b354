"""Stands in for ``apex.optimizers.FusedAdam``."""

import torch

from tests.support import capturable_adam


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        assert capturable
        lr = torch.tensor(lr, dtype=torch.float32)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        capturable_adam.prepare(self, capturable=capturable, adam_w_mode=adam_w_mode)

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        capturable_adam.step(self, grad_scaler)
