#!/usr/bin/env bash
# Start a share of jobs with a new version: the name of a job alone decides, so it stays with its version over restarts.
#   STABLE=/opt/glue/0.1 CANARY=/opt/glue/0.2 PERCENT=10 scripts/canary.sh JOB COMMAND ...
# STABLE and CANARY are checkouts, each with its environment in .venv. COMMAND starts in the checkout that JOB falls to,
# with its environment first on PATH and REPO set to it, as scripts/slurm/*.sbatch take it. PERCENT=0 (the default) ends
# the trial: every job that starts afterwards is stable. The recipe: docs/upgrading.md.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

(($# >= 2)) || fail "canary.sh: needs the name of a job and its command"
job="$1" percent="${PERCENT:-0}"
shift
[[ $percent =~ ^([0-9]{1,2}|100)$ ]] || fail "PERCENT=$percent: is not a number from 0 to 100"
for name in STABLE CANARY; do
    [[ -n ${!name:-} ]] || fail "$name: is not set; name the checkout of that version"
    [[ -f ${!name}/pretrain_moe.py && -x ${!name}/.venv/bin/python ]] ||
        fail "$name=${!name}: holds no pretrain_moe.py and .venv/bin/python; give a checkout with its environment"
done

digest="$(printf '%s' "$job" | sha256sum)"
place=$((16#${digest:0:8} % 100))
if ((place < 10#$percent)); then release=canary tree="$CANARY"; else release=stable tree="$STABLE"; fi
tree="$(cd "$tree" && pwd)"
echo "job $job: $release, $tree (place $place of 100, the first ${percent} are canaries)" >&2
cd "$tree"
export REPO="$tree" PATH="$tree/.venv/bin:$PATH"
exec "$@"
