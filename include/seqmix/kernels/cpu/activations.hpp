#pragma once

#include <array>

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/activations.hpp>

/// Activations on vectors. A new one is an enumerator, its formula for any scalar (kernels/reference) and its value
/// and slope here.
namespace seqmix::inline v0::kernels {

namespace detail {

/// tanh to a few units in the last place: 1 - 2 / (1 + e^2|x|), and below 1/2 the quotient of polynomials from the
/// continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))), where that difference would cancel.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> vector_tanh(simd::vec<Isa, T> const& x) noexcept {
  auto const size = x < T(0) ? -x : x;
  auto const square = x * x;
  auto const above = (((square + T(990)) * square + T(135135)) * square + T(4729725)) * square + T(34459425);
  auto const below =
      (((T(45) * square + T(13860)) * square + T(945945)) * square + T(16216200)) * square + T(34459425);
  auto const far = T(1) - T(2) / (T(1) + simd::exp<Isa, T>(size + size));
  return size < T(0.5) ? x * above / below : (x < T(0) ? -far : far);
}

/// z e^(z^2) erfc(z) for z >= 1 as a Chebyshev series in (z - 4) / (z + 2); its first nine terms have the digits of
/// a float.
inline constexpr std::array<double, 21> scaled_erfc_series{
    0.52268528184806173,     0.062394062515787449,   -0.026066301528228099,  0.0058947815673044715,
    -0.00074289201235224075, 1.5128890832418326e-5,  1.0671610297733193e-5,  -9.9661553973953197e-7,
    -1.8450476010209502e-7,  2.8059191776145818e-8,  4.5876322428344712e-9,  -7.3893438464119863e-10,
    -1.5469505431115986e-10, 1.7584896811152985e-11, 6.0575805611262594e-12, -2.4273932694348503e-13,
    -2.4051309254593739e-13, -1.075182997401723e-14, 8.5863494468046676e-15, 1.3257658165635784e-15,
    -2.1923478924795031e-16};

/// 2 / sqrt(pi) (-1)^n / (n! (2n + 1)): the Taylor series of erf(z) / z in z^2.
template <int Terms>
constexpr std::array<double, std::size_t(Terms)> erf_series() noexcept {
  std::array<double, std::size_t(Terms)> series{};
  double factor = 1.1283791670955126;
  for (int n = 0; n < Terms; factor /= -double(++n)) series[std::size_t(n)] = factor / double(2 * n + 1);
  return series;
}

/// The normal distribution and its density.
template <class Isa, class T>
SEQMIX_INLINE void normal_distribution(simd::vec<Isa, T> const& x, simd::vec<Isa, T>& cdf,
                                       simd::vec<Isa, T>& density) noexcept {
  using V = simd::vec<Isa, T>;
  constexpr bool single = sizeof(T) == 4;
  constexpr auto near_series = erf_series < single ? 11 : 19 > ();
  constexpr std::size_t far_terms = single ? 9 : scaled_erfc_series.size();
  V const square = T(0.5) * x * x, z = (x < T(0) ? -x : x) * T(0.70710678118654752);
  V const e = simd::exp<Isa, T>(-square);
  V near = simd::broadcast<Isa, T>(T(near_series.back()));
  for (std::size_t n = near_series.size() - 1; n-- > 0;) near = near * square + T(near_series[n]);
  V const bounded = z < T(1) ? V{} + T(1) : (z > T(40) ? V{} + T(40) : z);  // beyond 40, e is 0
  V const at = (bounded - T(4)) / (bounded + T(2)), twice = at + at;
  V last{}, before{};
  for (std::size_t n = far_terms - 1; n > 0; --n) {
    V const next = twice * last - before + T(scaled_erfc_series[n]);
    before = last;
    last = next;
  }
  V const tail = T(0.5) * e * (at * last - before + T(scaled_erfc_series[0])) / bounded;
  V const middle = T(0.5) + T(0.5) * T(0.70710678118654752) * x * near;
  cdf = z < T(1) ? middle : (x < T(0) ? tail : T(1) - tail);
  density = T(0.39894228040143268) * e;
}

template <class V>
struct value_and_slope {
  V value, slope;
};

/// f(x) and f'(x).
template <activation F, class Isa, class T>
SEQMIX_INLINE value_and_slope<simd::vec<Isa, T>> activation_at(simd::vec<Isa, T> const& x) noexcept {
  using V = simd::vec<Isa, T>;
  V const zero{}, one = zero + T(1);
  if constexpr (F == activation::identity) {
    return {x, one};
  } else if constexpr (F == activation::relu) {
    return {x <= T(0) ? zero : x, x <= T(0) ? zero : one};
  } else if constexpr (F == activation::squared_relu) {
    V const positive = x <= T(0) ? zero : x;
    return {positive * positive, positive + positive};
  } else if constexpr (F == activation::elu_plus_one) {
    V const e = simd::exp<Isa, T>(x);
    return {x > T(0) ? x + T(1) : e, x > T(0) ? one : e};
  } else if constexpr (F == activation::tanh) {
    V const t = vector_tanh<Isa, T>(x);
    return {t, one - t * t};
  } else if constexpr (F == activation::gelu) {
    V cdf, density;
    normal_distribution<Isa, T>(x, cdf, density);
    return {x * cdf, cdf + x * density};
  } else if constexpr (F == activation::gelu_tanh) {
    V const square = x * x;
    V const s = simd::sigmoid<Isa, T>(T(gelu_tanh_slope) * (x + T(gelu_tanh_cube) * x * square));
    return {x * s, s + x * (s - s * s) * T(gelu_tanh_slope) * (T(1) + T(3 * gelu_tanh_cube) * square)};
  } else {
    V const s = simd::sigmoid<Isa, T>(x);
    if constexpr (F == activation::silu) return {x * s, silu_slope(x, s)};
    if constexpr (F == activation::sigmoid) return {s, s - s * s};
    if constexpr (F == activation::min_gru) return {x >= T(0) ? x + T(0.5) : s, x >= T(0) ? one : s - s * s};
  }
}

/// body(std::integral_constant<activation, f>{}): a run-time choice becomes the type that loops are compiled for.
template <class Body>
void with_activation(activation f, Body const& body) {
  auto const run = [&]<activation F>() { body(std::integral_constant<activation, F>{}); };
  switch (f) {
  case activation::identity:
    return run.template operator()<activation::identity>();
  case activation::silu:
    return run.template operator()<activation::silu>();
  case activation::relu:
    return run.template operator()<activation::relu>();
  case activation::sigmoid:
    return run.template operator()<activation::sigmoid>();
  case activation::tanh:
    return run.template operator()<activation::tanh>();
  case activation::gelu:
    return run.template operator()<activation::gelu>();
  case activation::gelu_tanh:
    return run.template operator()<activation::gelu_tanh>();
  case activation::elu_plus_one:
    return run.template operator()<activation::elu_plus_one>();
  case activation::squared_relu:
    return run.template operator()<activation::squared_relu>();
  case activation::min_gru:
    return run.template operator()<activation::min_gru>();
  }
}

}  // namespace detail

