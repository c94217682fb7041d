#pragma once

#include <seqmix/layers/low_rank.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// RWKV-7's vectors of the generic step: with the in-context rate r = sigmoid(a0 + low rank of x),
///   k^ = k k_k / max(|k k_k|, 1e-12),  a = -k^,  b = k^ r,  and the key that is written, k (1 + (r - 1) k_a).
/// Source: Peng et al. (arXiv 2503.14456), equations 5-7 and 15; start values of its training code.
class removal_room {
 public:
  removal_room() = default;
  removal_room(parameter_room room, index_t heads, index_t keys, index_t rank, initialiser up)
      : heads_(heads), keys_(keys), up_(room, "rate.up", heads * keys, rank, hidden::identity, false, up) {
    double const head = double(keys);
    rate_bias_ = room.vector("rate.bias", heads * keys,
                             {[](initialiser_argument e) {
                                double const z = in_head(e), line = double(e.row) / last(e.rows) - 0.5;
                                return -0.19 + 0.3 * z * std::abs(z) + 0.4 * line;
                              },
                              head});
    removal_ =
        room.vector("removal", heads * keys,
                    {[](initialiser_argument e) { return 0.71 - 0.1 * (double(e.row) / last(e.rows) - 0.5); }});
    mixing_ = room.vector("removal_mix", heads * keys, init::constant(1.02));
  }

  template <class T>
  struct vectors {
    view3<T> key_rhk, a_rhk, b_rhk;
    static vectors carve(arena& a, index_t rows, index_t heads, index_t keys) {
      vectors v;
      for (auto* x : {&v.key_rhk, &v.a_rhk, &v.b_rhk}) *x = a.take_view<T, 3>({rows, heads, keys});
      return v;
    }
  };

  /// From projected keys and the columns that the rate's low-rank projection made.
  template <class Device, class T>
  void forward(Device dev, T const* base, view3<same<T>> k_rhk, view2<same<T> const> down_rc,
               view2<same<T>> rate_rc, vectors<same<T>> const& out, arena& ws) const {
    up_.forward(dev, base, down_rc, rate_rc, ws);
    each_head(dev, k_rhk.extent[0], [&](index_t r, index_t h) {
      T const norm = length(base, k_rhk, r, h);
      for (index_t i = 0; i < keys_; ++i) {
        index_t const c = h * keys_ + i;
        T const rate = sigmoid(rate_rc(r, c) + rate_bias_.data(base)[c]), k = k_rhk(r, h, i);
        T const unit = k * removal_.data(base)[c] / norm;
        out.a_rhk(r, h, i) = -unit;
        out.b_rhk(r, h, i) = unit * rate;
        out.key_rhk(r, h, i) = k * (T(1) + (rate - T(1)) * mixing_.data(base)[c]);
      }
    });
  }

  /// dk, d_down are written, parameters added to.
  template <class Device, class T>
  void backward(Device dev, T const* base, view3<same<T>> k_rhk, view2<same<T> const> down_rc,
                view2<same<T> const> rate_rc, vectors<same<T>> const& d, view3<same<T>> dk_rhk,
                view2<same<T>> d_down_rc, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    index_t const R = k_rhk.extent[0], C = heads_ * keys_,
                  count = kernels::detail::blocks(R, kernels::detail::rows_per_block);
    auto const d_rate = ws.take_view<T, 2>({R, C});
    T* const partial = ws.take<T>(3 * C * count);
    kernels::detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + 3 * C * b;
      std::fill_n(sums, 3 * C, T(0));
      for (index_t r = begin; r < end; ++r)
        for (index_t h = 0; h < heads_; ++h) head_backward(base, k_rhk, rate_rc, d, r, h, dk_rhk, d_rate, sums);
    });
    if (!ws.measuring())
      for (index_t b = 0; b < count; ++b) {
        index_t part = 0;
        for (auto const* w : {&removal_, &mixing_, &rate_bias_}) {
          for (index_t c = 0; c < C; ++c) w->data(d_base)[c] += partial[3 * C * b + part * C + c];
          ++part;
        }
      }
    up_.backward(dev, base, down_rc, view2<T const>(d_rate), d_down_rc, d_base, ws);
  }

 private:
  using initialiser_argument = initial_element const&;
  static double last(index_t n) noexcept { return n > 1 ? double(n - 1) : 1.0; }
  /// Place within the head in [-1, 1].
  static double in_head(initialiser_argument e) noexcept {
    double const half = e.a > 1 ? (e.a - 1) / 2 : 1.0;
    return (double(e.row % index_t(e.a)) - (e.a - 1) / 2) / half;
  }
  template <class Device, class F>
  void each_head(Device dev, index_t rows, F const& f) const {
    kernels::detail::for_row_blocks(dev, rows, [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t h = 0; h < heads_; ++h) f(r, h);
    });
  }
  /// max(|k k_k|, 1e-12); at the bound it has no derivative.
  template <class T>
  T length(T const* base, view3<T> k_rhk, index_t r, index_t h) const noexcept {
    T square(0);
    for (index_t i = 0; i < keys_; ++i) {
      T const u = k_rhk(r, h, i) * removal_.data(base)[h * keys_ + i];
      square += u * u;
    }
    return double(value_of(square)) > 1e-24 ? sqrt(square) : T(1e-12);
  }
  template <class T>
  void head_backward(T const* base, view3<T> k_rhk, view2<T const> rate_rc, vectors<T> const& d, index_t r,
                     index_t h, view3<T> dk_rhk, view2<T> d_rate, T* sums) const {
    index_t const C = heads_ * keys_;
    T const norm = length(base, k_rhk, r, h);
    bool const bounded = !(norm > T(1e-12));
    T inner(0);
    auto const rate_at = [&](index_t c) { return sigmoid(rate_rc(r, c) + rate_bias_.data(base)[c]); };
    auto const d_unit = [&](index_t i, T rate) { return d.b_rhk(r, h, i) * rate - d.a_rhk(r, h, i); };
    for (index_t i = 0; i < keys_; ++i) {
      index_t const c = h * keys_ + i;
      inner += d_unit(i, rate_at(c)) * k_rhk(r, h, i) * removal_.data(base)[c] / norm;
    }
    for (index_t i = 0; i < keys_; ++i) {
      index_t const c = h * keys_ + i;
      T const k = k_rhk(r, h, i), rate = rate_at(c), gain = removal_.data(base)[c], mix = mixing_.data(base)[c];
      T const unit = k * gain / norm, d_key = d.key_rhk(r, h, i);
      T const du = (d_unit(i, rate) - (bounded ? T(0) : unit * inner)) / norm;  // of k k_k
      dk_rhk(r, h, i) = du * gain + d_key * (T(1) + (rate - T(1)) * mix);
      sums[c] += du * k;
      sums[C + c] += d_key * k * (rate - T(1));
      T const d_raw = (d.b_rhk(r, h, i) * unit + d_key * k * mix) * rate * (T(1) - rate);
      sums[2 * C + c] += d_raw;
      d_rate(r, c) = d_raw;
    }
  }

  index_t heads_ = 1, keys_ = 1;
  low_rank up_;
  weight rate_bias_, removal_, mixing_;
};

}  // namespace seqmix::inline v0
