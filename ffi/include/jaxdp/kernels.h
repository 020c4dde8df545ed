// Host kernels: what one rank, or one worker, does to a run of elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxdp {

enum class DType : std::uint32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

inline constexpr int kMaximumWorld = 8;

inline std::size_t byte_width(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Writes T over inputs[0..world) at elements [begin, begin + count) to each of outputs[0..output_count),
// at element output_begin on. World is 1, 2, 4 or 8. An output may be the very array of an input when
// output_begin == begin: every input of an element is read before any output of it is written.
void tree_reduce(DType dtype, int world, const void* const* inputs, std::size_t begin, std::size_t count,
                 void* const* outputs, int output_count, std::size_t output_begin);

}  // namespace jaxdp
