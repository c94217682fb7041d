#pragma once

#include <cmath>
#include <cstdint>

#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/reference/rows.hpp>

/// What surrounds a mixer, vectorised over channels. Rows are cut into blocks of 64; a sum over tokens is one
/// partial sum a block, added in the order of the blocks.
namespace seqmix::inline v0::kernels {

namespace detail {

inline constexpr index_t rows_per_block = 64;

template <class Device, class Body>
void for_row_blocks(Device dev, index_t rows, Body const& body) {
  parallel_for(dev, blocks(rows, rows_per_block),
               [&](index_t b, int) { body(b, b * rows_per_block, (std::min)(rows, (b + 1) * rows_per_block)); });
}

/// target [C] += the partial sums [blocks,C] in order.
template <class T>
void add_partials(T const* partial, index_t count, index_t channels, T* target) noexcept {
  for (index_t b = 0; b < count; ++b)
    for (index_t c = 0; c < channels; ++c) target[c] += partial[b * channels + c];
}

template <class Isa, class T>
T square_sum(T const* x, index_t n) noexcept {
  return simd::map_sum<Isa, T>(
      n, [](auto const& a) { return a * a; }, x);
}
template <class Isa, class T>
T dot(T const* x, T const* y, index_t n) noexcept {
  return simd::map_sum<Isa, T>(
      n, [](auto const& a, auto const& b) { return a * b; }, x, y);
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
      for (index_t c = 0; c < from_rc.extent[1]; ++c)
        to_rc(r, c) = add ? to_rc(r, c) + from_rc(r, c) : from_rc(r, c);
  });
}
template <class Device, class T>
void copy(Device dev, view2<T const> from_rc, view2<same<T>> to_rc) {
  copy_or_add(dev, from_rc, to_rc, false);
}

/// y = x + h w': a projection onto the residual stream.
template <class Device, class T>
void add_linear(Device dev, view2<T const> x_rd, view2<same<T> const> h_rc, view2<same<T> const> w_dc,
                view2<same<T>> y_rd, arena& ws) {
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
      simd::map<Isa>(
          C, [=](auto const& x, auto const& w) { return x * rstd * w; }, y_rc.at(r), x_rc.at(r), w_c);
    }
  });
}

/// dx (+)= the derivative of rms_norm_forward; dw += its own.
template <class Isa, class Threads, class T>
void rms_norm_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c,
                       same<T> const* rstd_r, view2<same<T> const> dy_rc, view2<same<T>> dx_rc, bool add,
                       same<T>* dw_c, arena& ws) {
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
          C, [=](auto const& sum, auto const& x, auto const& dy) { return sum + x * rstd * dy; }, dw, dw,
          x_rc.at(r), dy_rc.at(r));
      T* const dx = dx_rc.at(r);
      auto const derivative = [=](auto const& x, auto const& w, auto const& dy) {
        return dy * w * rstd - x * pull;
      };
      if (add)
        simd::map<Isa>(
            C,
            [=](auto const& old, auto const& x, auto const& w, auto const& dy) {
              return old + derivative(x, w, dy);
            },
            dx, dx, x_rc.at(r), w_c, dy_rc.at(r));
      else
        simd::map<Isa>(C, derivative, dx, x_rc.at(r), w_c, dy_rc.at(r));
    }
  });
  detail::add_partials(partial, count, C, dw_c);
}

template <class Isa, class Threads, class T>
void layer_norm_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c,
                        same<T> const* b_c, double eps, view2<same<T>> y_rc, same<T>* mean_r, same<T>* rstd_r) {
  index_t const C = x_rc.extent[1];
  detail::for_row_blocks(dev, x_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      T const mean = simd::map_sum<Isa, T>(
                         C, [](auto const& x) { return x; }, x_rc.at(r)) /
                     T(C);
      T* const y = y_rc.at(r);
      simd::map<Isa>(
          C, [=](auto const& x) { return x - mean; }, y, x_rc.at(r));
      T const rstd = T(1) / std::sqrt(detail::square_sum<Isa>(y, C) / T(C) + T(eps));
      mean_r[r] = mean;
      rstd_r[r] = rstd;
      simd::map<Isa>(
          C, [=](auto const& x, auto const& w, auto const& shift) { return x * rstd * w + shift; }, y, y, w_c, b_c);
    }
  });
}

