#pragma once

#include <cmath>
#include <string>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>

/// Rotations whose angles are sums over the tokens so far, rather than positions (those: `rope`).
namespace seqmix::inline v0::kernels {

namespace detail {

inline constexpr double pi = 3.1415926535897932;
inline constexpr double whole_turn = 6.2831853071795865;

/// The angle in [0, 2 pi] that points the same way. The derivative is 1.
template <class T>
T within_a_turn(T const& angle) noexcept {
  auto const turns = std::floor(value_of(angle) / decltype(value_of(angle))(whole_turn));
  return angle - T(turns) * T(whole_turn);
}

template <std::floating_point T>
T cosine(T x) noexcept {
  return std::cos(x);
}
template <std::floating_point T>
T sine(T x) noexcept {
  return std::sin(x);
}
template <class T, std::size_t N>
dual<T, N> cosine(dual<T, N> const& x) noexcept {
  return chain(x, std::cos(x.value), -std::sin(x.value));
}
template <class T, std::size_t N>
dual<T, N> sine(dual<T, N> const& x) noexcept {
  return chain(x, std::sin(x.value), std::cos(x.value));
}

inline void expect_sharing(char const* what, index_t heads, index_t shared) {
  if (shared > 0 && heads % shared == 0) return;
  throw shape_error(std::string("seqmix: ") + what + ": the number of heads must divide " + std::to_string(heads) +
                    ", got " + std::to_string(shared));
}

/// Throws unless the views of rotation_angles fit; empty ones are absent.
template <class T>
void check_angles(sequences const& seq, view3<T const> raw_rgs, view2<T const> delta_rh, view3<T const> theta_rhs,
                  view3<T const> carried_nhs, view3<T const> final_nhs) {
  index_t const H = theta_rhs.extent[1], S = theta_rhs.extent[2];
  expect_shape("rotation_angles: theta", theta_rhs, {seq.rows(), H, S});
  expect_shape("rotation_angles: raw", raw_rgs, {seq.rows(), -1, S});
  expect_shape("rotation_angles: delta", delta_rh, {seq.rows(), H});
  expect_sharing("rotation_angles: raw", H, raw_rgs.extent[1]);
  if (carried_nhs) expect_shape("rotation_angles: carried angles", carried_nhs, {seq.count(), H, S});
  if (final_nhs) expect_shape("rotation_angles: final angles", final_nhs, {seq.count(), H, S});
}

/// Throws unless x [R,Hx,K] may be turned into y [R,H,K] by theta [R,H,S].
template <class T>
void check_rotate(view3<T const> x_rhk, view3<T const> theta_rhs, view3<T const> y_rhk) {
  index_t const R = y_rhk.extent[0], H = y_rhk.extent[1], K = y_rhk.extent[2], S = theta_rhs.extent[2];
  expect_shape("rotate: x", x_rhk, {R, -1, K});
  expect_shape("rotate: theta", theta_rhs, {R, H, S});
  expect_sharing("rotate: x", H, x_rhk.extent[1]);
  if (2 * S > K)
    throw shape_error("seqmix: rotate: " + std::to_string(S) + " pairs do not fit into heads of " +
                      std::to_string(K) + " numbers");
}

}  // namespace detail

/// theta_t = (theta_(t-1) + pi tanh(raw_t) delta_t) mod 2 pi for H heads of S pairs; raw [R,G,S] has G heads, which
/// H is a multiple of (head h reads h G / H), delta [R,H]. theta_(-1) are the carried angles [N,H,S] (empty: 0);
/// the last ones are carried on (empty: not wanted), by an empty sequence what it was given. Both may be the same
/// memory. Source: Mamba-3, state-spaces/mamba, modules/mamba3.py.
template <class T>
void rotation_angles_forward(device::reference, sequences const& seq, view3<T const> raw_rgs,
                             view2<same<T> const> delta_rh, view3<same<T> const> carried_nhs,
                             view3<same<T>> theta_rhs, view3<same<T>> carried_out_nhs, arena&) {
  detail::check_angles<T>(seq, raw_rgs, delta_rh, theta_rhs, carried_nhs, carried_out_nhs);
  index_t const H = theta_rhs.extent[1], G = raw_rgs.extent[1];
  for (index_t n = 0; n < seq.count(); ++n)
    for (index_t h = 0; h < H; ++h)
      for (index_t s = 0; s < theta_rhs.extent[2]; ++s) {
        T angle = carried_nhs ? carried_nhs(n, h, s) : T(0);
        for (index_t r = seq.begin(n); r < seq.end(n); ++r) {
          angle = detail::within_a_turn(angle + T(detail::pi) * tanh(raw_rgs(r, h * G / H, s)) * delta_rh(r, h));
          theta_rhs(r, h, s) = angle;
        }
        if (carried_out_nhs) carried_out_nhs(n, h, s) = angle;
      }
}

/// y [R,H,K] = x + bias with the first S pairs (2i, 2i+1) turned by theta [R,H,S]. x [R,Hx,K] may have fewer heads
/// (head h reads h Hx / H); bias [H,K], nullptr: none. y may be x where Hx = H.
template <class T>
void rotate_forward(device::reference, view3<T const> x_rhk, same<T> const* bias_hk, view3<same<T> const> theta_rhs,
                    view3<same<T>> y_rhk) {
  detail::check_rotate<T>(x_rhk, theta_rhs, y_rhk);
  index_t const H = y_rhk.extent[1], K = y_rhk.extent[2];
  for (index_t r = 0; r < y_rhk.extent[0]; ++r)
    for (index_t h = 0; h < H; ++h) {
      for (index_t k = 0; k < K; ++k) {
        T const x = x_rhk(r, h * x_rhk.extent[1] / H, k);
        y_rhk(r, h, k) = bias_hk ? x + bias_hk[h * K + k] : x;
      }
      for (index_t s = 0; s < theta_rhs.extent[2]; ++s) {
        T const c = detail::cosine(theta_rhs(r, h, s)), d = detail::sine(theta_rhs(r, h, s));
        T const a = y_rhk(r, h, 2 * s), b = y_rhk(r, h, 2 * s + 1);
        y_rhk(r, h, 2 * s) = a * c - b * d;
        y_rhk(r, h, 2 * s + 1) = b * c + a * d;
      }
    }
}

}  // namespace seqmix::inline v0::kernels
