#pragma once

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <type_traits>

namespace seqmix::inline v0 {

/// A number with its derivatives in N directions: forward-mode differentiation of any formula written as a
/// template. It is the oracle of every gradient and differentiates a gate that comes with its formula alone.
template <class T, std::size_t N>
struct dual {
  T value{};
  std::array<T, N> slope{};

  constexpr dual() = default;
  template <class U>
  requires std::is_arithmetic_v<U>
  constexpr dual(U v) : value(T(v)) {}

  friend constexpr bool operator==(dual const& a, dual const& b) { return a.value == b.value; }
  friend constexpr auto operator<=>(dual const& a, dual const& b) { return a.value <=> b.value; }

  constexpr dual operator-() const {
    auto r = *this;
    r.value = -value;
    for (auto& s : r.slope) s = -s;
    return r;
  }
  constexpr dual& operator+=(dual const& b) {
    value += b.value;
    for (std::size_t i = 0; i < N; ++i) slope[i] += b.slope[i];
    return *this;
  }
  constexpr dual& operator-=(dual const& b) {
    value -= b.value;
    for (std::size_t i = 0; i < N; ++i) slope[i] -= b.slope[i];
    return *this;
  }
  constexpr dual& operator*=(dual const& b) {
    for (std::size_t i = 0; i < N; ++i) slope[i] = slope[i] * b.value + value * b.slope[i];
    value *= b.value;
    return *this;
  }
  constexpr dual& operator/=(dual const& b) {
    value /= b.value;
    for (std::size_t i = 0; i < N; ++i) slope[i] = (slope[i] - value * b.slope[i]) / b.value;
    return *this;
  }
  friend constexpr dual operator+(dual a, dual const& b) { return a += b; }
  friend constexpr dual operator-(dual a, dual const& b) { return a -= b; }
  friend constexpr dual operator*(dual a, dual const& b) { return a *= b; }
  friend constexpr dual operator/(dual a, dual const& b) { return a /= b; }
};

template <class T>
inline constexpr bool is_dual = false;
template <class T, std::size_t N>
inline constexpr bool is_dual<dual<T, N>> = true;

/// What kernels compute with: float, double, or one of their dual numbers.
template <class T>
concept scalar = std::floating_point<T> || is_dual<T>;

/// The plain number behind a scalar.
template <std::floating_point T>
constexpr T value_of(T x) noexcept {
  return x;
}
template <class T, std::size_t N>
constexpr T value_of(dual<T, N> const& x) noexcept {
  return x.value;
}

/// The same number with its derivative dropped: the stop-gradient of surrogates.
template <std::floating_point T>
constexpr T stop(T x) noexcept {
  return x;
}
template <class T, std::size_t N>
constexpr dual<T, N> stop(dual<T, N> const& x) noexcept {
  return dual<T, N>(x.value);
}

/// f(x) with value v and derivative dv at x.
template <class T, std::size_t N>
constexpr dual<T, N> chain(dual<T, N> const& x, T v, T dv) noexcept {
  dual<T, N> r(v);
  for (std::size_t i = 0; i < N; ++i) r.slope[i] = dv * x.slope[i];
  return r;
}

}  // namespace seqmix::inline v0
