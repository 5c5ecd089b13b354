#!/usr/bin/env bash
# Train on one machine: NPROC processes (default 1; one per GPU), all further words go to the program.
#   scripts/train_single.sh pretrain_moe.py --use-packed-cache --double-buffer-ckpt
#   NPROC=8 scripts/train_single.sh pretrain_moe.py --expert-model-parallel-size 8 --save runs/mine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec torchrun --standalone --nproc-per-node "${NPROC:-1}" "$@"
