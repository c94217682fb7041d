#pragma once

#include <cmath>
#include <cstdint>

#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/reference/rows.hpp>

/// What surrounds a mixer, vectorised over channels. Rows are cut into blocks of 64; a sum over tokens is one partial sum
/// a block, added in the order of the blocks.
namespace seqmix::inline v0::kernels {

namespace detail {

inline constexpr index_t rows_per_block = 64;

template <class Device, class Body>
void for_row_blocks(Device dev, index_t rows, Body const& body) {
  parallel_for(dev, blocks(rows, rows_per_block), [&](index_t b, int) {
    body(b, b * rows_per_block, (std::min)(rows, (b + 1) * rows_per_block));
  });
}

/// target [C] += the partial sums [blocks,C] in order.
template <class T>
void add_partials(T const* partial, index_t count, index_t channels, T* target) noexcept {
  for (index_t b = 0; b < count; ++b)
    for (index_t c = 0; c < channels; ++c) target[c] += partial[b * channels + c];
}

template <class Isa, class T>
T square_sum(T const* x, index_t n) noexcept {
  return simd::map_sum<Isa, T>(n, [](auto const& a) { return a * a; }, x);
}
template <class Isa, class T>
T dot(T const* x, T const* y, index_t n) noexcept {
  return simd::map_sum<Isa, T>(n, [](auto const& a, auto const& b) { return a * b; }, x, y);
}

/// Derivative of silu from x and s = sigmoid(x).
template <class V>
SEQMIX_INLINE V silu_slope(V const& x, V const& s) noexcept {
  return s + x * (s - s * s);
}

/// to = from, or += when `add`.
template <class Device, class T>
void copy_or_add(Device dev, view2<T const> from_rc, view2<same<T>> to_rc, bool add) {
  for_row_blocks(dev, from_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t c = 0; c < from_rc.extent[1]; ++c) to_rc(r, c) = add ? to_rc(r, c) + from_rc(r, c) : from_rc(r, c);
  });
}
template <class Device, class T>
void copy(Device dev, view2<T const> from_rc, view2<same<T>> to_rc) {
  copy_or_add(dev, from_rc, to_rc, false);
}

/// y = x + h w': a projection onto the residual stream.
template <class Device, class T>
void add_linear(Device dev, view2<T const> x_rd, view2<same<T> const> h_rc, view2<same<T> const> w_dc, view2<same<T>> y_rd,
                arena& ws) {
  copy(dev, x_rd, y_rd);
  linear_forward(dev, h_rc, w_dc, y_rd, true, ws);
}

}  // namespace detail

template <class Isa, class Threads, class T>
void rms_norm_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c, double eps,
                      view2<same<T>> y_rc, same<T>* rstd_r) {
  index_t const C = x_rc.extent[1];
  detail::for_row_blocks(dev, x_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      T const rstd = T(1) / std::sqrt(detail::square_sum<Isa>(x_rc.at(r), C) / T(C) + T(eps));
      rstd_r[r] = rstd;
      simd::map<Isa>(C, [=](auto const& x, auto const& w) { return x * rstd * w; }, y_rc.at(r), x_rc.at(r), w_c);
    }
  });
}

/// dx (+)= the derivative of rms_norm_forward; dw += its own.
template <class Isa, class Threads, class T>
void rms_norm_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c, same<T> const* rstd_r,
                       view2<same<T> const> dy_rc, view2<same<T>> dx_rc, bool add, same<T>* dw_c, arena& ws) {
  arena_scope const scope(ws);
  index_t const C = x_rc.extent[1], R = x_rc.extent[0], count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * C);
  if (ws.measuring()) return;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const dw = partial + b * C;
    std::fill_n(dw, C, T(0));
    for (index_t r = begin; r < end; ++r) {
      T const rstd = rstd_r[r];
      T const inner = simd::map_sum<Isa, T>(
          C, [](auto const& x, auto const& w, auto const& dy) { return x * w * dy; }, x_rc.at(r), w_c, dy_rc.at(r));
      T const pull = inner * rstd * rstd * rstd / T(C);
      simd::map<Isa>(
          C, [=](auto const& sum, auto const& x, auto const& dy) { return sum + x * rstd * dy; }, dw, dw, x_rc.at(r),
          dy_rc.at(r));
      T* const dx = dx_rc.at(r);
      auto const derivative = [=](auto const& x, auto const& w, auto const& dy) { return dy * w * rstd - x * pull; };
      if (add)
        simd::map<Isa>(
            C, [=](auto const& old, auto const& x, auto const& w, auto const& dy) { return old + derivative(x, w, dy); }, dx,
            dx, x_rc.at(r), w_c, dy_rc.at(r));
      else
        simd::map<Isa>(C, derivative, dx, x_rc.at(r), w_c, dy_rc.at(r));
    }
  });
  detail::add_partials(partial, count, C, dw_c);
}

