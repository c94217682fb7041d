#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace seqmix::inline v0 {

/// Sixteen bits as CUDA kernels store activations: the upper half of a float. A plain number here, with conversions
/// that round to nearest, ties to even; arithmetic is done in float. Trivial, so that it may lie in shared memory.
struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float x) noexcept {
    auto const u = std::bit_cast<std::uint32_t>(x);
    bits = x != x ? std::uint16_t(u >> 16 | 64U) : std::uint16_t((u + 0x7fffU + (u >> 16 & 1U)) >> 16);
  }
  explicit operator float() const noexcept { return std::bit_cast<float>(std::uint32_t(bits) << 16); }
};

/// IEEE binary16: eleven significant bits, at most 65504; what is larger becomes infinite.
struct float16 {
  std::uint16_t bits;

  float16() = default;
  explicit float16(float x) noexcept {
    auto const u = std::bit_cast<std::uint32_t>(x);
    auto const sign = std::uint16_t(u >> 16 & 0x8000U);
    if (x != x) {
      bits = std::uint16_t(sign | 0x7e00U);
    } else if (std::abs(x) >= 65520.0F) {
      bits = std::uint16_t(sign | 0x7c00U);
    } else {
      // A multiple of the spacing around x, which is 2^-24 for the smallest ones.
      int exponent = 0;
      std::frexp(x, &exponent);
      int const spacing = (x == 0.0F || exponent < -13 ? -13 : exponent) - 11;
      auto const units = std::uint32_t(std::nearbyint(std::ldexp(std::abs(x), -spacing)));
      bits = std::uint16_t(sign | (units + (std::uint32_t(spacing + 24) << 10)));
    }
  }
  explicit operator float() const noexcept {
    auto const magnitude = bits & 0x7fffU;
    float const sign = bits & 0x8000U ? -1.0F : 1.0F;
    if (magnitude >= 0x7c00U)
      return magnitude == 0x7c00U ? sign * std::bit_cast<float>(0x7f800000U) : std::bit_cast<float>(0x7fc00000U);
    auto const exponent = int(magnitude >> 10), fraction = int(magnitude & 0x3ffU);
    return sign *
           (exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), exponent - 25));
  }
};

namespace detail {
template <class T>
struct accumulator {
  using type = T;
};
template <>
struct accumulator<bfloat16> {
  using type = float;
};
template <>
struct accumulator<float16> {
  using type = float;
};
}  // namespace detail

/// What sums, states, decays and parameters are kept in where activations are stored as T: float for sixteen bits,
/// else T itself.
template <class T>
using accumulator_t = typename detail::accumulator<T>::type;

}  // namespace seqmix::inline v0
