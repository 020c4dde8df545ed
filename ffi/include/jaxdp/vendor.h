// The only place that tells one target from another: memory order, clock, packed arithmetic,
// floating-point state, and the names of the GPU runtimes. Everything above this header is written
// once for the host and for device code.
#pragma once

#include <cstdint>
#include <ctime>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
#endif

#if defined(__x86_64__) && !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
#include <immintrin.h>
#endif

#if defined(__CUDACC__) || defined(__HIP__)
#define JAXDP_GPU_COMPILER
#define JAXDP_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: the host kernels are compiled at several instruction levels, and a shared copy
// made at a higher level must not be linked into a lower one.
#define JAXDP_HOST_DEVICE __attribute__((always_inline)) inline
#endif
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define JAXDP_ON_DEVICE
#endif

namespace jaxdp {

// Release store and acquire load that a peer process (or device) may pair with: everything written
// before the release is visible after an acquire that reads its value.
JAXDP_HOST_DEVICE void store_release_system(std::uint64_t* word, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#elif defined(__HIP_DEVICE_COMPILE__)
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

JAXDP_HOST_DEVICE std::uint64_t load_acquire_system(const std::uint64_t* word) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#elif defined(__HIP_DEVICE_COMPILE__)
  return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
#elif defined(JAXDP_BREAK_ACQUIRE)  // test builds only: the control that shows ThreadSanitizer sees it
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

// Nanoseconds of a clock that only goes forward; one device's values are comparable with each other.
JAXDP_HOST_DEVICE std::uint64_t clock_ns() {
#if defined(__CUDA_ARCH__)
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#elif defined(__HIP_DEVICE_COMPILE__)
  return static_cast<std::uint64_t>(__builtin_readsteadycounter()) * 10u;  // 100 MHz on gfx942
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
#endif
}

JAXDP_HOST_DEVICE void relax() {
#if defined(JAXDP_ON_DEVICE)
#elif defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(JAXDP_GPU_COMPILER)
// Before the block barrier that stands between a block's payload stores and the one thread that
// releases them. On NVIDIA a release is cumulative over the barrier. On gfx942 a release waits for
// the stores of its own wave alone, so every wave makes its own visible first.
__device__ __forceinline__ void settle_stores() {
#if defined(__HIP__)
  __threadfence_system();
#endif
}

// Two float16 adds in one instruction, each rounded once.
__device__ __forceinline__ std::uint32_t add_packed_float16(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDACC__)
  std::uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
#else
  typedef _Float16 Pair __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(Pair, a) + __builtin_bit_cast(Pair, b));
#endif
}

// A 16-byte load that does not keep the line in the first-level cache: peers write what it reads.
__device__ __forceinline__ uint4 load_from_peers(const uint4* address) {
#if defined(__CUDACC__)
  return __ldcg(address);
#else
  return *address;
#endif
}
#endif

#if !defined(JAXDP_GPU_COMPILER)
// XLA's CPU threads flush subnormals to zero. The tree keeps them, so the control word is set to
// IEEE defaults (round to nearest even, no flushing) for the scope and put back afterwards.
class ScopedIeeeMode {
 public:
#if defined(__x86_64__)
  ScopedIeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ScopedIeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedIeeeMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~ScopedIeeeMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#else
#error "the floating-point control word of this processor is not known: add it here"
#endif
 public:
  ScopedIeeeMode(const ScopedIeeeMode&) = delete;
  ScopedIeeeMode& operator=(const ScopedIeeeMode&) = delete;
};
#endif

}  // namespace jaxdp