template <class Isa, class Threads, class T>
void layer_norm_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c, same<T> const* b_c,
                        double eps, view2<same<T>> y_rc, same<T>* mean_r, same<T>* rstd_r) {
  index_t const C = x_rc.extent[1];
  detail::for_row_blocks(dev, x_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      T const mean = simd::map_sum<Isa, T>(C, [](auto const& x) { return x; }, x_rc.at(r)) / T(C);
      T* const y = y_rc.at(r);
      simd::map<Isa>(C, [=](auto const& x) { return x - mean; }, y, x_rc.at(r));
      T const rstd = T(1) / std::sqrt(detail::square_sum<Isa>(y, C) / T(C) + T(eps));
      mean_r[r] = mean;
      rstd_r[r] = rstd;
      simd::map<Isa>(
          C, [=](auto const& x, auto const& w, auto const& shift) { return x * rstd * w + shift; }, y, y, w_c, b_c);
    }
  });
}

template <class Isa, class Threads, class T>
void layer_norm_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c, same<T> const* mean_r,
                         same<T> const* rstd_r, view2<same<T> const> dy_rc, view2<same<T>> dx_rc, bool add, same<T>* dw_c,
                         same<T>* db_c, arena& ws) {
  arena_scope const scope(ws);
  index_t const C = x_rc.extent[1], R = x_rc.extent[0], count = detail::blocks(R, detail::rows_per_block);
  T* const dw_partial = ws.take<T>(count * C);
  T* const db_partial = ws.take<T>(count * C);
  if (ws.measuring()) return;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T *const dw = dw_partial + b * C, *const db = db_partial + b * C;
    std::fill_n(dw, C, T(0));
    std::fill_n(db, C, T(0));
    for (index_t r = begin; r < end; ++r) {
      T const rstd = rstd_r[r], mean = mean_r[r];
      T const *const x = x_rc.at(r), *const dy = dy_rc.at(r);
      T sum(0), inner(0);
      for (index_t c = 0; c < C; ++c) {
        T const hat = (x[c] - mean) * rstd;
        sum += dy[c] * w_c[c];
        inner += dy[c] * w_c[c] * hat;
        dw[c] += dy[c] * hat;
        db[c] += dy[c];
      }
      T* const dx = dx_rc.at(r);
      for (index_t c = 0; c < C; ++c) {
        T const hat = (x[c] - mean) * rstd;
        dx[c] = (add ? dx[c] : T(0)) + rstd * (dy[c] * w_c[c] - (sum + hat * inner) / T(C));
      }
    }
  });
  detail::add_partials(dw_partial, count, C, dw_c);
  detail::add_partials(db_partial, count, C, db_c);
}

