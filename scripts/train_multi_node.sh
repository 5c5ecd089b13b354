#!/usr/bin/env bash
# Train on several machines that no scheduler manages: run the same command on each of them, in any order.
#   HEAD_NODE=gpu01 NNODES=4 scripts/train_multi_node.sh pretrain_moe.py --expert-model-parallel-size 8 --save /shared/mine
#   HEAD_NODE  one of the machines, by a name or address that all of them reach; the ranks meet there
#   NNODES     number of machines
#   NPROC      processes on each, one per GPU (default: as many as this machine has GPUs)
#   HEAD_PORT  free port of HEAD_NODE (default 29400)
#   HEAD_WAIT_S  seconds to wait for HEAD_NODE's name (default 0); pods of a cluster get theirs when they start
#   RUN_ID     tells runs apart that meet at one port (default: the words behind the program)
# Ranks are numbered by the rendezvous (c10d), so no machine has a number of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 2
}

[[ $# -gt 0 ]] || fail 'PROGRAM: not given; e.g. scripts/train_multi_node.sh pretrain_gpt.py'
[[ -n ${HEAD_NODE:-} ]] || fail 'HEAD_NODE: not set; give one of the machines, the same on all of them'
[[ ${NNODES:-} =~ ^[1-9][0-9]*$ ]] || fail "NNODES=${NNODES:-}: not a number of machines; give the same on all of them"
if [[ $NNODES -gt 1 && $HEAD_NODE =~ ^(localhost|127\.0\.0\.1|::1)$ ]]; then
    fail "HEAD_NODE=$HEAD_NODE: each of the $NNODES machines would wait for itself; give a name that all of them reach"
fi
if [[ -z ${NPROC:-} ]]; then
    NPROC="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" || true
    [[ $NPROC -gt 0 ]] || fail 'NPROC: not set, and nvidia-smi lists no GPU; give the number of processes per machine'
fi
[[ ${HEAD_WAIT_S:=0} =~ ^[0-9]+$ ]] || fail "HEAD_WAIT_S=$HEAD_WAIT_S: not a number of seconds"
until getent ahosts "$HEAD_NODE" >/dev/null || ((SECONDS >= HEAD_WAIT_S)); do sleep 1; done
getent ahosts "$HEAD_NODE" >/dev/null || fail "HEAD_NODE=$HEAD_NODE: cannot be resolved on $(hostname); give an address"

exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:${HEAD_PORT:-29400}" --rdzv-id "${RUN_ID:-$*}" \
    --max-restarts 0 "$@"
