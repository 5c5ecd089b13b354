"""The learning rate as a pure function of the update's number.

It has no state: what a run resumes with is what its configuration says now, so a new ``--lr`` wins over an old
checkpoint. It does not touch the optimizer; the step function asks for a value and hands it to ``GuardedAdamW.step``.
Updates that were skipped do not count: ask for ``at(iteration - optimizer.num_skipped_updates)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_glue.config.errors import ConfigError
from megatron_glue.config.fields import flag_of
from megatron_glue.config.sections import OptimizerConfig


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warmup, then one of four shapes between ``lr`` and ``min_lr``.

    With W warmup iterations, D the end of decay and i counted from 0:

    - warmup, i < W: ``lr * (i + 1) / W``, so the first update already moves and update W - 1 has the peak.
    - cosine, linear, W <= i < D: from ``lr`` at i = W down to ``min_lr`` at i = D.
    - WSD (warmup, stable, decay: MiniCPM, arXiv:2404.06395): ``lr`` until D - ``lr_wsd_decay_iters``, then linear.
    - constant: ``lr``.
    - from D on: ``min_lr``, except for constant. Warmup goes first where W reaches past D.

    Attributes:
        config: The optimizer section.
        train_iters: Iterations of the whole run; the end of decay when ``lr_decay_iters`` is unset.

    Raises:
        ConfigError: If ``min_lr`` lies above ``lr``.
    """

    config: OptimizerConfig
    train_iters: int

    def __post_init__(self) -> None:
        if self.config.min_lr > self.config.lr and self.config.lr_decay_style != "constant":
            raise ConfigError(
                flag_of("min_lr"),
                self.config.min_lr,
                f"lies above the peak --lr {self.config.lr}",
                "lower --min-lr or raise --lr",
            )

    def at(self, iteration: int) -> float:
        """Learning rate of one update.

        Args:
            iteration: Updates made before this one, 0 for the first.

        Returns:
            The learning rate, above 0 for iteration 0.
        """
        config = self.config
        if iteration < config.lr_warmup_iters:
            return config.lr * (iteration + 1) / config.lr_warmup_iters
        if config.lr_decay_style == "constant":
            return config.lr
        decay_end = config.lr_decay_iters or self.train_iters
        if iteration >= decay_end:
            return config.min_lr
        decay_start = config.lr_warmup_iters
        if config.lr_decay_style == "WSD":
            length = config.lr_wsd_decay_iters or max(1, round(decay_end / 10))
            decay_start = max(decay_start, decay_end - length)
        progress = max(0, iteration - decay_start) / (decay_end - decay_start)
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_decay_style == "cosine" else 1 - progress
        return config.min_lr + (config.lr - config.min_lr) * remaining
