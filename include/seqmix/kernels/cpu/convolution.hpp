#pragma once

#include <seqmix/kernels/cpu/rows.hpp>

/// The short causal convolution, vectorised over channels. Work is cut into blocks of rows; backward computes the
/// few derivatives that a block needs of the next one's rows again.
namespace seqmix::inline v0::kernels {

namespace detail {

/// What both directions read: taps [W,Cp], bias [Cp] and the inputs before each sequence [N,W-1,Cp], channels
/// innermost.
template <class Isa, class T>
class convolution {
 public:
  convolution(sequences const& seq, view2<T const> x_rc, view2<T const> w_cj, T const* b_c,
              view3<T const> window_ncj, arena& ws)
      : seq_(seq), x_(x_rc), C_(x_rc.extent[1]), W_(w_cj.extent[1]), Cp_(simd::padded<Isa, T>(C_)),
        taps_(ws.take<T>(W_ * Cp_)), bias_(ws.take<T>(Cp_)), before_(ws.take<T>(seq.count() * (W_ - 1) * Cp_)) {
    if (ws.measuring()) return;
    transpose<Isa>(w_cj.data, w_cj.stride[0], C_, W_, taps_, Cp_);
    std::fill_n(bias_, Cp_, T(0));
    if (b_c) std::copy_n(b_c, C_, bias_);
    for (index_t n = 0; n < seq.count(); ++n) {
      T* const to = before_ + n * (W_ - 1) * Cp_;
      if (window_ncj)
        transpose<Isa>(window_ncj.at(n), window_ncj.stride[1], C_, W_ - 1, to, Cp_);
      else
        std::fill_n(to, (W_ - 1) * Cp_, T(0));
    }
  }
  index_t channels() const noexcept { return C_; }
  index_t width() const noexcept { return W_; }
  index_t row() const noexcept { return Cp_; }
  T const* tap(index_t j) const noexcept { return taps_ + j * Cp_; }

  /// The input t tokens after the start of sequence n, from -(W - 1) on.
  T const* input(index_t n, index_t t) const noexcept {
    return t >= 0 ? x_.at(seq_.begin(n) + t) : before_ + ((n + 1) * (W_ - 1) + t) * Cp_;
  }
  /// The inputs that meet taps 0 .. W-1 at one token, `row` elements apart.
  struct inputs {
    T const* first;
    index_t row;
  };
  /// `room` takes W rows where a sequence begins.
  inputs inputs_of(index_t n, index_t t, T* room) const noexcept {
    if (t >= W_ - 1) return {input(n, t - W_ + 1), x_.stride[0]};
    for (index_t j = 0; j < W_; ++j) std::copy_n(input(n, t - W_ + 1 + j), C_, room + j * Cp_);
    return {room, Cp_};
  }
  /// b + sum_j w_j x(t - W + 1 + j) of the channels from c on.
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> sum(inputs const& in, index_t c, Lanes const& lanes) const noexcept {
    simd::prefetch(in.first + c, (W_ + 1) * in.row);  // two tokens on: rows lie too far apart to be foreseen
    auto total = simd::load<Isa>(bias_ + c);
    for (index_t j = 0; j < W_; ++j) total += simd::load<Isa>(tap(j) + c) * lanes.load(in.first + j * in.row + c);
    return total;
  }
  /// Derivative of that sum from the derivative of its activation.
  template <class Lanes>
  SEQMIX_INLINE simd::vec<Isa, T> d_sum(inputs const& in, bool activation, T const* dy, index_t c,
                                        Lanes const& lanes) const noexcept {
    auto const d = lanes.load(dy + c);
    if (!activation) return d;
    auto const x = sum(in, c, lanes);
    return d * silu_slope(x, simd::sigmoid<Isa, T>(x));
  }
  /// to = sum over `count` tokens, from `first` tokens after an input, of the tap that met it times d [.,Cp].
  void add_up(index_t first, index_t count, T const* d, T* to) const noexcept {
    simd::for_vectors<Isa, T>(C_, [&](index_t c, auto const& lanes) {
      simd::vec<Isa, T> total{};
      for (index_t i = 0; i < count; ++i)
        total += simd::load<Isa>(tap(W_ - 1 - first - i) + c) * simd::load<Isa>(d + i * Cp_ + c);
      lanes.store(to + c, total);
    });
  }