/// y [R,C] = f(x); y may be x.
template <class Isa, class Threads, class T>
void activate(device::basic_cpu<Isa, Threads> dev, activation f, view2<T const> x_rc, view2<same<T>> y_rc) {
  expect_shape("activate: y", y_rc, x_rc.extent);
  expect_contiguous("activate: x", x_rc);
  expect_contiguous("activate: y", y_rc);
  detail::with_activation(f, [&](auto kind) {
    detail::for_row_blocks(dev, x_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        simd::map<Isa>(
            x_rc.extent[1],
            [](auto const& x) { return detail::activation_at<decltype(kind)::value, Isa, T>(x).value; }, y_rc.at(r),
            x_rc.at(r));
    });
  });
}

/// dx (+)= f'(x) dy from the activation's input. Without `add`, dx may be dy or x.
template <class Isa, class Threads, class T>
void activate_backward(device::basic_cpu<Isa, Threads> dev, activation f, view2<T const> x_rc,
                       view2<same<T> const> dy_rc, view2<same<T>> dx_rc, bool add) {
  expect_shape("activate_backward: dy", dy_rc, x_rc.extent);
  expect_shape("activate_backward: dx", dx_rc, x_rc.extent);
  expect_contiguous("activate_backward: x", x_rc);
  expect_contiguous("activate_backward: dy", dy_rc);
  expect_contiguous("activate_backward: dx", dx_rc);
  detail::with_activation(f, [&](auto kind) {
    detail::for_row_blocks(dev, x_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        simd::for_vectors<Isa, T>(x_rc.extent[1], [&](index_t c, auto const& lanes) {
          auto const slope = detail::activation_at<decltype(kind)::value, Isa, T>(lanes.load(x_rc.at(r, c))).slope;
          auto const dx = lanes.load(dy_rc.at(r, c)) * slope;
          lanes.store(dx_rc.at(r, c), add ? lanes.load(dx_rc.at(r, c)) + dx : dx);
        });
    });
  });
}

}  // namespace seqmix::inline v0::kernels
