#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/selectors/softmax.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/philox.hpp>

// The vector functions of the instruction set this file is compiled for.

namespace {

using namespace seqmix;
using isa = device::cpu::isa;

template <class T>
T exp_of(T x) {
  std::vector<T> v{x};
  simd::map<isa>(
      1, [](auto const& e) { return simd::exp<isa, T>(e); }, v.data(), v.data());
  return v[0];
}
template <class T>
T weight_of(T x) {
  std::vector<T> v{x};
  simd::map<isa>(
      1, [](auto const& e) { return simd::exp_of_weight<isa, T>(e); }, v.data(), v.data());
  return v[0];
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("the vector exponential is right to a few units over its whole range", T, float,
                           double) {
  double const low = std::is_same_v<T, float> ? -87 : -708, high = std::is_same_v<T, float> ? 88 : 709;
  double worst = 0;
  for (int i = 0; i <= 20000; ++i) {
    T const x = T(low + (high - low) * i / 20000.0);
    long double const right = std::exp(static_cast<long double>(x));
    worst = std::max(worst, double(std::abs((static_cast<long double>(exp_of(x)) - right) / right)));
  }
  DOCTEST_CHECK(worst <= 4 * double(std::numeric_limits<T>::epsilon()));
  DOCTEST_CHECK(exp_of(T(0)) == T(1));
  DOCTEST_CHECK(exp_of(-std::numeric_limits<T>::infinity()) == T(0));
  DOCTEST_CHECK(exp_of(T(-2000)) == T(0));
  DOCTEST_CHECK(exp_of(T(2000)) == std::numeric_limits<T>::infinity());
  DOCTEST_CHECK(exp_of(std::numeric_limits<T>::infinity()) == std::numeric_limits<T>::infinity());
  DOCTEST_CHECK(std::isnan(exp_of(std::numeric_limits<T>::quiet_NaN())));
}

DOCTEST_TEST_CASE_TEMPLATE("the exponential of weights is as right up to 1, vanishes below, and keeps every NaN", T,
                           float, double) {
  double const low = std::is_same_v<T, float> ? -87 : -708;
  double worst = 0;
  for (int i = 0; i <= 20000; ++i) {
    T const x = T(low + (1 - low) * i / 20000.0);
    long double const right = std::exp(static_cast<long double>(x));
    worst = std::max(worst, double(std::abs((static_cast<long double>(weight_of(x)) - right) / right)));
  }
  DOCTEST_CHECK(worst <= 2 * double(std::numeric_limits<T>::epsilon()));
  DOCTEST_CHECK(weight_of(T(0)) == T(1));
  DOCTEST_CHECK(weight_of(-std::numeric_limits<T>::infinity()) == T(0));
  DOCTEST_CHECK(weight_of(T(low - 2)) == T(0));
  DOCTEST_CHECK(weight_of(T(-1e30)) == T(0));
  // Whatever a NaN holds: its bits must not turn into a number on the way.
  using bits = std::conditional_t<std::is_same_v<T, float>, std::uint32_t, std::uint64_t>;
  auto const quiet = std::bit_cast<bits>(std::numeric_limits<T>::quiet_NaN());
  for (int i = 0; i < 16; ++i) DOCTEST_CHECK(std::isnan(weight_of(std::bit_cast<T>(bits(quiet + bits(i))))));
  DOCTEST_CHECK(std::isnan(weight_of(-std::numeric_limits<T>::quiet_NaN())));
}

DOCTEST_TEST_CASE_TEMPLATE("a softmax over many rows at once is the softmax of each row", T, float, double) {
  constexpr index_t width = 2 * isa::lanes<T>, most = 3 * isa::lanes<T> + 2;
  random_stream const random(5, "scores");
  for (index_t rows : {index_t(1), index_t(isa::lanes<T>), most}) {
    std::vector<selectors::detail::softmax_run<T>> together{std::size_t(rows)}, alone{std::size_t(rows)};
    std::vector<T> factor(std::size_t(rows), T(0));
    for (int tile = 0; tile < 4; ++tile) {
      std::vector<T> score(std::size_t(rows * width), T(0)), weight;
      for (std::size_t i = 0; i < score.size(); ++i)
        score[i] = T(3 * random.normal(std::uint64_t(tile) * score.size() + i));
      if (tile == 0) std::fill_n(score.begin(), width, -std::numeric_limits<T>::infinity());
      if (tile == 3) score[1] = std::numeric_limits<T>::quiet_NaN();
      weight = score;
      selectors::detail::absorb_rows<isa>(
          [&](index_t i) -> auto& { return together[std::size_t(i)]; }, weight.data(), width, width, rows,
          factor.data());
      for (index_t i = 0; i < rows; ++i) {
        auto& run = alone[std::size_t(i)];
        T* const row = score.data() + i * width;
        T const scale = run.template absorb<isa>(row, row, width);
        bool const spoiled = i == 0 && tile == 3;
        auto const& found = together[std::size_t(i)];
        DOCTEST_CHECK(found.most == run.most);
        DOCTEST_CHECK((spoiled ? std::isnan(found.sum) && std::isnan(run.sum) : found.sum == run.sum));
        DOCTEST_CHECK(factor[std::size_t(i)] == scale);
        for (index_t j = 0; j < width && !spoiled; ++j) DOCTEST_CHECK(weight[std::size_t(i * width + j)] == row[j]);
      }
    }
  }
}

DOCTEST_TEST_CASE_TEMPLATE("an element's result does not depend on its place in a vector or a tail", T, float,
                           double) {
  for (index_t n = 1; n <= 40; ++n) {
    std::vector<T> x(std::size_t(n), T(-1.2345)), y(std::size_t(n), T(0)), guard(std::size_t(n) + 1, T(7));
    simd::map<isa>(
        n, [](auto const& e) { return e * simd::sigmoid<isa, T>(e); }, guard.data(), x.data());
    for (index_t i = 0; i < n; ++i) DOCTEST_CHECK(guard[std::size_t(i)] == guard[0]);
    DOCTEST_CHECK(guard.back() == T(7));  // nothing is written behind the end
    DOCTEST_CHECK(std::abs(double(guard[0]) - double(silu(T(-1.2345)))) <= 1e-6);
    T const sum = simd::map_sum<isa, T>(
        n, [](auto const& e) { return e; }, x.data());
    DOCTEST_CHECK(std::abs(double(sum) + 1.2345 * double(n)) <= 1e-5 * double(n));
    T const shifted = simd::map_sum_shifted<isa>(n, T(-1.2345), x.data());
    DOCTEST_CHECK(shifted == T(n));
  }
}