template <class Isa, class Threads, class T>
void output_stage_forward(device::basic_cpu<Isa, Threads> dev, output_stage const& s, view2<T const> o_rc,
                          view2<same<T> const> z_rc, same<T> const* w, view2<same<T>> y_rc, same<T>* rstd) {
  index_t const C = o_rc.extent[1], width = s.norm_width ? s.norm_width : C, groups = C / width;
  auto const gated = [](auto const& x, auto const& z) { return x * z * simd::sigmoid<Isa, T>(z); };
  detail::for_row_blocks(dev, o_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      T *const y = y_rc.at(r), *const unit = rstd + r * groups;
      T const* from = o_rc.at(r);
      if (s.gate && s.gate_first) simd::map<Isa>(C, gated, y, from, z_rc.at(r)), from = y;
      for (index_t g = 0; g < groups && s.norm_width; ++g) {
        T const* const x = from + g * width;
        T const scale = T(1) / std::sqrt(detail::square_sum<Isa>(x, width) / T(width) + T(s.eps));
        unit[g] = scale;
        for (index_t c = 0; c < width; c += s.weight_width)
          simd::map<Isa>(
              s.weight_width, [=](auto const& a, auto const& b) { return a * scale * b; }, y + g * width + c, x + c, w);
      }
      if (s.norm_width) from = y;
      if (s.gate && !s.gate_first)
        simd::map<Isa>(C, gated, y, from, z_rc.at(r));
      else if (from != y)
        std::copy_n(from, C, y);
    }
  });
}

/// do and dz are written, dw is added to.
template <class Isa, class Threads, class T>
void output_stage_backward(device::basic_cpu<Isa, Threads> dev, output_stage const& s, view2<T const> o_rc,
                           view2<same<T> const> z_rc, same<T> const* w, same<T> const* rstd, view2<same<T> const> dy_rc,
                           view2<same<T>> do_rc, view2<same<T>> dz_rc, same<T>* dw, arena& ws) {
  arena_scope const scope(ws);
  index_t const C = o_rc.extent[1], R = o_rc.extent[0], width = s.norm_width ? s.norm_width : C, groups = C / width;
  index_t const count = detail::blocks(R, detail::rows_per_block), W = s.weight_width;
  T* const partial = ws.take<T>(count * W);
  T* const scratch = ws.take<T>(count * 2 * C);
  if (ws.measuring()) return;
  auto const gated = [](auto const& x, auto const& z) { return x * z * simd::sigmoid<Isa, T>(z); };
  auto const d_gate = [](auto const& x, auto const& z, auto const& d) {
    return d * x * detail::silu_slope(z, simd::sigmoid<Isa, T>(z));
  };
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T *const dw_block = partial + b * W, *const x = scratch + b * 2 * C, *const dn = x + C;
    std::fill_n(dw_block, W, T(0));
    for (index_t r = begin; r < end; ++r) {
      T const *const o = o_rc.at(r), *const dy = dy_rc.at(r), *const z = s.gate ? z_rc.at(r) : nullptr;
      T* const d_o = do_rc.at(r);
      if (s.gate && s.gate_first)
        simd::map<Isa>(C, gated, x, o, z);
      else
        std::copy_n(o, C, x);
      if (s.gate && !s.gate_first)
        simd::map<Isa>(C, gated, dn, dy, z);
      else
        std::copy_n(dy, C, dn);
      for (index_t g = 0; g < groups && s.norm_width; ++g) {
        T const scale = rstd[r * groups + g];
        T inner(0);
        for (index_t c = g * width; c < (g + 1) * width; ++c) {
          T const hat = x[c] * scale;
          if (s.gate && !s.gate_first) {
            // y = hat w silu(z): the gate's derivative needs the normalised value
            T const sig = T(1) / (T(1) + std::exp(-z[c]));
            dz_rc(r, c) = dy[c] * hat * w[c % W] * sig * (T(1) + z[c] * (T(1) - sig));
          }
          dw_block[c % W] += dn[c] * hat;
          inner += dn[c] * w[c % W] * hat;
        }
        for (index_t c = g * width; c < (g + 1) * width; ++c)
          dn[c] = scale * (dn[c] * w[c % W] - x[c] * scale * inner / T(width));
      }
      if (s.gate && !s.norm_width) simd::map<Isa>(C, d_gate, dz_rc.at(r), o, z, dy);
      if (s.gate && s.gate_first) {
        if (s.norm_width) {
          simd::map<Isa>(C, d_gate, dz_rc.at(r), o, z, dn);
          simd::map<Isa>(C, gated, d_o, dn, z);
        } else {
          simd::map<Isa>(C, gated, d_o, dy, z);
        }
      } else {
        std::copy_n(dn, C, d_o);
      }
    }
  });
  if (s.norm_width) detail::add_partials(partial, count, W, dw);
}

