#!/usr/bin/env bash
# Measures on a GPU what cannot be measured elsewhere, in three parts of under ten minutes each on an H200:
#
#     bench/gpu_runs.sh plan OUT        proposals of `plan --fit` under their memory limits; tests of whole steps and replays
#     bench/gpu_runs.sh modules OUT     modules of compiled and graphed steps; pages of a mixture of experts and of a script
#                                       that replays CUDA graphs of compiled code
#     bench/gpu_runs.sh evidence OUT    runs that `recover` has never seen; replays of true and false claims
#     bench/gpu_runs.sh modules OUT cpu    a rehearsal of that part with a tiny model
#
# PYTHON names the interpreter. A command that fails or takes too long does not stop the others. OUT gets a log for each,
# and the recordings of a part as one archive. The exit status is the number of commands that failed.
set -uo pipefail
part=${1:?'usage: bench/gpu_runs.sh plan|modules|evidence OUT [cpu]'}
out=$(mkdir -p "${2:?'which directory?'}" && cd "$2" && pwd)
device=${3:-cuda}
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
cd "$(dirname "$0")/.."

# limited SECONDS NAME COMMAND...: the command, with its output in a log; its last lines are printed.
limited() {
    local seconds=$1 name=$2 began=$SECONDS
    shift 2
    timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    echo "== $name: status $status after $((SECONDS - began)) s"
    tail -n 25 "$out/$name.log"
}

case $part in
plan)
    limited 330 proposals "$python" bench/prediction.py --measure --group proposals --budget 280 --out "$out/proposals.jsonl"
    limited 250 tests "$python" -m pytest -p no:cacheprovider tests/gpu/test_whole_step_gpu.py tests/gpu/test_replay_gpu.py
    ;;
modules)
    what=(--models small,medium,llama --limit 350)
    [ "$device" = cuda ] || what=(--models nano --variants eager,compiled --device "$device")
    limited 430 modules "$python" bench/module_shares.py "$work/modules" "${what[@]}"
    experts=(--bf16 --hidden 1024 --layers 12 --heads 16 --experts 8 --context 1024 --batch-size 8)
    [ "$device" = cuda ] || experts=(--device "$device")
    limited 60 experts "$python" -m stepscope run --stop --out "$work/experts" bench/loops/mixture_of_experts.py "${experts[@]}"
    script=(--compile-mode reduce-overhead --num-layers 12 --d-model 768 --num-heads 12 --context 1024)
    [ "$device" = cuda ] || script=(--num-layers 2 --d-model 64 --num-heads 4 --context 64)
    script+=(--compile --device "$device" --data-dir "$work/tokens")
    limited 80 replays "$python" -m stepscope run --stop --out "$work/replays" bench/loops/pretrain.py "${script[@]}"
    limited 20 replayed "$python" -m stepscope explain "$work/replays" --table tree
    rm -rf "$work/tokens"
    ;;
evidence)
    limited 460 variants "$python" bench/collect_evidence.py variants --out "$work/evidence" --seconds 330 --device "$device"
    [ "$device" = cuda ] && limited 120 claims "$python" bench/replay_check.py --all
    ;;
*)
    echo "error: \`$part\` is not a part; expected plan, modules or evidence" >&2
    exit 2
    ;;
esac
[ -z "$(ls -A "$work")" ] || tar -czf "$out/$part.tar.gz" -C "$work" .
exit "$failed"
