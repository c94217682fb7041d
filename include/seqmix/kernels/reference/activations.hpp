#pragma once

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

/// Functions of one number that layers put behind a projection.
enum class activation {
  identity,
  silu,          ///< x sigmoid(x)
  relu,          ///< slope 0 at 0
  sigmoid,       ///< 1 / (1 + e^-x)
  tanh,          ///<
  gelu,          ///< x Phi(x). Source: Hendrycks, Gimpel (arXiv 1606.08415), section 2
  gelu_tanh,     ///< x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), there the first approximation
  elu_plus_one,  ///< x + 1 for x > 0, else e^x. Source: Katharopoulos et al. (arXiv 2006.16236), equation 7
  squared_relu,  ///< max(x, 0)^2. Source: So et al. (arXiv 2109.08668), section 3
  min_gru        ///< x + 1/2 for x >= 0, else sigmoid(x). Source: Feng et al. (arXiv 2410.01201), appendix B
};

namespace detail {

/// The normal distribution function, with all its digits in the lower tail too.
template <std::floating_point T>
T normal_cdf(T x) noexcept {
  return T(0.5) * std::erfc(x * T(-0.70710678118654752));
}
template <class T, std::size_t N>
dual<T, N> normal_cdf(dual<T, N> const& x) noexcept {
  T const density = T(0.39894228040143268) * std::exp(T(-0.5) * x.value * x.value);
  return chain(x, normal_cdf(x.value), density);
}

inline constexpr double gelu_tanh_slope = 1.5957691216057308;  ///< 2 sqrt(2/pi)
inline constexpr double gelu_tanh_cube = 0.044715;

}  // namespace detail

/// One number through an activation. NaN stays NaN.
template <scalar T>
T activated(activation f, T const& x) noexcept {
  switch (f) {
  case activation::identity:
    break;
  case activation::silu:
    return silu(x);
  case activation::relu:
    return x <= T(0) ? T(0) : x;
  case activation::sigmoid:
    return sigmoid(x);
  case activation::tanh:
    return tanh(x);
  case activation::gelu:
    return x * detail::normal_cdf(x);
  case activation::gelu_tanh:
    return x * sigmoid(T(detail::gelu_tanh_slope) * (x + T(detail::gelu_tanh_cube) * x * x * x));
  case activation::elu_plus_one:
    return x > T(0) ? x + T(1) : exp(x);
  case activation::squared_relu:
    return x <= T(0) ? T(0) : x * x;
  case activation::min_gru:
    return x >= T(0) ? x + T(0.5) : sigmoid(x);
  }
  return x;
}

/// y [R,C] = f(x); y may be x.
template <class T>
void activate(device::reference, activation f, view2<T const> x_rc, view2<same<T>> y_rc) {
  expect_shape("activate: y", y_rc, x_rc.extent);
  for (index_t r = 0; r < x_rc.extent[0]; ++r)
    for (index_t c = 0; c < x_rc.extent[1]; ++c) y_rc(r, c) = activated(f, x_rc(r, c));
}

}  // namespace seqmix::inline v0::kernels
