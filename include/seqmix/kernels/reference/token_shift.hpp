#pragma once

#include <algorithm>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// Throws unless a token shift's views fit; empty ones are absent.
template <class T>
void check_token_shift(sequences const& seq, view2<T const> x_rd, view2<same<T> const> mu_jd,
                       view3<same<T> const> t_jrd, view2<same<T> const> carried_nd, view3<same<T> const> y_jrd,
                       view2<same<T> const> carried_out_nd) {
  index_t const D = x_rd.extent[1], J = mu_jd.extent[0];
  expect_shape("token_shift: x", x_rd, {seq.rows(), D});
  expect_shape("token_shift: mu", mu_jd, {J, D});
  expect_shape("token_shift: targets", y_jrd, {J, seq.rows(), D});
  if (t_jrd) expect_shape("token_shift: t", t_jrd, y_jrd.extent);
  if (carried_nd) expect_shape("token_shift: carried tokens", carried_nd, {seq.count(), D});
  if (carried_out_nd) expect_shape("token_shift: final tokens", carried_out_nd, {seq.count(), D});
}

}  // namespace detail

/// Mixes every token with the one before it in its sequence, for J targets at once:
/// y_j = x + (prev - x)(mu_j + t_j), with mu [J,D] and, where the shift is dynamic, t [J,R,D] (empty: 0). The first
/// token's prev is the carried one [N,D] (empty: zeros); the last token is carried on (empty: not wanted), by an
/// empty sequence what it was given. Both may be the same memory.
/// Source: RWKV-7 (arXiv 2503.14456), equation 3; dynamic: RWKV-6 (arXiv 2404.05892), section 4.
template <class T>
void token_shift_forward(device::reference, sequences const& seq, view2<T const> x_rd, view2<same<T> const> mu_jd,
                         view3<same<T> const> t_jrd, view2<same<T> const> carried_nd, view3<same<T>> y_jrd,
                         view2<same<T>> carried_out_nd) {
  detail::check_token_shift(seq, x_rd, mu_jd, t_jrd, carried_nd, view3<T const>(y_jrd),
                            view2<T const>(carried_out_nd));
  index_t const D = x_rd.extent[1];
  for (index_t n = 0; n < seq.count(); ++n)
    for (index_t d = 0; d < D; ++d) {
      T prev = carried_nd ? carried_nd(n, d) : T(0);
      for (index_t r = seq.begin(n); r < seq.end(n); ++r) {
        T const x = x_rd(r, d);
        for (index_t j = 0; j < mu_jd.extent[0]; ++j)
          y_jrd(j, r, d) = x + (prev - x) * (t_jrd ? mu_jd(j, d) + t_jrd(j, r, d) : mu_jd(j, d));
        prev = x;
      }
      if (carried_out_nd) carried_out_nd(n, d) = prev;
    }
}

}  // namespace seqmix::inline v0::kernels