  /// f(row, sequence, tokens since its start) for rows [begin, end).
  template <class F>
  void for_rows(index_t begin, index_t end, F const& f) const {
    if (begin >= end) return;
    for (index_t r = begin, n = seq_.holder(begin); r < end; ++r) {
      while (seq_.end(n) <= r) ++n;
      f(r, n, r - seq_.begin(n));
    }
  }

 private:
  sequences const& seq_;
  view2<T const> x_;
  index_t C_, W_, Cp_;
  T *taps_, *bias_, *before_;
};

/// Derivatives of the windows before each sequence: what its first tokens, or the window behind it, read of them.
template <class Isa, class T>
void conv_window_backward(convolution<Isa, T> const& conv, sequences const& seq, bool activation,
                          view2<T const> dy_rc, view3<T const> d_window_out_ncj, view3<T> d_window_ncj, T* d,
                          T* room) {
  index_t const W = conv.width(), Cp = conv.row();
  T* const sum = room + W * Cp;
  for (index_t n = 0; n < seq.count(); ++n) {
    index_t const length = seq.length(n), readers = (std::min)(W - 1, length);
    for (index_t t = 0; t < readers; ++t) {
      auto const in = conv.inputs_of(n, t, room);
      simd::for_vectors<Isa, T>(conv.channels(), [&](index_t c, auto const& lanes) {
        simd::store<Isa>(d + t * Cp + c, conv.d_sum(in, activation, dy_rc.at(seq.begin(n) + t), c, lanes));
      });
    }
    for (index_t j = 0; j < W - 1; ++j) {
      conv.add_up(W - 1 - j, (std::min)(j + 1, readers), d, sum);
      for (index_t c = 0; c < conv.channels(); ++c)
        d_window_ncj(n, c, j) =
            sum[c] + (d_window_out_ncj && j >= length ? d_window_out_ncj(n, c, j - length) : T(0));
    }
  }
}

}  // namespace detail

template <class Isa, class Threads, class T>
void conv_forward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rc,
                  view2<same<T> const> w_cj, same<T> const* b_c, bool activation, view3<same<T> const> window_ncj,
                  view2<same<T>> y_rc, view3<same<T>> window_out_ncj, arena& ws) {
  arena_scope const scope(ws);
  detail::convolution<Isa, T> const conv(seq, x_rc, w_cj, b_c, window_ncj, ws);
  index_t const W = conv.width(), size = W * conv.row();
  T* const scratch = ws.take<T>(thread_count(dev) * size);
  if (ws.measuring()) return;
  parallel_for(dev, detail::blocks(seq.rows(), detail::rows_per_block), [&](index_t b, int thread) {
    index_t const begin = b * detail::rows_per_block, end = (std::min)(seq.rows(), begin + detail::rows_per_block);
    conv.for_rows(begin, end, [&](index_t r, index_t n, index_t t) {
      auto const in = conv.inputs_of(n, t, scratch + thread * size);
      T* const y = y_rc.at(r);
      simd::for_vectors<Isa, T>(conv.channels(), [&](index_t c, auto const& lanes) {
        auto const x = conv.sum(in, c, lanes);
        lanes.store(y + c, activation ? x * simd::sigmoid<Isa, T>(x) : x);
      });
    });
  });
  for (index_t n = 0; window_out_ncj && n < seq.count(); ++n)
    for (index_t j = 0; j < W - 1; ++j) {
      T const* const x = conv.input(n, seq.length(n) - (W - 1) + j);
      for (index_t c = 0; c < conv.channels(); ++c) window_out_ncj(n, c, j) = x[c];
    }
}