template <class Isa, class Threads, class T>
void swiglu_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> gate_rc, view2<same<T> const> up_rc,
                    view2<same<T>> y_rc) {
  detail::for_row_blocks(dev, gate_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      simd::map<Isa>(
          gate_rc.extent[1], [](auto const& g, auto const& u) { return g * simd::sigmoid<Isa, T>(g) * u; }, y_rc.at(r),
          gate_rc.at(r), up_rc.at(r));
  });
}

template <class Isa, class Threads, class T>
void swiglu_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> gate_rc, view2<same<T> const> up_rc,
                     view2<same<T> const> dy_rc, view2<same<T>> d_gate_rc, view2<same<T>> d_up_rc) {
  index_t const C = gate_rc.extent[1];
  detail::for_row_blocks(dev, gate_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      simd::map<Isa>(
          C, [](auto const& g, auto const& u, auto const& d) { return d * u * detail::silu_slope(g, simd::sigmoid<Isa, T>(g)); },
          d_gate_rc.at(r), gate_rc.at(r), up_rc.at(r), dy_rc.at(r));
      simd::map<Isa>(
          C, [](auto const& g, auto const& d) { return d * g * simd::sigmoid<Isa, T>(g); }, d_up_rc.at(r), gate_rc.at(r),
          dy_rc.at(r));
    }
  });
}

namespace detail {

/// A strip of channels of the convolution, all its tokens in order; taps are laid out [W,strip].
template <class Isa, class T>
class conv_strip {
 public:
  static constexpr index_t width = 64;
  conv_strip(sequences const& seq, view2<T const> x_rc, view2<T const> w_cj, T const* b_c, view3<T const> window_ncj,
             index_t strip, T* scratch)
      : seq_(seq), x_(x_rc), window_(window_ncj), c0_(strip * width), n_(std::min(width, x_rc.extent[1] - c0_)),
        W_(w_cj.extent[1]), taps_(scratch), bias_(taps_ + W_ * width), past_(bias_ + width) {
    for (index_t j = 0; j < W_; ++j)
      for (index_t c = 0; c < width; ++c) taps_[j * width + c] = c < n_ ? w_cj(c0_ + c, j) : T(0);
    for (index_t c = 0; c < width; ++c) bias_[c] = b_c && c < n_ ? b_c[c0_ + c] : T(0);
  }
  static index_t scratch_size(index_t W) noexcept { return (2 * W + 2) * width; }

  void begin_sequence(index_t n) {
    sequence_ = n;
    for (index_t j = 0; j + 1 < W_; ++j)
      for (index_t c = 0; c < width; ++c)
        past_[j * width + c] = window_ && c < n_ ? window_(n, c0_ + c, j) : T(0);
  }
  /// The strip's input t tokens after the sequence's start; the carried window before it.
  T const* input(index_t t) const noexcept {
    return t >= 0 ? x_.at(seq_.begin(sequence_) + t, c0_) : past_ + (t + W_ - 1) * width;
  }
  void sum(index_t t, T* out) const noexcept {
    simd::map<Isa>(n_, [](auto const& b) { return b; }, out, bias_);
    for (index_t j = 0; j < W_; ++j)
      simd::map<Isa>(
          n_, [](auto const& s, auto const& w, auto const& x) { return s + w * x; }, out, out, taps_ + j * width,
          input(t - W_ + 1 + j));
  }
  index_t first() const noexcept { return c0_; }
  index_t count() const noexcept { return n_; }
  T const* tap(index_t j) const noexcept { return taps_ + j * width; }

 private:
  sequences const& seq_;
  view2<T const> x_;
  view3<T const> window_;
  index_t c0_, n_, W_;
  T *taps_, *bias_, *past_;
  index_t sequence_ = 0;
};

}  // namespace detail