template <class Isa, class Threads, class T>
void layer_norm_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, same<T> const* w_c,
                         same<T> const* mean_r, same<T> const* rstd_r, view2<same<T> const> dy_rc,
                         view2<same<T>> dx_rc, bool add, same<T>* dw_c, same<T>* db_c, arena& ws) {
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

namespace detail {

/// One row of the output stage's backward: the part that is normalised together and repeats the weight `w`.
template <class Isa, class T>
struct output_stage_row {
  T const *o, *z, *dy;  ///< z is nullptr without a gate
  T *d_o, *dz, *y;      ///< y is nullptr where the output is not wanted
  index_t n, z_row;

  /// y = o silu(z)
  void gate_backward() const noexcept {
    simd::for_vectors<Isa, T>(n, [&](index_t i, auto const& lanes) {
      auto const x = lanes.load(o + i), gate = lanes.load(z + i), d = lanes.load(dy + i);
      auto const sig = simd::sigmoid<Isa, T>(gate);
      lanes.store(d_o + i, d * gate * sig);
      lanes.store(dz + i, d * x * silu_slope(gate, sig));
      if (y) lanes.store(y + i, x * gate * sig);
    });
  }
  /// y = hat w or hat w silu(z), hat = x rstd; dw and the sum of d hat are added up. Leaves x in d_o and, where the
  /// gate came first, sigmoid(z) in dz.
  T norm_sums(bool gate_first, T const* w, T rstd, T* dw) const noexcept {
    simd::vec<Isa, T> inner{};
    simd::for_vectors<Isa, T>(n, [&](index_t i, auto const& lanes) {
      if (z) simd::prefetch(z + i, 2 * z_row);
      auto x = lanes.load(o + i), d = lanes.load(dy + i);
      auto const gain = lanes.load(w + i);
      if (z) {
        auto const gate = lanes.load(z + i), sig = simd::sigmoid<Isa, T>(gate);
        if (gate_first) {
          x = x * gate * sig;
          lanes.store(dz + i, sig);
        } else {
          lanes.store(dz + i, d * (x * rstd * gain) * silu_slope(gate, sig));
          if (y) lanes.store(y + i, x * rstd * gain * gate * sig);
          d = d * gate * sig;
        }
      }
      if (y && (gate_first || !z)) lanes.store(y + i, x * rstd * gain);
      lanes.store(d_o + i, x);
      auto const d_hat = d * (x * rstd);
      lanes.store(dw + i, lanes.load(dw + i) + d_hat);
      inner += d_hat * gain;
    });
    return simd::sum<Isa, T>(inner);
  }
  /// `mean` is the mean of d hat over the channels normalised together.
  void norm_backward(bool gate_first, T const* w, T rstd, T mean) const noexcept {
    simd::for_vectors<Isa, T>(n, [&](index_t i, auto const& lanes) {
      auto const hat = lanes.load(d_o + i) * rstd;
      auto d = lanes.load(dy + i);
      if (z && !gate_first) {
        auto const gate = lanes.load(z + i);
        d = d * gate * simd::sigmoid<Isa, T>(gate);
      }
      auto const dx = rstd * (d * lanes.load(w + i) - hat * mean);
      if (z && gate_first) {
        auto const gate = lanes.load(z + i), sig = lanes.load(dz + i);
        lanes.store(dz + i, dx * lanes.load(o + i) * silu_slope(gate, sig));
        lanes.store(d_o + i, dx * gate * sig);
      } else {
        lanes.store(d_o + i, dx);
      }
    });
  }
};

}  // namespace detail

template <class Isa, class Threads, class T>
void output_stage_forward(device::basic_cpu<Isa, Threads> dev, output_stage const& s, view2<T const> o_rc,
                          view2<same<T> const> z_rc, same<T> const* w, view2<same<T>> y_rc, same<T>* rstd) {
  index_t const C = o_rc.extent[1], width = s.norm_width ? s.norm_width : C, groups = C / width;
  detail::for_row_blocks(dev, o_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r) {
      T *const y = y_rc.at(r), *const unit = rstd + r * groups;
      T const* from = o_rc.at(r);
      auto const gate = [&] {
        T const* const z = z_rc.at(r);
        simd::for_vectors<Isa, T>(C, [&](index_t c, auto const& lanes) {
          simd::prefetch(z + c, 2 * z_rc.stride[0]);
          auto const g = lanes.load(z + c);
          lanes.store(y + c, lanes.load(from + c) * g * simd::sigmoid<Isa, T>(g));
        });
        from = y;
      };
      if (s.gate && s.gate_first) gate();
      for (index_t g = 0; g < groups && s.norm_width; ++g) {
        T const* const x = from + g * width;
        T const scale = T(1) / std::sqrt(detail::square_sum<Isa>(x, width) / T(width) + T(s.eps));
        unit[g] = scale;
        for (index_t c = 0; c < width; c += s.weight_width)
          simd::map<Isa>(
              s.weight_width, [=](auto const& a, auto const& b) { return a * scale * b; }, y + g * width + c, x + c,
              w);
      }
      if (s.norm_width) from = y;
      if (s.gate && !s.gate_first) gate();
      if (from != y) std::copy_n(from, C, y);
    }
  });
}

