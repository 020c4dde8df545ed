// Chooses the instruction level of the host kernels once.
#include "jaxdp/kernels.h"

namespace jaxdp {

#define JAXDP_DECLARE_LEVEL(level)                                                                              \
  namespace level {                                                                                             \
  void tree_reduce(DType, int, const void* const*, std::size_t, std::size_t, void* const*, int, std::size_t);   \
  }
JAXDP_DECLARE_LEVEL(baseline)
#if defined(JAXDP_HAVE_X86_LEVELS)
JAXDP_DECLARE_LEVEL(x86_v3)
JAXDP_DECLARE_LEVEL(x86_v4)
#endif

namespace {

auto* choose() {
#if defined(JAXDP_HAVE_X86_LEVELS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &x86_v4::tree_reduce;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return &x86_v3::tree_reduce;
#endif
  return &baseline::tree_reduce;
}

}  // namespace

void tree_reduce(DType dtype, int world, const void* const* inputs, std::size_t begin, std::size_t count,
                 void* const* outputs, int output_count, std::size_t output_begin) {
  static const auto chosen = choose();
  chosen(dtype, world, inputs, begin, count, outputs, output_count, output_begin);
}

}  // namespace jaxdp
