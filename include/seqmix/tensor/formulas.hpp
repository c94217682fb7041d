#pragma once

#include <cmath>
#include <limits>

#include <seqmix/tensor/dual.hpp>

/// The functions policies write their formulas with, for float, double and dual numbers; each is finite wherever
/// its result is, and its derivative too.
namespace seqmix::inline v0 {

template <std::floating_point T>
T exp(T x) noexcept {
  return std::exp(x);
}
template <std::floating_point T>
T log(T x) noexcept {
  return std::log(x);
}
template <std::floating_point T>
T sqrt(T x) noexcept {
  return std::sqrt(x);
}
template <std::floating_point T>
T tanh(T x) noexcept {
  return std::tanh(x);
}
/// 1 / (1 + e^-x)
template <std::floating_point T>
T sigmoid(T x) noexcept {
  return x >= 0 ? T(1) / (T(1) + std::exp(-x)) : std::exp(x) / (T(1) + std::exp(x));
}
/// x sigmoid(x)
template <std::floating_point T>
T silu(T x) noexcept {
  return x * sigmoid(x);
}
/// log(1 + e^x); softplus(-20) keeps all its digits, softplus(1000) is 1000.
template <std::floating_point T>
T softplus(T x) noexcept {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
/// The x with softplus(x) = y, for y > 0.
template <std::floating_point T>
T inverse_softplus(T y) noexcept {
  return y + std::log(-std::expm1(-y));
}
/// softplus(a) - softplus(b) to rounding of the result where both are huge.
template <std::floating_point T>
T softplus_difference(T a, T b) noexcept {
  T const large = (a > 0 ? a : T(0)) - (b > 0 ? b : T(0));
  return large + (std::log1p(std::exp(-std::abs(a))) - std::log1p(std::exp(-std::abs(b))));
}
/// log(softplus(x)), finite where softplus underflows: tends to x.
template <std::floating_point T>
T log_softplus(T x) noexcept {
  return x < T(-30) ? x : std::log(softplus(x));
}
/// Its derivative sigmoid(x) / softplus(x), which tends to 1 where both underflow.
template <std::floating_point T>
T log_softplus_slope(T x) noexcept {
  return x < T(-30) ? T(1) : sigmoid(x) / softplus(x);
}
/// log(sigmoid(x)) = -softplus(-x)
template <std::floating_point T>
T log_sigmoid(T x) noexcept {
  return -softplus(-x);
}
/// log(1 - e^x) for x <= 0
template <std::floating_point T>
T log1mexp(T x) noexcept {
  return x > T(-0.6931471805599453) ? std::log(-std::expm1(x)) : std::log1p(-std::exp(x));
}
/// 1 - e^x, all digits for x near 0
template <std::floating_point T>
T one_minus_exp(T x) noexcept {
  return -std::expm1(x);
}
/// log(e^a + e^b); either may be -inf
template <std::floating_point T>
T log_add_exp(T a, T b) noexcept {
  T const most = a > b ? a : b, least = a > b ? b : a;
  return most == least ? most + T(0.6931471805599453) : most + std::log1p(std::exp(least - most));
}
/// sqrt(x) whose derivative is at most 1000: finite at x = 0. Source: De et al., "Griffin" (arXiv 2402.19427),
/// appendix A, and its authors' code.
template <std::floating_point T>
T bounded_sqrt(T x) noexcept {
  return std::sqrt(x);
}
template <std::floating_point T>
T bounded_sqrt_slope(T x) noexcept {
  T const root = std::sqrt(x);
  return root < T(0.0005) ? T(1000) : T(0.5) / root;
}

/// log(floor + (1 - floor) sigmoid(x)) for floor in [0, 1]: never above 0, all digits on both sides, and the plain
/// log(sigmoid(x)) for floor 0.
template <std::floating_point T>
T log_floored_sigmoid(T x, T floor) noexcept {
  T const above = floor > T(1) ? T(0) : T(1) - floor;
  T const missing = above * sigmoid(-x);
  if (missing <= T(0.5)) return std::log1p(-missing);
  return log_add_exp(std::log(floor), std::log(above) + log_sigmoid(x));
}
template <class T>
struct log_floored_sigmoid_slopes {
  T x, floor;
};
/// Its derivatives; the one in `floor` is at most 1e12, reached where the sigmoid vanishes above no floor.
template <std::floating_point T>
log_floored_sigmoid_slopes<T> slopes_of_log_floored_sigmoid(T x, T floor) noexcept {
  T const value = log_floored_sigmoid(x, floor), miss = sigmoid(-x);
  T const above = floor > T(1) ? T(0) : T(1) - floor;
  T const steep = value < T(-27.631021115928547) ? T(1e12) : std::exp(-value);
  return {std::exp(std::log(above) + log_sigmoid(x) - value) * miss, miss * steep};
}

/// f(a, b) with value v and derivatives da and db.
template <class T, std::size_t N>
constexpr dual<T, N> chain(dual<T, N> const& a, dual<T, N> const& b, T v, T da, T db) noexcept {
  return chain(a, v, da) + chain(b, T(0), db);
}

template <class T, std::size_t N>
dual<T, N> exp(dual<T, N> const& x) noexcept {
  T const e = std::exp(x.value);
  return chain(x, e, e);
}
template <class T, std::size_t N>
dual<T, N> log(dual<T, N> const& x) noexcept {
  return chain(x, std::log(x.value), T(1) / x.value);
}
template <class T, std::size_t N>
dual<T, N> sqrt(dual<T, N> const& x) noexcept {
  T const r = std::sqrt(x.value);
  return chain(x, r, T(0.5) / r);
}
template <class T, std::size_t N>
dual<T, N> tanh(dual<T, N> const& x) noexcept {
  T const t = std::tanh(x.value);
  return chain(x, t, T(1) - t * t);
}
template <class T, std::size_t N>
dual<T, N> sigmoid(dual<T, N> const& x) noexcept {
  return chain(x, sigmoid(x.value), sigmoid(x.value) * sigmoid(-x.value));
}
template <class T, std::size_t N>
dual<T, N> silu(dual<T, N> const& x) noexcept {
  return x * sigmoid(x);
}
template <class T, std::size_t N>
dual<T, N> softplus(dual<T, N> const& x) noexcept {
  return chain(x, softplus(x.value), sigmoid(x.value));
}
template <class T, std::size_t N>
dual<T, N> log_softplus(dual<T, N> const& x) noexcept {
  return chain(x, log_softplus(x.value), log_softplus_slope(x.value));
}
template <class T, std::size_t N>
dual<T, N> log_sigmoid(dual<T, N> const& x) noexcept {
  return chain(x, log_sigmoid(x.value), sigmoid(-x.value));
}
template <class T, std::size_t N>
dual<T, N> log1mexp(dual<T, N> const& x) noexcept {
  return chain(x, log1mexp(x.value), T(-1) / std::expm1(-x.value));
}
template <class T, std::size_t N>
dual<T, N> softplus_difference(dual<T, N> const& a, dual<T, N> const& b) noexcept {
  return chain(a, b, softplus_difference(a.value, b.value), sigmoid(a.value), -sigmoid(b.value));
}
template <class T, std::size_t N>
dual<T, N> one_minus_exp(dual<T, N> const& x) noexcept {
  return chain(x, one_minus_exp(x.value), -std::exp(x.value));
}
template <class T, std::size_t N>
dual<T, N> log_add_exp(dual<T, N> const& a, dual<T, N> const& b) noexcept {
  T const apart = a.value == b.value ? T(0) : a.value - b.value;  // -inf less -inf
  return chain(a, b, log_add_exp(a.value, b.value), sigmoid(apart), sigmoid(-apart));
}
template <class T, std::size_t N>
dual<T, N> bounded_sqrt(dual<T, N> const& x) noexcept {
  return chain(x, bounded_sqrt(x.value), bounded_sqrt_slope(x.value));
}
template <class T, std::size_t N>
dual<T, N> log_floored_sigmoid(dual<T, N> const& x, dual<T, N> const& floor) noexcept {
  auto const slope = slopes_of_log_floored_sigmoid(x.value, floor.value);
  return chain(x, floor, log_floored_sigmoid(x.value, floor.value), slope.x, slope.floor);
}

/// Log-decays are kept in [bound, 0]; beyond it e^g is 0 for every purpose and differences of sums stay exact.
template <class T>
inline constexpr T log_decay_bound = T(-1024);
template <>
inline constexpr float log_decay_bound<float> = -128.0f;

/// The bound applied: its derivative is 0 where it acts, NaN stays NaN.
template <std::floating_point T>
T bounded_log_decay(T g) noexcept {
  return g < log_decay_bound<T> ? log_decay_bound<T> : g;
}
template <class T, std::size_t N>
dual<T, N> bounded_log_decay(dual<T, N> const& g) noexcept {
  return g.value < log_decay_bound<T> ? dual<T, N>(log_decay_bound<T>) : g;
}

}  // namespace seqmix::inline v0
