// The only place that tells one target from another: memory order, clock, floating-point state.
// Everything above this header is written once for the host and for device code.
#pragma once

#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Always inlined: the host kernels are compiled at several instruction levels, and a shared copy
// made at a higher level must not be linked into a lower one.
#define JAXDP_HOST_DEVICE __attribute__((always_inline))

namespace jaxdp {

// Release store and acquire load that a peer process (or device) may pair with: everything written
// before the release is visible after an acquire that reads its value.
JAXDP_HOST_DEVICE inline void store_release_system(std::uint64_t* word, std::uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

JAXDP_HOST_DEVICE inline std::uint64_t load_acquire_system(const std::uint64_t* word) {
#if defined(JAXDP_BREAK_ACQUIRE)  // test builds only: the control that shows ThreadSanitizer sees it
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

JAXDP_HOST_DEVICE inline std::uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

JAXDP_HOST_DEVICE inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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

}  // namespace jaxdp