/// do and dz are written, dw is added to; y is the stage's output once more, for the weights that read it (empty:
/// not wanted).
template <class Isa, class Threads, class T>
void output_stage_backward(device::basic_cpu<Isa, Threads> dev, output_stage const& s, view2<T const> o_rc,
                           view2<same<T> const> z_rc, same<T> const* w, same<T> const* rstd,
                           view2<same<T> const> dy_rc, view2<same<T>> do_rc, view2<same<T>> dz_rc, same<T>* dw,
                           arena& ws, view2<same<T>> y_rc = {}) {
  arena_scope const scope(ws);
  index_t const C = o_rc.extent[1], R = o_rc.extent[0], W = s.weight_width;
  index_t const width = s.norm_width ? s.norm_width : C, groups = C / width,
                count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * W);
  if (ws.measuring()) return;
  auto const part = [&](index_t r, index_t c, index_t n) {
    return detail::output_stage_row<Isa, T>{o_rc.at(r, c),
                                            s.gate ? z_rc.at(r, c) : nullptr,
                                            dy_rc.at(r, c),
                                            do_rc.at(r, c),
                                            s.gate ? dz_rc.at(r, c) : nullptr,
                                            y_rc ? y_rc.at(r, c) : nullptr,
                                            n,
                                            z_rc.stride[0]};
  };
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const dw_block = partial + b * W;
    std::fill_n(dw_block, W, T(0));
    for (index_t r = begin; r < end; ++r) {
      if (!s.norm_width && s.gate) part(r, 0, C).gate_backward();
      if (!s.norm_width && !s.gate) {
        std::copy_n(dy_rc.at(r), C, do_rc.at(r));
        if (y_rc) std::copy_n(o_rc.at(r), C, y_rc.at(r));
      }
      for (index_t g = 0; g < groups && s.norm_width; ++g) {
        T const scale = rstd[r * groups + g];
        T inner(0);
        for (index_t c = g * width; c < (g + 1) * width; c += W)
          inner += part(r, c, W).norm_sums(s.gate_first, w, scale, dw_block);
        for (index_t c = g * width; c < (g + 1) * width; c += W)
          part(r, c, W).norm_backward(s.gate_first, w, scale, inner / T(width));
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
          gate_rc.extent[1], [](auto const& g, auto const& u) { return g * simd::sigmoid<Isa, T>(g) * u; },
          y_rc.at(r), gate_rc.at(r), up_rc.at(r));
  });
}

/// d_gate and d_up are written; y is the forward's result once more, for the weights that read it (empty: not
/// wanted).
template <class Isa, class Threads, class T>
void swiglu_backward(device::basic_cpu<Isa, Threads> dev, view2<T const> gate_rc, view2<same<T> const> up_rc,
                     view2<same<T> const> dy_rc, view2<same<T>> d_gate_rc, view2<same<T>> d_up_rc,
                     view2<same<T>> y_rc = {}) {
  detail::for_row_blocks(dev, gate_rc.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      simd::for_vectors<Isa, T>(gate_rc.extent[1], [&](index_t c, auto const& lanes) {
        auto const gate = lanes.load(gate_rc.at(r, c)), up = lanes.load(up_rc.at(r, c)),
                   d = lanes.load(dy_rc.at(r, c));
        auto const sig = simd::sigmoid<Isa, T>(gate);
        lanes.store(d_gate_rc.at(r, c), d * up * detail::silu_slope(gate, sig));
        lanes.store(d_up_rc.at(r, c), d * gate * sig);
        if (y_rc) lanes.store(y_rc.at(r, c), gate * sig * up);
      });
  });
}

namespace detail {

/// Neighbouring lanes exchanged: of (a, b) pairs, (b, a).
template <class V, std::size_t... I>
SEQMIX_INLINE V exchange_pairs(V const& v, std::index_sequence<I...>) noexcept {
  return simd::shuffle<int(I ^ 1)...>(v, v);
}
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> exchange_pairs(simd::vec<Isa, T> const& v) noexcept {
  return exchange_pairs(v, std::make_index_sequence<std::size_t(Isa::template lanes<T>)>{});
}

/// Turns the pairs of one head by what `cosine` and `sine` hold: one number a pair, or, interleaved, one a number,
/// the sines with the sign they are added with.
template <class Isa, class T>
void rotate_pairs(bool interleaved, index_t pairs, T const* cosine, T const* sine, T* x) noexcept {
  if (interleaved)
    return simd::for_vectors<Isa, T>(2 * pairs, [&](index_t i, auto const& lanes) {
      auto const v = lanes.load(x + i);
      lanes.store(x + i, v * lanes.load(cosine + i) + exchange_pairs<Isa, T>(v) * lanes.load(sine + i));
    });
  simd::for_vectors<Isa, T>(pairs, [&](index_t i, auto const& lanes) {
    auto const a = lanes.load(x + i), b = lanes.load(x + pairs + i);
    auto const c = lanes.load(cosine + i), s = lanes.load(sine + i);
    lanes.store(x + i, a * c - b * s);
    lanes.store(x + pairs + i, b * c + a * s);
  });
}

}  // namespace detail

