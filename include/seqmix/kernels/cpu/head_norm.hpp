#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/head_norm.hpp>

/// Normalisations of every head on its own, vectorised over its numbers.
namespace seqmix::inline v0::kernels {

namespace detail {

/// What forward and backward have in common: one head of one row, with its gain and shift.
template <class Isa, class T>
struct head_norm_row {
  head_norm const& s;
  index_t D;
  T const *w, *b;

  /// The first weight of head h.
  index_t first_weight(index_t h) const noexcept { return s.per_head ? h * D : 0; }
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> gain(index_t at, Lanes const& lanes) const noexcept {
    if (!w) return simd::broadcast<Isa, T>(T(1));
    auto const weight = lanes.load(w + at);
    return s.one_plus ? T(1) + weight : weight;
  }

  /// Stores 1 / divisor and, of `layer`, the mean.
  void forward(index_t h, T const* x, T* y, T* unit_to, T* mean_to) const noexcept {
    T const* from = x;
    if (s.over == norm_over::layer) {
      T const mean = simd::map_sum<Isa, T>(
                         D, [](auto const& e) { return e; }, x) /
                     T(D);
      simd::map<Isa>(
          D, [=](auto const& e) { return e - mean; }, y, x);
      *mean_to = mean;
      from = y;
    }
    T const sum = s.over == norm_over::l1 ? simd::map_sum<Isa, T>(
                                                D, [](auto const& e) { return e < T(0) ? -e : e; }, from)
                                          : square_sum<Isa>(from, D);
    T const unit = *unit_to = head_norm_unit(s, sum, D);
    index_t const at = first_weight(h);
    simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
      auto const scaled = lanes.load(from + d) * unit * gain(at + d, lanes);
      lanes.store(y + d, b ? scaled + lanes.load(b + at + d) : scaled);
    });
  }

  /// dx (+)=, dw and db += where they are wanted. Lanes behind the last number have dy = 0 and add nothing.
  void backward(index_t h, T const* x, T unit, T mean, T const* dy, T* dx, bool add, T* dw, T* db) const noexcept {
    index_t const at = first_weight(h);
    simd::vec<Isa, T> along{}, total{};
    simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
      auto const hat = (lanes.load(x + d) - mean) * unit, up = lanes.load(dy + d);
      auto const d_hat = up * gain(at + d, lanes);
      along += d_hat * hat;
      total += d_hat;
      if (dw) lanes.store(dw + at + d, lanes.load(dw + at + d) + up * hat);
      if (db) lanes.store(db + at + d, lanes.load(db + at + d) + up);
    });
    bool const averages = s.over == norm_over::rms || s.over == norm_over::layer;
    bool const constant = s.over == norm_over::l2_max && unit == T(1) / T(s.eps);  // the divisor was the bound
    T const pull = constant ? T(0) : simd::sum<Isa, T>(along) / (averages ? T(D) : T(1));
    T const shift = s.over == norm_over::layer ? simd::sum<Isa, T>(total) / T(D) : T(0);
    simd::for_vectors<Isa, T>(D, [&](index_t d, auto const& lanes) {
      auto const from = lanes.load(x + d);
      auto const sign = from > T(0) ? simd::broadcast<Isa, T>(T(1))
                                    : (from < T(0) ? simd::broadcast<Isa, T>(T(-1)) : from - from);
      auto const direction = s.over == norm_over::l1 ? sign : (from - mean) * unit;
      auto const d_x = unit * (lanes.load(dy + d) * gain(at + d, lanes) - shift - direction * pull);
      lanes.store(dx + d, add ? lanes.load(dx + d) + d_x : d_x);
    });
  }
};

/// The views of a normalisation fit.
template <class T>
void check_head_norm(view3<T const> x_rhd, view3<T const> other_rhd, char const* what) {
  expect_shape(what, other_rhd, x_rhd.extent);
  expect_contiguous("head_norm: x", x_rhd);
  expect_contiguous(what, other_rhd);
}

}  // namespace detail

/// y = hat gain + shift per head. `w` nullptr: gain 1; `b` nullptr: no shift; `saved` takes
/// head_norm_saved(s, R, H) numbers. y may be x where no backward follows.
template <class Isa, class Threads, class T>
void head_norm_forward(device::basic_cpu<Isa, Threads> dev, head_norm const& s, view3<T const> x_rhd,
                       same<T> const* w, same<T> const* b, view3<same<T>> y_rhd, same<T>* saved) {
  detail::check_head_norm(x_rhd, view3<T const>(y_rhd), "head_norm: y");
  index_t const R = x_rhd.extent[0], H = x_rhd.extent[1];
  detail::head_norm_row<Isa, T> const row{s, x_rhd.extent[2], w, b};
  detail::for_row_blocks(dev, R, [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h)
        row.forward(h, x_rhd.at(r, h), y_rhd.at(r, h), saved + r * H + h, saved + (R + r) * H + h);
  });
}

/// dx (+)=, and may be dy without `add`; dw, db += (nullptr: none). `saved` is what forward left. A zero vector has
/// the finite derivative dy / divisor. Workspace: partial sums of dw and db, one of 64 rows.
template <class Isa, class Threads, class T>
void head_norm_backward(device::basic_cpu<Isa, Threads> dev, head_norm const& s, view3<T const> x_rhd,
                        same<T> const* w, same<T> const* saved, view3<same<T> const> dy_rhd, view3<same<T>> dx_rhd,
                        bool add, same<T>* dw, same<T>* db, arena& ws) {
  detail::check_head_norm(x_rhd, dy_rhd, "head_norm: dy");
  detail::check_head_norm(x_rhd, view3<T const>(dx_rhd), "head_norm: dx");
  arena_scope const scope(ws);
  index_t const R = x_rhd.extent[0], H = x_rhd.extent[1], D = x_rhd.extent[2];
  index_t const count = detail::blocks(R, detail::rows_per_block), weights = s.per_head ? H * D : D;
  T* const dw_partial = ws.take<T>(count * weights);
  T* const db_partial = ws.take<T>(count * weights);
  if (ws.measuring()) return;
  detail::head_norm_row<Isa, T> const row{s, D, w, nullptr};
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const dw_block = dw ? dw_partial + b * weights : nullptr;
    T* const db_block = db ? db_partial + b * weights : nullptr;
    if (dw) std::fill_n(dw_block, weights, T(0));
    if (db) std::fill_n(db_block, weights, T(0));
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h)
        row.backward(h, x_rhd.at(r, h), saved[r * H + h],
                     s.over == norm_over::layer ? saved[(R + r) * H + h] : T(0), dy_rhd.at(r, h), dx_rhd.at(r, h),
                     add, dw_block, db_block);
  });
  if (dw) detail::add_partials(dw_partial, count, weights, dw);
  if (db) detail::add_partials(db_partial, count, weights, db);
}

}  // namespace seqmix::inline v0::kernels
