"""Train a mixture-of-experts language model on packed sequences.

With no flags it trains a small model on an embedded corpus, on the CPU or on a GPU, in a few minutes::

    torchrun pretrain_moe.py --use-packed-cache --double-buffer-ckpt
    torchrun --nproc-per-node 2 pretrain_moe.py --expert-model-parallel-size 2 --use-packed-cache
"""

from __future__ import annotations

from megatron_glue.config.process import prepare_process

if __name__ == "__main__":
    prepare_process()
    # Only now: these import torch.
    from megatron_glue.training.app import main
    from megatron_glue.training.presets import MOE_DEFAULTS

    raise SystemExit(main(MOE_DEFAULTS))
