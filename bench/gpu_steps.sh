#!/bin/bash
# Model-S on two GPUs: strict fused step beside plain pmap, f32 and bf16, small and large batch. Writes into $1.
set -u
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=.
for dtype in float32 bfloat16; do
  for size in "1 128" "8 512"; do
    set -- "$1" $size
    echo "== model-s $dtype batch $2 x $3"
    timeout 140 python3 bench/step.py --model model-s --world 2 --platform cuda --compute-dtype $dtype --batch $2 --context $3 \
      --samples 15 --output "$1/step-$dtype-$2x$3.json" 2>&1 | grep -v "^[WIE][0-9]"
  done
done
