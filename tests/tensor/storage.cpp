#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include <seqmix/tensor/storage.hpp>

namespace {

using namespace seqmix;

/// A floating-point format by the definition of IEEE 754: sign, exponent bits, fraction bits.
template <class T>
constexpr int fraction_bits = 7;
template <>
constexpr int fraction_bits<float16> = 10;

/// What a pattern stands for, from its three fields.
template <class T>
double value_of(std::uint32_t pattern) {
  constexpr int fractions = fraction_bits<T>, exponents = 15 - fractions, bias = (1 << (exponents - 1)) - 1;
  int const exponent = int(pattern >> fractions & ((1U << exponents) - 1));
  double const fraction = double(pattern & ((1U << fractions) - 1)), sign = pattern & 0x8000U ? -1 : 1;
  if (exponent == (1 << exponents) - 1)
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fractions);
  return sign * std::ldexp(fraction + double(1 << fractions), exponent - bias - fractions);
}

template <class T>
T with_bits(std::uint32_t pattern) {
  T x;
  x.bits = std::uint16_t(pattern);
  return x;
}

template <class T>
constexpr std::uint32_t infinity_bits = ((1U << (15 - fraction_bits<T>)) - 1) << fraction_bits<T>;

template <class T>
void widens() {
  long wrong = 0;
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    double const want = value_of<T>(pattern);
    auto const got = float(with_bits<T>(pattern));
    bool const same =
        std::isnan(want) ? std::isnan(got) : double(got) == want && std::signbit(got) == std::signbit(want);
    wrong += !same;
  }
  DOCTEST_CHECK(wrong == 0);
}
DOCTEST_TEST_CASE("sixteen-bit numbers: every pattern stands for what its sign, exponent and fraction say") {
  widens<bfloat16>();
  widens<float16>();
}

template <class T>
void survives() {
  long wrong = 0;
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    auto const back = T(float(with_bits<T>(pattern)));
    wrong += std::isnan(value_of<T>(pattern)) ? !std::isnan(float(back)) : back.bits != pattern;
  }
  DOCTEST_CHECK(wrong == 0);
}
DOCTEST_TEST_CASE("sixteen-bit numbers: what is stored once stays the same, NaN stays NaN") {
  survives<bfloat16>();
  survives<float16>();
}

/// Between every two neighbours of one sign, and behind the largest number, whose neighbour would be 2^(emax + 1):
/// the middle goes to the even pattern, all else to the nearer one.
template <class T>
void rounds() {
  long wrong = 0;
  for (std::uint32_t sign : {0U, 0x8000U})
    for (std::uint32_t low = 0; low < infinity_bits<T>; ++low) {
      double const step = value_of<T>(low) - value_of<T>(low == 0 ? 1 : low - 1);
      double const below = value_of<T>(low);
      double const above = low + 1 < infinity_bits<T> ? value_of<T>(low + 1) : below + std::fabs(step);
      auto const middle = float(0.5 * (below + above));
      auto const expect = [&](float x, std::uint32_t pattern) {
        wrong += T(sign ? -x : x).bits != (pattern | sign);
      };
      expect(std::nextafter(float(below), std::numeric_limits<float>::infinity()), low);
      expect(std::nextafter(middle, 0.0F), low);
      expect(middle, low + low % 2);
      expect(std::nextafter(middle, std::numeric_limits<float>::infinity()), low + 1);
      if (low + 1 < infinity_bits<T>) expect(std::nextafter(float(above), 0.0F), low + 1);
    }
  DOCTEST_CHECK(wrong == 0);
}
DOCTEST_TEST_CASE(
    "sixteen-bit numbers: floats are rounded to the nearest, halves to even, beyond the last to infinity") {
  rounds<bfloat16>();
  rounds<float16>();
}

DOCTEST_TEST_CASE("sixteen-bit numbers: zeros keep their sign, float's extremes become the nearest there is") {
  DOCTEST_CHECK(bfloat16(0.0F).bits == 0);
  DOCTEST_CHECK(bfloat16(-0.0F).bits == 0x8000U);
  DOCTEST_CHECK(float16(0.0F).bits == 0);
  DOCTEST_CHECK(float16(-0.0F).bits == 0x8000U);
  constexpr float inf = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max(),
                  smallest = std::numeric_limits<float>::denorm_min();
  DOCTEST_CHECK(bfloat16(inf).bits == 0x7f80U);
  DOCTEST_CHECK(bfloat16(-largest).bits == 0xff80U);
  DOCTEST_CHECK(bfloat16(smallest).bits == 0);
  DOCTEST_CHECK(float16(largest).bits == 0x7c00U);
  DOCTEST_CHECK(float16(-inf).bits == 0xfc00U);
  DOCTEST_CHECK(float16(-smallest).bits == 0x8000U);
  // NaN whose payload lies in the lower half alone.
  auto const hidden = std::bit_cast<float>(0x7f800001U);
  DOCTEST_CHECK(std::isnan(float(bfloat16(hidden))));
  DOCTEST_CHECK(std::isnan(float(float16(hidden))));
}

DOCTEST_TEST_CASE("sixteen-bit numbers: trivial, two bytes, summed in float") {
  static_assert(std::is_trivial_v<bfloat16> && sizeof(bfloat16) == 2 && alignof(bfloat16) == 2);
  static_assert(std::is_trivial_v<float16> && sizeof(float16) == 2 && alignof(float16) == 2);
  static_assert(std::is_same_v<accumulator_t<bfloat16>, float> && std::is_same_v<accumulator_t<float16>, float>);
  static_assert(std::is_same_v<accumulator_t<float>, float> && std::is_same_v<accumulator_t<double>, double>);
}

}  // namespace
