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
/// log(softplus(x)), finite where softplus underflows: tends to x.
template <std::floating_point T>
T log_softplus(T x) noexcept {
  return x < T(-30) ? x : std::log(softplus(x));
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
  return chain(x, log_softplus(x.value), x.value < T(-30) ? T(1) : sigmoid(x.value) / softplus(x.value));
}
template <class T, std::size_t N>
dual<T, N> log_sigmoid(dual<T, N> const& x) noexcept {
  return chain(x, log_sigmoid(x.value), sigmoid(-x.value));
}
template <class T, std::size_t N>
dual<T, N> log1mexp(dual<T, N> const& x) noexcept {
  return chain(x, log1mexp(x.value), T(-1) / std::expm1(-x.value));
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
