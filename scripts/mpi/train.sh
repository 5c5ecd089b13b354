#!/usr/bin/env bash
# Train under mpirun (Open MPI or MPICH); needs pip install 'megatron_glue[mpi]', unless MASTER_ADDR and MASTER_PORT are set.
#   NP=2 scripts/mpi/train.sh pretrain_gpt.py
#   NP=32 HOSTFILE=hosts scripts/mpi/train.sh pretrain_moe.py --expert-model-parallel-size 8 --save /shared/mine
#   NP        processes over all machines, one per GPU
#   HOSTFILE  machines, one a line, as mpirun wants them: "gpu01 slots=8" for Open MPI, "gpu01:8" for MPICH
#             (default: this machine, or what the scheduler around mpirun gives)
#   MPI_FLAGS further words for mpirun, e.g. "--map-by ppr:8:node"
# MPI only tells the ranks where to meet; tensors travel by NCCL or gloo. mpirun passes USR1 on: all ranks save and stop.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
    echo "error: $*" >&2
    exit 2
}

[[ $# -gt 0 ]] || fail 'PROGRAM: not given; e.g. NP=2 scripts/mpi/train.sh pretrain_gpt.py'
[[ ${NP:-} =~ ^[1-9][0-9]*$ ]] || fail "NP=${NP:-}: not a number of processes; set it"
[[ -z ${HOSTFILE:-} || -r $HOSTFILE ]] || fail "HOSTFILE=$HOSTFILE: cannot be read; give a file with one machine a line"
version="$(mpirun --version)" || fail 'mpirun: does not run; install Open MPI or MPICH, or load its module'
# shellcheck disable=SC2206 # one word each, without quoting
mpi_flags=(${MPI_FLAGS:-})

# As under torchrun: with several ranks on a machine, a thread per core in each of them would be too many.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
command=(mpirun -n "$NP")
if [[ $version == *'Open MPI'* ]]; then
    # Unbound: bound to one core, the threads that load, copy and save would share it with training.
    command+=(--bind-to none)
    [[ -z ${HOSTFILE:-} ]] || command+=(--hostfile "$HOSTFILE")
    # Open MPI hands variables to other machines only by name; MPICH hands on all of them.
    for name in PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS MASTER_ADDR MASTER_PORT \
        "${!NCCL_@}" "${!RCCL_@}" "${!GLOO_@}" "${!MEGATRON_GLUE_@}"; do
        [[ -z ${!name:-} ]] || command+=(-x "$name")
    done
else
    [[ -z ${HOSTFILE:-} ]] || command+=(-f "$HOSTFILE")
fi
exec "${command[@]}" "${mpi_flags[@]}" python "$@"
