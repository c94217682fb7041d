#pragma once

#include <cstdint>
#include <random>

#include <seqmix/tensor/buffer.hpp>

namespace seqmix::testing {

/// Test data from a seed: the same numbers with every compiler and standard library.
class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high).
  double uniform(double low, double high) { return low + (high - low) * (double(engine_() >> 11) * 0x1p-53); }
  /// Near a standard normal: the sum of twelve uniform numbers.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform(0, 1);
    return sum;
  }
  index_t below(index_t n) { return index_t(engine_() % std::uint64_t(n)); }

  template <class T = double>
  buffer<T> normals(index_t count) {
    buffer<T> result(count);
    for (auto& x : result) x = T(normal());
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace seqmix::testing
