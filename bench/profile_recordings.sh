#!/usr/bin/env bash
# The recordings behind docs/worked-example.md: small and large, forward only and full step, fp32, bf16 and compiled.
# usage: bench/profile_recordings.sh DIR [PYTHON [ONLY]]      (requires a GPU; about six minutes on an H200)
# ONLY is a glob pattern of names such as 'large-*-compiled'.
set -eu
folder=$1
python=${2:-python}
only=${3:-*}
for size in small large; do
  for mode in inference train; do
    for how in fp32 bf16 compiled; do
      name=$size-$mode-$how
      # shellcheck disable=SC2053
      [[ $name == $only ]] || continue
      settings="--precision ${how/compiled/bf16}"
      [ "$how" = compiled ] && settings="$settings --compile yes"
      # shellcheck disable=SC2086
      "$python" -m stepscope profile --size "$size" --context 256 --mode "$mode" $settings --out "$folder/$name" --force
    done
  done
done
