"""Train a dense GPT language model on packed sequences.

With no flags it trains a small model on an embedded corpus, on the CPU or on a GPU, in a few minutes::

    torchrun pretrain_gpt.py --use-packed-cache --double-buffer-ckpt
    python pretrain_gpt.py --num-layers 8 --data-path corpus.jsonl --save checkpoints/mine
"""

from __future__ import annotations

from megatron_glue.config.process import prepare_process

if __name__ == "__main__":
    prepare_process()
    # Only now: these import torch.
    from megatron_glue.training.app import main
    from megatron_glue.training.presets import GPT_DEFAULTS

    raise SystemExit(main(GPT_DEFAULTS))
