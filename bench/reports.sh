#!/usr/bin/env bash
# The reports in docs/report.md: `small` and `medium`, fp32 with unfused attention, then bf16 with flash attention and
# compilation, and what changed between the two. On a machine with a GPU:
#
#     bench/reports.sh runs/reports
set -euo pipefail
out=${1:?'usage: bench/reports.sh DIR'}
mkdir -p "$out"

for size in small medium; do
    shared=(--size "$size" --batch 4 --context 1024)
    stepscope report "${shared[@]}" --precision fp32 --attention naive --data "$out/$size-fp32" --out "$out/$size-fp32.html"
    stepscope report "${shared[@]}" --precision bf16 --attention flash --compile --data "$out/$size-fast" --out "$out/$size-fast.html"
    stepscope report "$out/$size-fp32" "$out/$size-fast" --out "$out/$size-both.html"
done
