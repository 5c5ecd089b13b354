#!/usr/bin/env bash
# Everything that needs a GPU, in one go on one GPU: tests, host reads, ablations, timeline, operators; and a table of it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tools/bench/gpu.sh [--minutes N] [--print-commands] OUTPUT_FOLDER

Run what needs a GPU, on one GPU and within N minutes (default 8), and write everything under OUTPUT_FOLDER:

    tests                  pytest -m gpu
    sync_audit             host reads of a training step, by CUDA's own debug mode, against tools/sync_budget.yaml
    ablation_glue_bound    tools/ablate.py with examples/glue_bound.yaml in bf16
    ablation_fine_tuning   tools/ablate.py in bf16: short documents in packs of 4096, 16 layers, 32 experts top-4
    timeline               copies of offloaded activations under compute
    operators              tools/bench/micro.py

Each section leaves what it printed (NAME.out, NAME.err) and, if it got that far, its figures (NAME.json). A section that
fails, or for which no time is left, does not stop the others. gpu.md is the table of all figures, with date and device;
device.json and sections.tsv say where and how they came about.

    --minutes N          for all sections together; each is ended when its own limit or this one is reached
    --print-commands     show what would be run, one command a line, and run nothing

Exit code 0 if every section succeeded, 1 if one did not, 2 for wrong use or where torch sees no GPU. The interpreter is
$PYTHON, or python. Pictures need matplotlib: pip install -e '.[bench]'.
TEXT
}

fail_usage() {
    echo "error: $1; see tools/bench/gpu.sh --help" >&2
    exit 2
}

minutes=8
only_print=false
output=''
while (($#)); do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --minutes)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail_usage '--minutes needs a number of minutes'
            minutes="$2"
            shift
            ;;
        --print-commands) only_print=true ;;
        -*) fail_usage "$1 is unknown" ;;
        *)
            [[ -z "$output" ]] || fail_usage 'there is more than one output folder'
            output="$1"
            ;;
    esac
    shift
done
[[ -n "$output" ]] || fail_usage 'the output folder is missing'
python="${PYTHON:-python}"

if ! $only_print; then
    mkdir -p "$output"
    output="$(cd "$output" && pwd)"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! $only_print; then
    # Says in one line why if there is none.
    "$python" tools/bench/gpu_report.py --probe "$output"
    : >"$output/sections.tsv"
fi
num_failed=0

# section NAME LIMIT_S COMMAND...: run a command within its limit and what is left of the whole, and note how it went.
section() {
    local name="$1" limit_s="$2" left_s start_s status
    shift 2
    if $only_print; then
        printf '%q ' "$@"
        echo
        return
    fi
    left_s=$((minutes * 60 - SECONDS))
    if ((left_s < limit_s)); then limit_s="$left_s"; fi
    start_s="$SECONDS"
    if ((limit_s <= 0)); then
        status='no time left'
    elif timeout --kill-after=10 "$limit_s" "$@" >"$output/$name.out" 2>"$output/$name.err"; then
        status='ok'
    else
        status="exit code $?"
        [[ "$status" != 'exit code 124' ]] || status="ended after $limit_s s"
    fi
    [[ "$status" == 'ok' ]] || num_failed=$((num_failed + 1))
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start_s))" "$*" >>"$output/sections.tsv"
    printf '%-22s %-20s %4d s\n' "$name" "$status" "$((SECONDS - start_s))"
}

section tests 180 "$python" -m pytest -m 'gpu and not multi_gpu' -q --durations=10 -p no:cacheprovider
section sync_audit 60 "$python" tools/sync_audit.py --device cuda --json "$output/sync_audit.json"
section ablation_glue_bound 90 "$python" tools/ablate.py --config examples/glue_bound.yaml \
    --device cuda --precision bf16 --warmup 4 --steps 20 --json "$output/ablation_glue_bound.json"
section ablation_fine_tuning 120 "$python" tools/ablate.py --device cuda --precision bf16 \
    --num-layers 16 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 \
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 256 \
    --seq-length 4096 --max-segment-tokens 256 --micro-batch-size 1 --global-batch-size 2 \
    --warmup 4 --steps 16 --json "$output/ablation_fine_tuning.json"
picture=()
if ! $only_print && "$python" -c 'import matplotlib' 2>/dev/null; then picture=(--output "$output/timeline.png"); fi
section timeline 60 "$python" tools/timeline.py --device cuda --precision bf16 \
    --num-layers 12 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 --global-batch-size 2 \
    --steps 4 --warmup 2 --trace "$output/timeline.trace.json" --json "$output/timeline.json" \
    ${picture[@]+"${picture[@]}"}
section operators 60 "$python" tools/bench/micro.py --device cuda --tokens 4096 --documents 32 \
    --hidden 1024 --heads 16 --experts 64 --json "$output/operators.json"

if $only_print; then exit 0; fi
"$python" tools/bench/gpu_report.py "$output"
((num_failed == 0)) || exit 1