template <class Isa, class Threads, class T>
void conv_forward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rc, view2<same<T> const> w_cj,
                  same<T> const* b_c, bool activation, view3<same<T> const> window_ncj, view2<same<T>> y_rc,
                  view3<same<T>> window_out_ncj, arena& ws) {
  arena_scope const scope(ws);
  using strip_type = detail::conv_strip<Isa, T>;
  index_t const W = w_cj.extent[1], size = strip_type::scratch_size(W);
  T* const scratch = ws.take<T>(thread_count(dev) * size);
  if (ws.measuring()) return;
  parallel_for(dev, detail::blocks(x_rc.extent[1], strip_type::width), [&](index_t s, int thread) {
    strip_type strip(seq, x_rc, w_cj, b_c, window_ncj, s, scratch + thread * size);
    index_t const c0 = strip.first(), n = strip.count();
    for (index_t m = 0; m < seq.count(); ++m) {
      strip.begin_sequence(m);
      for (index_t t = 0; t < seq.length(m); ++t) {
        T* const y = y_rc.at(seq.begin(m) + t, c0);
        strip.sum(t, y);
        if (activation) simd::map<Isa>(n, [](auto const& x) { return x * simd::sigmoid<Isa, T>(x); }, y, y);
      }
      for (index_t j = 0; window_out_ncj && j < W - 1; ++j)
        for (index_t c = 0; c < n; ++c) window_out_ncj(m, c0 + c, j) = strip.input(seq.length(m) - (W - 1) + j)[c];
    }
  });
}

/// dx is written, dw and db are added to; the derivative of the carried windows goes in and out.
template <class Isa, class Threads, class T>
void conv_backward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view2<T const> x_rc, view2<same<T> const> w_cj,
                   same<T> const* b_c, bool activation, view3<same<T> const> window_ncj, view2<same<T> const> dy_rc,
                   view3<same<T> const> d_window_out_ncj, view2<same<T>> dx_rc, view2<same<T>> dw_cj, same<T>* db_c,
                   view3<same<T>> d_window_ncj, arena& ws) {
  arena_scope const scope(ws);
  using strip_type = detail::conv_strip<Isa, T>;
  constexpr index_t width = strip_type::width;
  index_t const W = w_cj.extent[1], longest = seq.longest();
  // taps, bias, past | dw [W], db | d_sum with W-1 zero rows behind | d of the past rows
  index_t const size = strip_type::scratch_size(W) + (W + 1) * width + (longest + W) * width;
  T* const scratch = ws.take<T>(thread_count(dev) * size);
  if (ws.measuring()) return;
  parallel_for(dev, detail::blocks(x_rc.extent[1], width), [&](index_t s, int thread) {
    T* const base = scratch + thread * size;
    strip_type strip(seq, x_rc, w_cj, b_c, window_ncj, s, base);
    T* const dw = base + strip_type::scratch_size(W);
    T* const db = dw + W * width;
    T* const d_sum = db + width;
    index_t const c0 = strip.first(), n = strip.count();
    std::fill_n(dw, (W + 1) * width, T(0));
    for (index_t m = 0; m < seq.count(); ++m) {
      index_t const length = seq.length(m), first = seq.begin(m);
      strip.begin_sequence(m);
      for (index_t t = 0; t < length; ++t) {
        T* const d = d_sum + t * width;
        std::copy_n(dy_rc.at(first + t, c0), n, d);
        if (activation) {
          alignas(64) T pre[std::size_t(width)];
          strip.sum(t, pre);
          simd::map<Isa>(
              n, [](auto const& x, auto const& g) { return g * detail::silu_slope(x, simd::sigmoid<Isa, T>(x)); }, d, pre, d);
        }
        simd::map<Isa>(n, [](auto const& a, auto const& b) { return a + b; }, db, db, d);
        for (index_t j = 0; j < W; ++j)
          simd::map<Isa>(
              n, [](auto const& a, auto const& x, auto const& g) { return a + x * g; }, dw + j * width, dw + j * width,
              strip.input(t - W + 1 + j), d);
      }
      auto const add_taps = [&](index_t t, T* to) {
        for (index_t j = 0; j < W; ++j) {
          index_t const user = t + W - 1 - j;  // the token whose tap j met input t
          if (user < 0 || user >= length) continue;
          simd::map<Isa>(
              n, [](auto const& a, auto const& w, auto const& g) { return a + w * g; }, to, to, strip.tap(j),
              d_sum + user * width);
        }
        index_t const carried = t - (length - (W - 1));  // the slot of the outgoing window that holds input t
        if (d_window_out_ncj && carried >= 0)
          for (index_t c = 0; c < n; ++c) to[c] += d_window_out_ncj(m, c0 + c, carried);
      };
      for (index_t t = 0; t < length; ++t) {
        T* const dx = dx_rc.at(first + t, c0);
        std::fill_n(dx, n, T(0));
        add_taps(t, dx);
      }
      for (index_t j = 0; d_window_ncj && j < W - 1; ++j) {
        alignas(64) T d[std::size_t(width)] = {};
        add_taps(j - (W - 1), d);
        for (index_t c = 0; c < n; ++c) d_window_ncj(m, c0 + c, j) = d[c];
      }
    }
    for (index_t c = 0; c < n; ++c) {
      for (index_t j = 0; j < W; ++j) dw_cj(c0 + c, j) += dw[j * width + c];
      if (db_c) db_c[c0 + c] += db[c];
    }
  });
}

