#include <array>
#include <cmath>
#include <cstdint>

#include <doctest/doctest.h>

#include <seqmix/tensor/philox.hpp>

using seqmix::philox4x32;
using seqmix::random_stream;
using words = std::array<std::uint32_t, 4>;

DOCTEST_TEST_CASE("philox: the three known answers of its authors") {
  DOCTEST_CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr std::uint32_t ones = 0xffffffffu;
  DOCTEST_CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
                words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  DOCTEST_CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
                words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

DOCTEST_TEST_CASE("philox: a stream is a pure function of seed, name and index") {
  random_stream const a(7, "layers.0.mixer.q"), again(7, "layers.0.mixer.q");
  DOCTEST_CHECK(a.bits(5) == again.bits(5));
  DOCTEST_CHECK(a.bits(5) != a.bits(6));
  DOCTEST_CHECK(a.bits(5) != random_stream(8, "layers.0.mixer.q").bits(5));
  DOCTEST_CHECK(a.bits(5) != random_stream(7, "layers.0.mixer.k").bits(5));
}

DOCTEST_TEST_CASE("philox: all 64 bits of seed, stream and index count") {
  std::uint64_t const high = std::uint64_t(1) << 32;
  auto const base = random_stream(1, 2).bits(3);
  DOCTEST_CHECK(random_stream(1 + high, 2).bits(3) != base);
  DOCTEST_CHECK(random_stream(1, 2 + high).bits(3) != base);
  DOCTEST_CHECK(random_stream(1, 2).bits(3 + high) != base);
}

DOCTEST_TEST_CASE("philox: uniform numbers stay inside (0, 1) and have the right moments") {
  random_stream const stream(1, "uniform");
  int const count = 20000;
  double sum = 0, squares = 0, least = 1, most = 0;
  for (int i = 0; i < count; ++i) {
    double const u = stream.uniform(std::uint64_t(i));
    least = u < least ? u : least;
    most = u > most ? u : most;
    sum += u;
    squares += u * u;
  }
  double const mean = sum / count;
  DOCTEST_CHECK(least > 0);
  DOCTEST_CHECK(most < 1);
  DOCTEST_CHECK(std::abs(mean - 0.5) < 5 / std::sqrt(12.0 * count));  // five standard errors
  DOCTEST_CHECK(std::abs(squares / count - 1.0 / 3.0) < 0.011);
  DOCTEST_CHECK(stream.uniform(9, -2, 6) == -2 + 8 * stream.uniform(9));
}

DOCTEST_TEST_CASE("philox: normal numbers have mean 0 and variance 1, neighbours are uncorrelated") {
  random_stream const stream(2, "normal");
  int const count = 20000;
  double sum = 0, squares = 0, fourth = 0, products = 0, previous = 0;
  for (int i = 0; i < count; ++i) {
    double const z = stream.normal(std::uint64_t(i));
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    products += z * previous;
    previous = z;
  }
  double const error = 5 / std::sqrt(double(count));  // five standard errors of the mean
  DOCTEST_CHECK(std::abs(sum / count) < error);
  DOCTEST_CHECK(std::abs(squares / count - 1) < error * std::sqrt(2.0));
  DOCTEST_CHECK(std::abs(fourth / count - 3) < error * std::sqrt(96.0));
  DOCTEST_CHECK(std::abs(products / count) < error);
}

DOCTEST_TEST_CASE("philox: below is the high half of the 128-bit product of the bits and the count") {
  random_stream const stream(3, "below");
  for (std::uint64_t count :
       {std::uint64_t(1), std::uint64_t(3), std::uint64_t(256), std::uint64_t(0xfedcba9876543210)})
    for (std::uint64_t i = 0; i < 200; ++i) {
      // The product by long multiplication, one bit of the count at a time.
      std::uint64_t const bits = stream.bits(i);
      std::uint64_t low = 0, high = 0;
      for (int bit = 0; bit < 64; ++bit)
        if (count >> bit & 1u) {
          std::uint64_t const before = low;
          low += bits << bit;
          high += (bit == 0 ? 0 : bits >> (64 - bit)) + (low < before ? 1u : 0u);
        }
      DOCTEST_CHECK(stream.below(i, count) == high);
      DOCTEST_CHECK(stream.below(i, count) < count);
    }
}
