#!/bin/bash
# Everything that one visit to a machine with GPUs should answer: tests, then benches. Writes into $1.
set -u
out=$1; world=${2:-2}
export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || rocm-smi --showproductname
nvidia-smi topo -m 2>/dev/null | head -6
python3 -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tail -40
for dtype in float32 bfloat16; do
  PYTHONPATH=. timeout 200 python3 bench/collectives.py --world "$world" --platform cuda --dtype $dtype --samples 20 \
    --sizes 4096 65536 1048576 4194304 16777216 67108864 134217728 268435456 --output "$out/collectives-$dtype.json" 2>&1 | grep -v "^W\|^I\|^E0"
done