template <class Isa, class Threads, class T>
void rope(device::basic_cpu<Isa, Threads> dev, sequences const& seq, index_t const* position_n, double base, double direction,
          view3<T> x_rhd, arena& ws) {
  arena_scope const scope(ws);
  index_t const half = x_rhd.extent[2] / 2;
  index_t low = 0, high = 0;
  for (index_t n = 0; n < seq.count(); ++n) {
    index_t const at = position_n ? position_n[n] : 0;
    low = n == 0 ? at : (std::min)(low, at);
    high = (std::max)(high, at + seq.length(n));
  }
  T* const table = ws.take<T>(2 * half * (ws.measuring() && position_n ? seq.longest() : high - low));
  if (ws.measuring()) return;
  parallel_for(dev, high - low, [&](index_t t, int) {
    for (index_t i = 0; i < half; ++i) {
      double const angle = double(t + low) * std::pow(base, -double(i) / double(half));
      table[2 * half * t + i] = T(std::cos(angle));
      table[2 * half * t + half + i] = T(direction * std::sin(angle));
    }
  });
  parallel_for(dev, seq.count(), [&](index_t n, int) {
    for (index_t r = seq.begin(n); r < seq.end(n); ++r) {
      T const* const c = table + 2 * half * (r - seq.begin(n) + (position_n ? position_n[n] : 0) - low);
      T const* const s = c + half;
      for (index_t h = 0; h < x_rhd.extent[1]; ++h) {
        T *const a = x_rhd.at(r, h), *const b = a + half;
        for (index_t i = 0; i < half; ++i) {
          T const x = a[i], y = b[i];
          a[i] = x * c[i] - y * s[i];
          b[i] = y * c[i] + x * s[i];
        }
      }
    }
  });
}

template <class Isa, class Threads, class T>
void skip_forward(device::basic_cpu<Isa, Threads> dev, view3<T const> v_rhv, same<T> const* d_h, view3<same<T>> o_rhv) {
  index_t const H = o_rhv.extent[1], V = o_rhv.extent[2];
  detail::for_row_blocks(dev, o_rhv.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h) {
        T const d = d_h[h];
        simd::map<Isa>(
            V, [=](auto const& o, auto const& v) { return o + d * v; }, o_rhv.at(r, h), o_rhv.at(r, h),
            v_rhv.at(r, h * v_rhv.extent[1] / H));
      }
  });
}

