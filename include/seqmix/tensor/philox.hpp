#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// Philox 4x32-10, a counter-based generator: the bits are a pure function of (counter, key), so they do not depend
/// on threads, order or device. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
/// (SC 2011), section 5.4.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    auto const p0 = std::uint64_t(0xD2511F53u) * counter[0];
    auto const p1 = std::uint64_t(0xCD9E8D57u) * counter[2];
    counter = {std::uint32_t(p1 >> 32) ^ counter[1] ^ key[0], std::uint32_t(p1),
               std::uint32_t(p0 >> 32) ^ counter[3] ^ key[1], std::uint32_t(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// An addressable stream of random numbers: `stream` names what they are for, the index says which one.
class random_stream {
 public:
  constexpr random_stream(std::uint64_t seed, std::uint64_t stream) noexcept : seed_(seed), stream_(stream) {}
  /// A stream named by a text (FNV-1a), as parameters are: adding one tensor does not move the others' numbers.
  constexpr random_stream(std::uint64_t seed, std::string_view name) noexcept
      : seed_(seed), stream_(1469598103934665603u) {
    for (char c : name) stream_ = (stream_ ^ std::uint64_t(static_cast<unsigned char>(c))) * 1099511628211u;
  }

  constexpr std::uint64_t bits(std::uint64_t index) const noexcept {
    auto const word = philox4x32(
        {std::uint32_t(index), std::uint32_t(index >> 32), std::uint32_t(stream_), std::uint32_t(stream_ >> 32)},
        {std::uint32_t(seed_), std::uint32_t(seed_ >> 32)});
    return std::uint64_t(word[0]) | std::uint64_t(word[1]) << 32;
  }
  /// Uniform in (0, 1): never 0, never 1.
  constexpr double uniform(std::uint64_t index) const noexcept {
    return (double(bits(index) >> 12) + 0.5) * 0x1p-52;
  }
  constexpr double uniform(std::uint64_t index, double low, double high) const noexcept {
    return low + (high - low) * uniform(index);
  }
  /// Standard normal (Box and Muller, one value an index).
  double normal(std::uint64_t index) const noexcept {
    double const radius = std::sqrt(-2.0 * std::log(uniform(2 * index)));
    return radius * std::cos(2.0 * std::numbers::pi * uniform(2 * index + 1));
  }
  /// Uniform in [0, count): multiply-shift on 64 bits, bias below count / 2^64.
  constexpr std::uint64_t below(std::uint64_t index, std::uint64_t count) const noexcept {
    auto const word = bits(index);
    auto const high = word >> 32, low = word & 0xffffffffu;
    auto const count_high = count >> 32, count_low = count & 0xffffffffu;
    auto const middle = high * count_low + ((low * count_low) >> 32);
    auto const cross = low * count_high + (middle & 0xffffffffu);
    return high * count_high + (middle >> 32) + (cross >> 32);
  }

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
};

}  // namespace seqmix::inline v0
