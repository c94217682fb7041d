#pragma once

#include <algorithm>
#include <string>

#include <seqmix/kernels/reference/activations.hpp>

namespace seqmix::inline v0::kernels {

/// What makes the numbers of a head u [I] (queries or keys behind their own linear part) the features y [F] of
/// linear attention. K is the width that the map is named for.
enum class feature_map {
  none,
  elu_plus_one,  ///< Source: Katharopoulos et al. (arXiv 2006.16236), equation 7
  relu,          ///< Source: Kasai et al. (arXiv 2103.13076), equation 7
  hedgehog,      ///< softmax([2u, -2u]), 2K. Source: Zhang et al. (arXiv 2402.04347), equation 6
  dpfp,          ///< x_i x_(i-j), j = 1 .. nu, of x = [relu u, -relu u], 2K nu. Source: Schlag et al. (arXiv
                 ///< 2102.11174), section 5.3, with fla's sign in the second half
  taylor,        ///< [1, u / K^(1/4), u_i^2 / sqrt(2K), u_i u_j / sqrt(K) for i < j]: y.y' is e^(u.u' / sqrt K) to
                 ///< second order. Source: Arora et al. (arXiv 2402.18668), section 4
  hadamard       ///< u1 u2 of u = [u1, u2]. Source: fla, modules/feature_map.py
};

/// Numbers that a map takes for key width K: two linear images for `hadamard`, else one.
constexpr index_t feature_input(feature_map m, index_t key_dim) noexcept {
  return m == feature_map::hadamard ? 2 * key_dim : key_dim;
}
/// Features that come out. `nu` is read by dpfp only.
constexpr index_t feature_width(feature_map m, index_t key_dim, index_t nu) noexcept {
  switch (m) {
  case feature_map::hedgehog:
    return 2 * key_dim;
  case feature_map::dpfp:
    return 2 * key_dim * nu;
  case feature_map::taylor:
    return 1 + 2 * key_dim + key_dim * (key_dim - 1) / 2;
  case feature_map::none:
  case feature_map::elu_plus_one:
  case feature_map::relu:
  case feature_map::hadamard:
    break;
  }
  return key_dim;
}

namespace detail {

/// The key width behind the inputs of a map; throws unless inputs and features fit.
template <class T>
index_t feature_key_dim(feature_map m, index_t nu, view3<T const> u_rhi, view3<same<T> const> y_rhf) {
  index_t const I = u_rhi.extent[2], K = m == feature_map::hadamard ? I / 2 : I;
  if (feature_input(m, K) != I)
    throw shape_error("seqmix: feature_map: hadamard multiplies two halves, got an odd width " + std::to_string(I));
  if (m == feature_map::dpfp && nu < 1)
    throw value_error("seqmix: feature_map: dpfp needs nu >= 1, got " + std::to_string(nu));
  expect_shape("feature_map: features", y_rhf, {u_rhi.extent[0], u_rhi.extent[1], feature_width(m, K, nu)});
  return K;
}

/// [relu u, -relu u] at i, counted around.
template <class T>
T dpfp_part(T const* u, index_t K, index_t i) noexcept {
  index_t const at = i < 0 ? i + 2 * K : i;
  T const x = activated(activation::relu, u[at < K ? at : at - K]);
  return at < K ? x : -x;
}

template <class T>
void features_of(feature_map m, index_t nu, index_t K, T const* u, T* y) {
  switch (m) {
  case feature_map::none:
  case feature_map::elu_plus_one:
  case feature_map::relu: {
    auto const f = m == feature_map::none   ? activation::identity
                   : m == feature_map::relu ? activation::relu
                                            : activation::elu_plus_one;
    for (index_t i = 0; i < K; ++i) y[i] = activated(f, u[i]);
    return;
  }
  case feature_map::hedgehog: {
    auto most = value_of(T(0));
    for (index_t i = 0; i < K; ++i) most = (std::max)({most, value_of(u[i]), -value_of(u[i])});
    T sum(0);
    for (index_t i = 0; i < 2 * K; ++i) {
      y[i] = exp(T(2) * ((i < K ? u[i] : -u[i - K]) - T(most)));
      sum += y[i];
    }
    for (index_t i = 0; i < 2 * K; ++i) y[i] = y[i] / sum;
    return;
  }
  case feature_map::dpfp:
    for (index_t j = 1; j <= nu; ++j)
      for (index_t i = 0; i < 2 * K; ++i)
        y[(j - 1) * 2 * K + i] = dpfp_part(u, K, i) * dpfp_part(u, K, (i - j) % (2 * K));
    return;
  case feature_map::taylor: {
    double const root = std::sqrt(double(K));
    *y++ = T(1);
    for (index_t i = 0; i < K; ++i) *y++ = u[i] / T(std::sqrt(root));
    for (index_t i = 0; i < K; ++i) *y++ = u[i] * u[i] / T(std::sqrt(2.0) * root);
    for (index_t i = 0; i < K; ++i)
      for (index_t j = i + 1; j < K; ++j) *y++ = u[i] * u[j] / T(root);
    return;
  }
  case feature_map::hadamard:
    for (index_t i = 0; i < K; ++i) y[i] = u[i] * u[K + i];
    return;
  }
}

}  // namespace detail

/// y [R,H,F] = the features of u [R,H,I]; y must not be u.
template <class T>
void feature_map_forward(device::reference, feature_map m, index_t nu, view3<T const> u_rhi, view3<same<T>> y_rhf,
                         arena&) {
  index_t const K = detail::feature_key_dim(m, nu, u_rhi, view3<T const>(y_rhf));
  expect_contiguous("feature_map: u", u_rhi);
  expect_contiguous("feature_map: features", y_rhf);
  for (index_t r = 0; r < u_rhi.extent[0]; ++r)
    for (index_t h = 0; h < u_rhi.extent[1]; ++h) detail::features_of(m, nu, K, u_rhi.at(r, h), y_rhf.at(r, h));
}

}  // namespace seqmix::inline v0::kernels
