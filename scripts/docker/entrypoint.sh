#!/usr/bin/env bash
# What the image starts: the words behind it, e.g. torchrun --standalone --nproc-per-node=8 pretrain_moe.py ...
# A container's end comes as TERM to its first process. torchrun would hand it on and kill ranks 30 s later, so here TERM
# (and INT, USR1) goes to the ranks alone; they save, and the container has as long as its manager gives it.
#   DONE_FILE  the program's --summary-path: when all ended well and it was not written, the run was asked to stop before its
#              end, and the exit code is 75 instead of 0, so that a Kubernetes Job starts it again
set -uo pipefail

readonly STOPPED_EARLY=75 # EX_TEMPFAIL of sysexits.h

if [[ $# -eq 0 ]]; then
    echo 'error: PROGRAM: not given; e.g. torchrun --standalone --nproc-per-node=1 pretrain_moe.py' >&2
    exit 2
fi
case "${1##*/}:${DONE_FILE:-}" in
torchrun:* | train_single.sh:* | train_multi_node.sh:* | *:?*) ;;
*) exec "$@" ;; # a shell, a tool, one process: nothing to do for it
esac

# A process that starts means that the run is not done, whatever an earlier one left.
[[ -z ${DONE_FILE:-} ]] || rm -f "$DONE_FILE" || exit 2

"$@" &
main=$!

# shellcheck disable=SC2317 # the trap calls it
hand_on() {
    is_told=1
    local children ranks=() pid
    read -r -d '' -a children < <(cat "/proc/$main"/task/*/children 2>/dev/null) || true
    for pid in "${children[@]}"; do
        if tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -q '^TORCHELASTIC_RUN_ID='; then
            ranks+=("$pid")
        fi
    done
    ((${#ranks[@]})) || ranks=("$main") # no torchrun, or one that has not started its ranks yet
    echo "told to stop ($1): all ranks save" >&2
    kill -s "$2" "${ranks[@]}" 2>/dev/null
}
trap 'hand_on TERM TERM' TERM
trap 'hand_on INT TERM' INT # a program in the background ignores INT until it listens
trap 'hand_on USR1 USR1' USR1

is_told=1
code=0
while ((is_told)); do # a trap ends wait early
    is_told=0
    code=0
    wait "$main" || code=$?
done

if ((code == 0)) && [[ -n ${DONE_FILE:-} ]]; then
    for _ in {1..10}; do # another machine's file may take a moment to show on a shared disk
        [[ ! -e $DONE_FILE ]] || exit 0
        sleep 1
    done
    echo "stopped before the end: $DONE_FILE was not written" >&2
    exit "$STOPPED_EARLY"
fi
exit "$code"
