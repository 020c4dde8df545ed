#!/bin/bash
# Builds and times all_reduce for several constants of ring.h on two GPUs (columns: 4K 64K 1M 4M 16M 64M 128M 256M).
set -u
mkdir -p /tmp/tune
build() { # name depth blocks vectors threads extra...
  nvcc -std=c++20 -O3 --fmad=false -arch=sm_90 -x cu -DJAXDP_CUDA -DJAXDP_TUNING -DJAXDP_RING_DEPTH=$2 -DJAXDP_MAXIMUM_BLOCKS=$3 \
    -DJAXDP_VECTORS_PER_THREAD=$4 -DJAXDP_THREADS=$5 "${@:6}" -Iffi/include ffi/kernels.gpu.cc ffi/gpu_group.cc bench/gpu_tune.cc -o /tmp/tune/$1 2>&1 | grep -i error
}
build a 4 128 4 512 &
build b 4 256 4 512 &
build c 4 128 8 512 &
build d 2 256 4 512 &
build e 8 256 2 512 &
build f 4 256 4 256 &
build g 4 512 4 256 &
build h 4 256 4 512 &
build i 4 128 4 1024 &
build j 8 264 2 512 &
wait
for name in a b c d e f g h i j; do echo -n "$name "; timeout 60 /tmp/tune/$name; done
for blocks in 64 132 264; do echo -n "b-$blocks "; timeout 60 /tmp/tune/b $blocks; done