/// dx is written, dw and db are added to; the derivative of the carried windows goes in and out.
template <class Isa, class Threads, class T>
void conv_backward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rc,
                   view2<same<T> const> w_cj, same<T> const* b_c, bool activation, view3<same<T> const> window_ncj,
                   view2<same<T> const> dy_rc, view3<same<T> const> d_window_out_ncj, view2<same<T>> dx_rc,
                   view2<same<T>> dw_cj, same<T>* db_c, view3<same<T>> d_window_ncj, arena& ws) {
  arena_scope const scope(ws);
  detail::convolution<Isa, T> const conv(seq, x_rc, w_cj, b_c, window_ncj, ws);
  index_t const R = seq.rows(), C = conv.channels(), W = conv.width(), Cp = conv.row();
  index_t const count = detail::blocks(R, detail::rows_per_block), sums = (W + 1) * Cp;
  // Of one thread: inputs at a sequence's start | one row | derivatives of the sums, W - 1 rows of the next block's
  // too.
  index_t const size = (W + 1 + detail::rows_per_block + W - 1) * Cp;
  T* const partial = ws.take<T>((count + 1) * sums);  // of dw [W] and db, one a block; their sum
  T* const scratch = ws.take<T>(thread_count(dev) * size);
  if (ws.measuring()) return;
  parallel_for(dev, count, [&](index_t b, int thread) {
    index_t const begin = b * detail::rows_per_block, end = (std::min)(R, begin + detail::rows_per_block);
    T *const room = scratch + thread * size, *const d = room + (W + 1) * Cp;
    T *const dw = partial + b * sums, *const db = dw + W * Cp;
    std::fill_n(dw, sums, T(0));
    auto const derive = [&](index_t r, index_t n, index_t t, auto const& use) {
      auto const in = conv.inputs_of(n, t, room);
      simd::for_vectors<Isa, T>(C, [&](index_t c, auto const& lanes) {
        simd::prefetch(dy_rc.at(r) + c, 2 * dy_rc.stride[0]);
        auto const x = conv.d_sum(in, activation, dy_rc.at(r), c, lanes);
        simd::store<Isa>(d + (r - begin) * Cp + c, x);
        use(in, x, c, lanes);
      });
    };
    conv.for_rows(begin, end, [&](index_t r, index_t n, index_t t) {
      derive(r, n, t, [&](auto const& in, auto const& x, index_t c, auto const& lanes) {
        simd::store<Isa>(db + c, simd::load<Isa>(db + c) + x);
        for (index_t j = 0; j < W; ++j) {
          T* const sum = dw + j * Cp + c;
          simd::store<Isa>(sum, simd::load<Isa>(sum) + lanes.load(in.first + j * in.row + c) * x);
        }
      });
    });
    index_t const readers_end = (std::min)(end + W - 1, seq.end(seq.holder(end - 1)));
    conv.for_rows(end, readers_end,
                  [&](index_t r, index_t n, index_t t) { derive(r, n, t, [](auto const&...) {}); });
    conv.for_rows(begin, end, [&](index_t r, index_t n, index_t) {
      index_t const left = seq.end(n) - r;
      T* const dx = dx_rc.at(r);
      conv.add_up(0, (std::min)(W, left), d + (r - begin) * Cp, dx);
      if (d_window_out_ncj && left < W)  // the window behind the sequence reads it too
        for (index_t c = 0; c < C; ++c) dx[c] += d_window_out_ncj(n, c, W - 1 - left);
    });
  });
  T* const total = partial + count * sums;
  std::fill_n(total, sums, T(0));
  detail::add_partials(partial, count, sums, total);
  for (index_t c = 0; c < C; ++c) {
    for (index_t j = 0; j < W; ++j) dw_cj(c, j) += total[j * Cp + c];
    if (db_c) db_c[c] += total[W * Cp + c];
  }
  if (d_window_ncj)
    detail::conv_window_backward(conv, seq, activation, view2<T const>(dy_rc), view3<T const>(d_window_out_ncj),
                                 d_window_ncj, scratch + (W + 1) * Cp, scratch);
}

}  // namespace seqmix::inline v0::kernels
