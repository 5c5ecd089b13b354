#!/usr/bin/env bash
# What pretrain_gpt.sbatch and pretrain_moe.sbatch run inside their allocation; not to be called by hand.
#   LAUNCH=torchrun  one torchrun per node, which starts NPROC ranks there (default)
#   LAUNCH=srun      one task per rank, no torchrun: srun starts, signals and ends every rank itself
#   NPROC            ranks per node (default: the GPUs of the allocation)
#   MASTER_ADDR      address of the first node, where its own name does not resolve; MASTER_PORT: a port of it
#   SRUN_FLAGS       further words for srun, e.g. "--container-image=/shared/glue.sqsh --container-workdir=/opt/megatron_glue"
#   CONTAINER        words that start a container in front of each command, e.g. "apptainer exec --nv /shared/glue.sif"
#   REQUEUE=0        do not put the job back into the queue when it stopped in time for its limit
# Before the time limit Slurm sends USR1 to this shell (#SBATCH --signal=B:USR1@SECONDS). It is handed on to all
# ranks, which save together and end with 0; then the job is requeued, and its next start resumes from that checkpoint.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NODELIST:-} && -n ${SLURM_JOB_NUM_NODES:-} ]] ||
    fail 'SLURM_JOB_ID: not set, or without its nodes; submit with sbatch scripts/slurm/pretrain_gpt.sbatch'
NPROC="${NPROC:-${SLURM_GPUS_ON_NODE:-}}"
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$NPROC: not a number of ranks, and the job asked for no GPUs; set it"

# The first node holds rank 0. SLURM_LAUNCH_NODE_IPADDR would be the machine that called srun.
if [[ -n ${MASTER_ADDR:-} ]]; then
    head_node="$MASTER_ADDR"
else
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || hosts=
    [[ -n $hosts ]] ||
        fail "SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST: scontrol does not name its hosts here; set MASTER_ADDR"
    head_node="${hosts%%$'\n'*}"
fi
getent ahosts "$head_node" >/dev/null ||
    fail "SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST: the head node $head_node cannot be resolved; set MASTER_ADDR"
port="${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}"

# The job keeps its number when it is requeued, so this folder is where its next start resumes. A --save of yours wins.
program=("$1" --save "runs/${SLURM_JOB_NAME:-job}-$SLURM_JOB_ID" "${@:2}")
# A rank takes signals from its first line of training on. Before that, and in torchrun at any time, they must not kill:
# torchrun would leave its ranks behind on USR1, and send them a second TERM on TERM.
guard=(bash -c 'trap "" USR1 TERM; exec "$@"' bash)
cpus="${SLURM_CPUS_ON_NODE:-$NPROC}"
# shellcheck disable=SC2206 # one word each, without quoting
srun_flags=(${SRUN_FLAGS:-}) container=(${CONTAINER:-})

case "${LAUNCH:=torchrun}" in
torchrun)
    export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT # torchrun --signals-to-handle
    tasks=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$cpus")
    ranks=(torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$NPROC" --max-restarts 0
        --rdzv-backend c10d --rdzv-endpoint "$head_node:$port" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")
    ;;
srun)
    export MASTER_PORT="$port" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    tasks=(--ntasks="$((SLURM_JOB_NUM_NODES * NPROC))" --ntasks-per-node="$NPROC"
        --cpus-per-task="$((cpus > NPROC ? cpus / NPROC : 1))")
    ranks=(python)
    ;;
*) fail "LAUNCH=$LAUNCH: neither torchrun nor srun" ;;
esac

is_stopping=0
# shellcheck disable=SC2317 # the trap calls it
pass_on() {
    is_stopping=1
    echo "job $SLURM_JOB_ID: told to stop, all ranks save"
    scancel --signal=USR1 "$SLURM_JOB_ID" # every step, not this shell
}
trap pass_on USR1
trap : TERM # Slurm has sent it to the ranks too: wait for what they save

# --kill-on-bad-exit: when one task fails, the others are ended at once instead of waiting for it in a collective.
# The guard stands inside the container: beside its first process, and whatever started that may take signals as it likes.
srun --nodes="$SLURM_JOB_NUM_NODES" "${tasks[@]}" --kill-on-bad-exit=1 "${srun_flags[@]}" \
    "${container[@]}" "${guard[@]}" "${ranks[@]}" "${program[@]}" &
step=$!
code=138
while ((code == 138 || code == 143)); do # a trap ends wait early, with 128 + the signal
    code=0
    wait "$step" || code=$?
done

# Preempted with a grace period, ranks get TERM and save. Slurm requeues such a job only if it has not ended by then.
is_preempted='JobState=RUNNING .*PreemptTime=[0-9]'
if ((code == 0)) && [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") =~ $is_preempted ]]; then
    is_stopping=1
fi
if ((is_stopping && code == 0)) && [[ ${REQUEUE:-1} != 0 ]]; then
    echo "job $SLURM_JOB_ID: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