/// dv += d_h do, dd_h += do.v
template <class Isa, class Threads, class T>
void skip_backward(device::basic_cpu<Isa, Threads> dev, view3<T const> v_rhv, same<T> const* d_h, view3<same<T> const> d_o_rhv,
                   view3<same<T>> dv_rhv, same<T>* dd_h, arena& ws) {
  arena_scope const scope(ws);
  index_t const H = d_o_rhv.extent[1], V = d_o_rhv.extent[2], R = d_o_rhv.extent[0];
  index_t const count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * H);
  if (ws.measuring()) return;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    std::fill_n(partial + b * H, H, T(0));
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h) {
        index_t const hv = h * v_rhv.extent[1] / H;
        T const d = d_h[h];
        partial[b * H + h] += detail::dot<Isa>(d_o_rhv.at(r, h), v_rhv.at(r, hv), V);
        simd::map<Isa>(
            V, [=](auto const& dv, auto const& g) { return dv + d * g; }, dv_rhv.at(r, hv), dv_rhv.at(r, hv), d_o_rhv.at(r, h));
      }
  });
  detail::add_partials(partial, count, H, dd_h);
}

template <class Isa, class Threads, class T>
void embedding_forward(device::basic_cpu<Isa, Threads> dev, std::int32_t const* tokens, view2<T const> table_vd,
                       view2<same<T>> x_rd) {
  detail::for_row_blocks(dev, x_rd.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) std::copy_n(table_vd.at(tokens[r]), x_rd.extent[1], x_rd.at(r));
  });
}

/// d_table[token] += dx, rows in order; cut by strips of channels.
template <class Isa, class Threads, class T>
void embedding_backward(device::basic_cpu<Isa, Threads> dev, std::int32_t const* tokens, view2<T const> dx_rd,
                        view2<same<T>> d_table_vd) {
  constexpr index_t strip = 64;
  index_t const D = dx_rd.extent[1];
  parallel_for(dev, detail::blocks(D, strip), [&](index_t s, int) {
    index_t const begin = s * strip, end = (std::min)(D, begin + strip);
    for (index_t r = 0; r < dx_rd.extent[0]; ++r) {
      T* const to = d_table_vd.at(tokens[r]);
      for (index_t d = begin; d < end; ++d) to[d] += dx_rd(r, d);
    }
  });
}

/// Sum of -log softmax(logits)[label] over the rows whose label is not negative, in double; returns how many those are.
/// `d_logits` (may be the logits themselves, or empty) becomes scale (softmax - onehot), 0 in ignored rows.
template <class Isa, class Threads, class T>
index_t cross_entropy(device::basic_cpu<Isa, Threads> dev, view2<T const> logits_rv, std::int32_t const* labels, double scale,
                      view2<same<T>> d_logits_rv, double* loss, arena& ws) {
  arena_scope const scope(ws);
  index_t const R = logits_rv.extent[0], V = logits_rv.extent[1], count = detail::blocks(R, detail::rows_per_block);
  double* const partial = ws.take<double>(count);
  index_t* const counted = ws.take<index_t>(count);
  if (ws.measuring()) return 0;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    partial[b] = 0.0;
    counted[b] = 0;
    for (index_t r = begin; r < end; ++r) {
      T const* const x = logits_rv.at(r);
      T* const d = d_logits_rv ? d_logits_rv.at(r) : nullptr;
      if (labels[r] < 0) {
        if (d) std::fill_n(d, V, T(0));
        continue;
      }
      ++counted[b];
      T const most = *std::max_element(x, x + V), target = x[labels[r]];
      T const sum = simd::map_sum_shifted<Isa>(V, most, x);
      partial[b] += double(most) + std::log(double(sum)) - double(target);
      if (!d) continue;
      T const factor = T(scale) / sum;
      simd::map<Isa>(V, [=](auto const& e) { return simd::exp<Isa, T>(e - most) * factor; }, d, x);
      d[labels[r]] -= T(scale);
    }
  });
  index_t rows = 0;
  *loss = 0.0;
  for (index_t b = 0; b < count; ++b) *loss += partial[b], rows += counted[b];
  return rows;
}

}  // namespace seqmix::inline v0::kernels
