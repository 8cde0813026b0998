#!/usr/bin/env bash
# The recordings behind docs/worked-example.md: small and large, forward only and full step, fp32, bf16 and compiled.
# usage: bench/profile_recordings.sh FOLDER [PYTHON]      (needs a GPU; about six minutes on an H200)
set -eu
folder=$1
python=${2:-python}
for size in small large; do
  for mode in inference train; do
    for how in fp32 bf16 compiled; do
      settings="--precision ${how/compiled/bf16}"
      [ "$how" = compiled ] && settings="$settings --compile yes"
      "$python" -m stepscope profile --size "$size" --context 256 --mode "$mode" $settings \
        --out "$folder/$size-$mode-$how" --force
    done
  done
done
