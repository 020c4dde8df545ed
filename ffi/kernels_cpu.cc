// The strict sum over host memory. Compiled once for each instruction level (JAXDP_LEVEL), chosen
// at run time in kernels_dispatch.cc; the bits are the same at every level (no contraction).
#include <cstring>

#include "jaxdp/kernels.h"
#include "jaxdp/tree.h"

namespace jaxdp::JAXDP_LEVEL {
namespace {

// A tile of results stays in the first-level cache while it is copied to every output.
constexpr std::size_t kTileElements = 1024;

template <int W, class T>
void reduce_tile(const T* const* inputs, std::size_t count, T* __restrict result) {
  const T* x[W];
  for (int rank = 0; rank < W; ++rank) x[rank] = inputs[rank];
  for (std::size_t i = 0; i < count; ++i) {
    T values[W];
    for (int rank = 0; rank < W; ++rank) values[rank] = x[rank][i];
    result[i] = tree_sum<W>(values);
  }
}

template <int W, class T>
void reduce(const void* const* inputs, std::size_t begin, std::size_t count, void* const* outputs, int output_count,
            std::size_t output_begin) {
  alignas(64) T tile[kTileElements];
  for (std::size_t done = 0; done < count; done += kTileElements) {
    const std::size_t n = count - done < kTileElements ? count - done : kTileElements;
    const T* sources[W];
    for (int rank = 0; rank < W; ++rank) sources[rank] = static_cast<const T*>(inputs[rank]) + begin + done;
    reduce_tile<W, T>(sources, n, tile);
    for (int k = 0; k < output_count; ++k) {
      std::memcpy(static_cast<T*>(outputs[k]) + output_begin + done, tile, n * sizeof(T));
    }
  }
}

template <class T>
void reduce_world(int world, const void* const* inputs, std::size_t begin, std::size_t count, void* const* outputs,
                  int output_count, std::size_t output_begin) {
  switch (world) {
    case 1: return reduce<1, T>(inputs, begin, count, outputs, output_count, output_begin);
    case 2: return reduce<2, T>(inputs, begin, count, outputs, output_count, output_begin);
    case 4: return reduce<4, T>(inputs, begin, count, outputs, output_count, output_begin);
    case 8: return reduce<8, T>(inputs, begin, count, outputs, output_count, output_begin);
  }
}

}  // namespace

void tree_reduce(DType dtype, int world, const void* const* inputs, std::size_t begin, std::size_t count,
                 void* const* outputs, int output_count, std::size_t output_begin) {
  const ScopedIeeeMode ieee;
  switch (dtype) {
    case DType::kFloat32:
      return reduce_world<float>(world, inputs, begin, count, outputs, output_count, output_begin);
    case DType::kFloat16:
      return reduce_world<Float16>(world, inputs, begin, count, outputs, output_count, output_begin);
    case DType::kBFloat16:
      return reduce_world<BFloat16>(world, inputs, begin, count, outputs, output_count, output_begin);
  }
}

}  // namespace jaxdp::JAXDP_LEVEL
