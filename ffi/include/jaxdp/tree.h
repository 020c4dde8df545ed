// The arithmetic of the strict sum, once for every target.
//
// sum<W>(x) is x[0] for W = 1, else sum of the first half + sum of the second half. Every + is one
// IEEE add in the array's own dtype, round to nearest even. The 16-bit adds go through float32 and
// round once: a float32 significand has 24 >= 2p + 2 bits for p = 11 and p = 8, so the second
// rounding cannot change the result (Figueroa, "When is double rounding innocuous?", 1995).
// A NaN result is the canonical quiet NaN. Written without branches so that compilers vectorise it.
#pragma once

#include <cstdint>
#include <cstring>

#include "jaxdp/vendor.h"

namespace jaxdp {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <class To, class From>
JAXDP_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

JAXDP_HOST_DEVICE float widen(BFloat16 x) {
  return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

JAXDP_HOST_DEVICE float widen(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7FFFu;
  // Moving the fields leaves the exponent 112 too small; the multiply is exact, subnormals included.
  const std::uint32_t finite = bit_cast<std::uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f);
  const std::uint32_t special = 0x7F800000u | (magnitude << 13);
  return bit_cast<float>(sign | (magnitude >= 0x7C00u ? special : finite));
}

template <class T>
struct Narrow;

template <>
struct Narrow<BFloat16> {
  JAXDP_HOST_DEVICE static BFloat16 round(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
  }
};

template <>
struct Narrow<Float16> {
  JAXDP_HOST_DEVICE static Float16 round(float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Normal results: rebias, round at bit 13; a carry out of the significand gives infinity.
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal results: the spacing of floats in [0.5, 1) is 2^-24, that of subnormal halves.
    const std::uint32_t subnormal =
        bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
    std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x47800000u ? 0x7C00u : result;
    result |= sign;
    return {static_cast<std::uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : result)};
  }
};

JAXDP_HOST_DEVICE float add(float a, float b) { return a + b; }
JAXDP_HOST_DEVICE BFloat16 add(BFloat16 a, BFloat16 b) {
  return Narrow<BFloat16>::round(widen(a) + widen(b));
}
JAXDP_HOST_DEVICE Float16 add(Float16 a, Float16 b) {
  return Narrow<Float16>::round(widen(a) + widen(b));
}

// The 16-bit adds are canonical already. A float32 NaN stays a NaN up to the root, so that one
// selection there is enough.
JAXDP_HOST_DEVICE float canonical(float x) { return x == x ? x : bit_cast<float>(0x7FC00000u); }
JAXDP_HOST_DEVICE BFloat16 canonical(BFloat16 x) { return x; }
JAXDP_HOST_DEVICE Float16 canonical(Float16 x) { return x; }

template <int W, class T>
JAXDP_HOST_DEVICE T subtree(const T* x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    return add(subtree<W / 2>(x), subtree<W / 2>(x + W / 2));
  }
}

// T over W values, in rank order. W = 1 copies bits.
template <int W, class T>
JAXDP_HOST_DEVICE T tree_sum(const T* x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    return canonical(subtree<W>(x));
  }
}

}  // namespace jaxdp