template <class Isa, class Threads, class T>
void rope(device::basic_cpu<Isa, Threads> dev, sequences const& seq, index_t const* position_n,
          rope_options const& options, double direction, view3<T> x_rhd, arena& ws) {
  expect_contiguous("rope: heads", x_rhd);
  arena_scope const scope(ws);
  index_t const pairs = detail::rope_pairs(options, x_rhd.extent[2]),
                width = options.interleaved ? 2 * pairs : pairs;
  // Sequences that begin at 0 share one table; carried ones may stand anywhere, so each row gets its own entry.
  index_t const entries = position_n ? seq.rows() : seq.longest();
  T* const table = ws.take<T>(2 * width * entries);
  double* const frequency = ws.take<double>(pairs);
  if (ws.measuring()) return;
  for (index_t i = 0; i < pairs; ++i) frequency[i] = detail::rope_frequency(options, pairs, i);
  auto const fill = [&](index_t entry, index_t position) {
    T *const cosine = table + 2 * width * entry, *const sine = cosine + width;
    for (index_t i = 0; i < pairs; ++i) {
      double const angle = double(position) * frequency[i];
      T const c = T(std::cos(angle)), s = T(direction * std::sin(angle));
      if (options.interleaved) {
        cosine[2 * i] = cosine[2 * i + 1] = c;
        sine[2 * i] = -s;
        sine[2 * i + 1] = s;
      } else {
        cosine[i] = c;
        sine[i] = s;
      }
    }
  };
  if (!position_n)
    detail::for_row_blocks(dev, entries, [&](index_t, index_t begin, index_t end) {
      for (index_t t = begin; t < end; ++t) fill(t, t);
    });
  detail::for_row_blocks(dev, seq.rows(), [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin, n = seq.holder(begin); r < end; ++r) {
      while (seq.end(n) <= r) ++n;
      index_t const t = r - seq.begin(n);
      if (position_n) fill(r, t + position_n[n]);
      T const* const cosine = table + 2 * width * (position_n ? r : t);
      for (index_t h = 0; h < x_rhd.extent[1]; ++h)
        detail::rotate_pairs<Isa>(options.interleaved, pairs, cosine, cosine + width, x_rhd.at(r, h));
    }
  });
}

template <class Isa, class Threads, class T>
void skip_forward(device::basic_cpu<Isa, Threads> dev, view3<T const> v_rhv, same<T> const* d_h,
                  view3<same<T>> o_rhv) {
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
void skip_backward(device::basic_cpu<Isa, Threads> dev, view3<T const> v_rhv, same<T> const* d_h,
                   view3<same<T> const> d_o_rhv, view3<same<T>> dv_rhv, same<T>* dd_h, arena& ws) {
  arena_scope const scope(ws);
  index_t const H = d_o_rhv.extent[1], V = d_o_rhv.extent[2], R = d_o_rhv.extent[0];
  index_t const count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * H);
  if (ws.measuring()) return;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    for (index_t h = 0; h < H; ++h) {
      index_t const hv = h * v_rhv.extent[1] / H;
      T const d = d_h[h];
      simd::vec<Isa, T> total{};
      for (index_t r = begin; r < end; ++r)
        simd::for_vectors<Isa, T>(V, [&](index_t c, auto const& lanes) {
          auto const g = lanes.load(d_o_rhv.at(r, h) + c);
          T* const dv = dv_rhv.at(r, hv) + c;
          total += g * lanes.load(v_rhv.at(r, hv) + c);
          lanes.store(dv, lanes.load(dv) + d * g);
        });
      partial[b * H + h] = simd::sum<Isa, T>(total);
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

/// Sum of -log softmax(logits)[label] over the rows whose label is not negative, in double; returns how many those
/// are. `d_logits` (may be the logits themselves, or empty) becomes scale (softmax - onehot), 0 in ignored rows.
template <class Isa, class Threads, class T>
index_t cross_entropy(device::basic_cpu<Isa, Threads> dev, view2<T const> logits_rv, std::int32_t const* labels,
                      double scale, view2<same<T>> d_logits_rv, double* loss, arena& ws) {
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
      simd::map<Isa>(
          V, [=](auto const& e) { return simd::exp<Isa, T>(e - most) * factor; }, d, x);
      d[labels[r]] -= T(scale);
    }
  });
  index_t rows = 0;
  *loss = 0.0;
  for (index_t b = 0; b < count; ++b) *loss += partial[b], rows += counted[b];
  return rows;
}

}  // namespace seqmix::inline v0::kernels
