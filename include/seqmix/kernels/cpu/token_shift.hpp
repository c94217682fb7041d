#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/token_shift.hpp>

/// Token shift, vectorised over channels; work is cut into blocks of rows, whatever the sequences.
namespace seqmix::inline v0::kernels {

namespace detail {

/// What both directions read.
template <class Isa, class T>
struct token_shift {
  sequences const& seq;
  view2<T const> x_rd, mu_jd;
  view3<T const> t_jrd;
  view2<T const> carried_nd;

  /// f(row, its sequence, the token before it or nullptr for zeros) for rows [begin, end).
  template <class F>
  void for_rows(index_t begin, index_t end, F const& f) const {
    if (begin >= end) return;
    for (index_t r = begin, n = seq.holder(begin); r < end; ++r) {
      while (seq.end(n) <= r) ++n;
      bool const first = r == seq.begin(n);
      f(r, n, !first ? x_rd.at(r - 1) : carried_nd ? carried_nd.at(n) : nullptr);
    }
  }
  /// prev - x at channel d.
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> step(T const* prev, simd::vec<Isa, T> const& x, index_t d,
                                       Lanes const& lanes) const noexcept {
    return prev ? lanes.load(prev + d) - x : -x;
  }
  /// The share of prev in target j.
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> share(index_t j, index_t r, index_t d, Lanes const& lanes) const noexcept {
    auto const mu = lanes.load(mu_jd.at(j, d));
    return t_jrd ? mu + lanes.load(t_jrd.at(j, r, d)) : mu;
  }
  /// What row r passes back to the token before it.
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> to_prev(view3<T const> dy_jrd, index_t r, index_t d,
                                          Lanes const& lanes) const noexcept {
    simd::vec<Isa, T> total{};
    for (index_t j = 0; j < mu_jd.extent[0]; ++j) total += lanes.load(dy_jrd.at(j, r, d)) * share(j, r, d, lanes);
    return total;
  }
};

}  // namespace detail

template <class Isa, class Threads, class T>
void token_shift_forward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rd,
                         view2<same<T> const> mu_jd, view3<same<T> const> t_jrd, view2<same<T> const> carried_nd,
                         view3<same<T>> y_jrd, view2<same<T>> carried_out_nd) {
  detail::check_token_shift(seq, x_rd, mu_jd, t_jrd, carried_nd, view3<T const>(y_jrd),
                            view2<T const>(carried_out_nd));
  for (auto const& v : {x_rd, mu_jd, carried_nd}) expect_contiguous("token_shift: x, mu or carried tokens", v);
  for (auto const& v : {t_jrd, view3<T const>(y_jrd)}) expect_contiguous("token_shift: t or targets", v);
  if (dev.dry) return;
  index_t const D = x_rd.extent[1];
  detail::token_shift<Isa, T> const shift{seq, x_rd, mu_jd, t_jrd, carried_nd};
  detail::for_row_blocks(dev, seq.rows(), [&](index_t, index_t begin, index_t end) {
    shift.for_rows(begin, end, [&](index_t r, index_t, T const* prev) {
      simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
        auto const x = lanes.load(x_rd.at(r, d)), step = shift.step(prev, x, d, lanes);
        for (index_t j = 0; j < mu_jd.extent[0]; ++j)
          lanes.store(y_jrd.at(j, r, d), x + step * shift.share(j, r, d, lanes));
      });
    });
  });
  for (index_t n = 0; carried_out_nd && n < seq.count(); ++n)
    for (index_t d = 0; d < D; ++d)
      carried_out_nd(n, d) = seq.length(n) > 0 ? x_rd(seq.end(n) - 1, d) : carried_nd ? carried_nd(n, d) : T(0);
}

/// dx and d_carried are written, or += when `add`: of two shifts of one token the second adds and gets no
/// d_carried_out, the derivative of the carried final token. dmu +=; dt is written and
/// must not be dy. Empty: dt of a
/// static shift, d_carried_out and d_carried where there is none. Workspace: J D numbers for every 64 rows.
template <class Isa, class Threads, class T>
void token_shift_backward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rd,
                          view2<same<T> const> mu_jd, view3<same<T> const> t_jrd, view2<same<T> const> carried_nd,
                          view3<same<T> const> dy_jrd, view2<same<T> const> d_carried_out_nd, view2<same<T>> dx_rd,
                          view2<same<T>> dmu_jd, view3<same<T>> dt_jrd, view2<same<T>> d_carried_nd, bool add,
                          arena& ws) {
  detail::check_token_shift(seq, x_rd, mu_jd, t_jrd, carried_nd, dy_jrd, d_carried_out_nd);
  detail::check_token_shift(seq, view2<T const>(dx_rd), view2<T const>(dmu_jd), view3<T const>(dt_jrd),
                            view2<T const>(d_carried_nd), dy_jrd, view2<T const>{});
  for (auto const& v : {x_rd, mu_jd, carried_nd, d_carried_out_nd, view2<T const>(dx_rd), view2<T const>(dmu_jd),
                        view2<T const>(d_carried_nd)})
    expect_contiguous("token_shift: x, mu, carried tokens or their gradients", v);
  for (auto const& v : {t_jrd, dy_jrd, view3<T const>(dt_jrd)}) expect_contiguous("token_shift: t or gradients", v);
  arena_scope const scope(ws);
  index_t const R = seq.rows(), D = x_rd.extent[1], J = mu_jd.extent[0];
  index_t const count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * J * D);
  if (ws.measuring()) return;
  detail::token_shift<Isa, T> const shift{seq, x_rd, mu_jd, t_jrd, carried_nd};
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const dmu = partial + b * J * D;
    std::fill_n(dmu, J * D, T(0));
    shift.for_rows(begin, end, [&](index_t r, index_t n, T const* prev) {
      bool const last = r + 1 == seq.end(n);
      T const* const carried = last && d_carried_out_nd ? d_carried_out_nd.at(n) : nullptr;
      simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
        auto const x = lanes.load(x_rd.at(r, d)), step = shift.step(prev, x, d, lanes);
        auto dx = add ? lanes.load(dx_rd.at(r, d)) : simd::vec<Isa, T>{};
        for (index_t j = 0; j < J; ++j) {
          auto const dy = lanes.load(dy_jrd.at(j, r, d)), d_share = dy * step;
          dx += dy - dy * shift.share(j, r, d, lanes);
          lanes.store(dmu + j * D + d, lanes.load(dmu + j * D + d) + d_share);
          if (dt_jrd) lanes.store(dt_jrd.at(j, r, d), d_share);
        }
        if (!last) dx += shift.to_prev(dy_jrd, r + 1, d, lanes);
        if (carried) dx += lanes.load(carried + d);
        lanes.store(dx_rd.at(r, d), dx);
      });
    });
  });
  for (index_t j = 0; j < J; ++j)
    for (index_t b = 0; b < count; ++b)
      for (index_t d = 0; d < D; ++d) dmu_jd(j, d) += partial[(b * J + j) * D + d];
  for (index_t n = 0; d_carried_nd && n < seq.count(); ++n)
    simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
      T* const to = d_carried_nd.at(n, d);
      auto total = seq.length(n) > 0  ? shift.to_prev(dy_jrd, seq.begin(n), d, lanes)
                   : d_carried_out_nd ? lanes.load(d_carried_out_nd.at(n, d))
                                      : simd::vec<Isa, T>{};
      if (add) total += lanes.load(to);
      lanes.store(to, total);
    });
}

}  // namespace seqmix::inline v0::kernels
