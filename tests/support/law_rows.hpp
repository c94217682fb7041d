#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "random_numbers.hpp"
#include <seqmix/kernels/cpu/rows.hpp>

namespace seqmix::testing {

template <class T>
using arrays = std::vector<std::vector<T>>;

inline std::vector<double> normals(index_t n, std::uint64_t seed, double size = 1.0) {
  random_numbers random(seed);
  std::vector<double> x(std::size_t(n), 0.0);
  for (auto& e : x) e = size * random.normal();
  return x;
}
inline std::vector<double> nothing_written(index_t n) {
  return std::vector<double>(std::size_t(n), std::numeric_limits<double>::quiet_NaN());
}
inline double greatest_error(std::vector<double> const& a, std::vector<double> const& b) {
  DOCTEST_REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const d = std::abs(a[i] - b[i]);
    if (!(d <= most)) most = d;
    if (d != d) return d;
  }
  return most;
}

/// Calls f(device, arena) dry to plan and then for real in memory filled with NaN.
template <class F>
void with_planned_memory(int threads, F const& f) {
  auto plan = arena::measure();
  f(device::cpu{threads, true}, plan);
  buffer<std::byte> block(plan.peak());
  block.fill(std::byte(0xff));
  arena ws(block);
  f(device::cpu{threads}, ws);
}

/// forward(inputs of duals) is the reference; backward(cotangent) gives one derivative array per input. Both must
/// agree along five random directions.
template <class Forward, class Backward>
void check_pullback(arrays<double> const& inputs, Forward const& forward, Backward const& backward,
                    double tolerance = 1e-12) {
  using number = dual<double, 1>;
  random_numbers random(97);
  for (int direction = 0; direction < 5; ++direction) {
    arrays<number> x(inputs.size());
    arrays<double> slopes(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i)
      for (double e : inputs[i]) {
        slopes[i].push_back(random.normal());
        x[i].emplace_back(e);
        x[i].back().slope[0] = slopes[i].back();
      }
    std::vector<number> const y = forward(x);
    auto const cotangent = normals(index_t(y.size()), 98);
    arrays<double> const d = backward(cotangent);
    DOCTEST_REQUIRE(d.size() == inputs.size());
    double expected = 0, got = 0, absolute = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      expected += cotangent[i] * y[i].slope[0];
      absolute += std::abs(cotangent[i] * y[i].slope[0]);
    }
    for (std::size_t i = 0; i < d.size(); ++i) {
      DOCTEST_REQUIRE(d[i].size() == slopes[i].size());
      for (std::size_t j = 0; j < d[i].size(); ++j) got += d[i][j] * slopes[i][j];
    }
    DOCTEST_CHECK_MESSAGE(std::abs(got - expected) <= tolerance * absolute, "direction ", direction,
                          ": backward gives ", got, ", the reference ", expected);
  }
}

}  // namespace seqmix::testing
