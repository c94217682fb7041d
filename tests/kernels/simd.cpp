#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

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
