"""Stands in for ``transformer_engine.pytorch.optimizers.FusedAdam``."""

import torch

from tests.support import capturable_adam


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
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

    def step(self, closure=None, grad_scaler=None):
        capturable_adam.step(self, grad_scaler)
