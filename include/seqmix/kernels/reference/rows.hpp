#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>

/// Everything around a mixer as plain loops for any scalar: the oracle of kernels/cpu and, on dual numbers, of
/// every gradient.
namespace seqmix::inline v0::kernels {

/// y [R,O] (+)= x [R,I] w [O,I]'
template <class T>
void linear_forward(device::reference, view2<T const> x_ri, view2<same<T> const> w_oi, view2<same<T>> y_ro,
                    bool add, arena&) {
  for (index_t r = 0; r < x_ri.extent[0]; ++r)
    for (index_t o = 0; o < w_oi.extent[0]; ++o) {
      T sum(0);
      for (index_t i = 0; i < w_oi.extent[1]; ++i) sum += x_ri(r, i) * w_oi(o, i);
      y_ro(r, o) = add ? y_ro(r, o) + sum : sum;
    }
}

/// y = x rstd w, rstd = 1 / sqrt(mean x^2 + eps). Source: Zhang, Sennrich (arXiv 1910.07467), equation 4.
template <class T>
void rms_norm_forward(device::reference, view2<T const> x_rc, same<T> const* w_c, double eps, view2<same<T>> y_rc,
                      same<T>* rstd_r) {
  index_t const C = x_rc.extent[1];
  for (index_t r = 0; r < x_rc.extent[0]; ++r) {
    T sum(0);
    for (index_t c = 0; c < C; ++c) sum += x_rc(r, c) * x_rc(r, c);
    rstd_r[r] = T(1) / sqrt(sum / T(double(C)) + T(eps));
    for (index_t c = 0; c < C; ++c) y_rc(r, c) = x_rc(r, c) * rstd_r[r] * w_c[c];
  }
}

/// y = (x - mean) rstd w + b. Source: Ba, Kiros, Hinton (arXiv 1607.06450), equation 4.
template <class T>
void layer_norm_forward(device::reference, view2<T const> x_rc, same<T> const* w_c, same<T> const* b_c, double eps,
                        view2<same<T>> y_rc, same<T>* mean_r, same<T>* rstd_r) {
  index_t const C = x_rc.extent[1];
  for (index_t r = 0; r < x_rc.extent[0]; ++r) {
    T sum(0), square(0);
    for (index_t c = 0; c < C; ++c) sum += x_rc(r, c);
    mean_r[r] = sum / T(double(C));
    for (index_t c = 0; c < C; ++c) square += (x_rc(r, c) - mean_r[r]) * (x_rc(r, c) - mean_r[r]);
    rstd_r[r] = T(1) / sqrt(square / T(double(C)) + T(eps));
    for (index_t c = 0; c < C; ++c) y_rc(r, c) = (x_rc(r, c) - mean_r[r]) * rstd_r[r] * w_c[c] + b_c[c];
  }
}

/// How a mixer's output is normalised and gated before the last projection.
struct output_stage {
  index_t norm_width =
      0;  ///< channels normalised together by RMS: the value width of a head, the whole width, 0: none
  index_t weight_width = 0;  ///< the weight repeats after so many channels
  bool gate = false;         ///< multiplies by silu(z)
  bool gate_first = false;   ///< before the norm (Mamba-2) rather than after it (RetNet)
  double eps = 1e-5;
};

template <class T>
void output_stage_forward(device::reference, output_stage const& s, view2<T const> o_rc, view2<same<T> const> z_rc,
                          same<T> const* w, view2<same<T>> y_rc, same<T>* rstd) {
  index_t const C = o_rc.extent[1], width = s.norm_width ? s.norm_width : C, groups = C / width;
  for (index_t r = 0; r < o_rc.extent[0]; ++r)
    for (index_t g = 0; g < groups; ++g) {
      T square(0);
      for (index_t c = g * width; c < (g + 1) * width; ++c) {
        y_rc(r, c) = s.gate && s.gate_first ? o_rc(r, c) * silu(z_rc(r, c)) : o_rc(r, c);
        square += y_rc(r, c) * y_rc(r, c);
      }
      T const scale = s.norm_width ? T(1) / sqrt(square / T(double(width)) + T(s.eps)) : T(1);
      if (s.norm_width) rstd[r * groups + g] = scale;
      for (index_t c = g * width; c < (g + 1) * width; ++c) {
        if (s.norm_width) y_rc(r, c) = y_rc(r, c) * scale * w[c % s.weight_width];
        if (s.gate && !s.gate_first) y_rc(r, c) = y_rc(r, c) * silu(z_rc(r, c));
      }
    }
}

/// y [R,C] = silu(gate) up. Source: Shazeer (arXiv 2002.05202), section 2.
template <class T>
void swiglu_forward(device::reference, view2<T const> gate_rc, view2<same<T> const> up_rc, view2<same<T>> y_rc) {
  for (index_t r = 0; r < gate_rc.extent[0]; ++r)
    for (index_t c = 0; c < gate_rc.extent[1]; ++c) y_rc(r, c) = silu(gate_rc(r, c)) * up_rc(r, c);
}

/// Causal depthwise convolution and SiLU: y_t = silu(b + sum_j w_j x_(t-W+1+j)), the last tap meets the current
/// token. `window` [N,C,W-1] are the inputs before each sequence (empty: zeros), `window_out` those before the next
/// call.
template <class T>
void conv_forward(device::reference, sequences const& seq, view2<T const> x_rc, view2<same<T> const> w_cj,
                  same<T> const* b_c, bool activation, view3<same<T> const> window_ncj, view2<same<T>> y_rc,
                  view3<same<T>> window_out_ncj, arena&) {
  index_t const C = x_rc.extent[1], W = w_cj.extent[1];
  for (index_t n = 0; n < seq.count(); ++n) {
    index_t const first = seq.begin(n), length = seq.length(n);
    auto const input = [&](index_t t, index_t c) {
      if (t >= 0) return x_rc(first + t, c);
      return window_ncj ? window_ncj(n, c, t + W - 1) : T(0);
    };
    for (index_t t = 0; t < length; ++t)
      for (index_t c = 0; c < C; ++c) {
        T sum = b_c ? b_c[c] : T(0);
        for (index_t j = 0; j < W; ++j) sum += w_cj(c, j) * input(t - W + 1 + j, c);
        y_rc(first + t, c) = activation ? silu(sum) : sum;
      }
    if (window_out_ncj)
      for (index_t c = 0; c < C; ++c)
        for (index_t j = 0; j < W - 1; ++j) window_out_ncj(n, c, j) = input(length - (W - 1) + j, c);
  }
}

/// Which numbers of a head rotary positions turn, in which pairs and how fast.
struct rope_options {
  double base = 10000.0;
  index_t channels = 0;      ///< d, the leading numbers that turn; 0: all
  bool interleaved = false;  ///< pairs (2i, 2i+1) rather than (i, i + d/2)
  bool closed = false;       ///< frequencies base^(-i/(d/2-1)), both ends included (torchscale), not base^(-2i/d)
};

namespace detail {

/// Pairs that turn in heads of `width` numbers.
inline index_t rope_pairs(rope_options const& options, index_t width) {
  if (options.channels < 0 || options.channels > width || options.channels % 2 != 0)
    throw shape_error("seqmix: rope: channels must be even and at most the head's " + std::to_string(width) +
                      ", got " + std::to_string(options.channels));
  return (options.channels > 0 ? options.channels : width) / 2;
}
/// Angle of pair i at position 1.
inline double rope_frequency(rope_options const& options, index_t pairs, index_t i) {
  double const steps = double(options.closed ? (std::max)(index_t(1), pairs - 1) : pairs);
  return std::pow(options.base, -double(i) / steps);
}

}  // namespace detail

/// Rotates pairs of numbers of the heads [R,H,D] by position times the pair's frequency, in place; `direction` -1
/// rotates back, which is also the derivative. Source: Su et al. (arXiv 2104.09864), equation 34 and section 3.4.2.
template <class T>
void rope(device::reference, sequences const& seq, index_t const* position_n, rope_options const& options,
          double direction, view3<T> x_rhd, arena&) {
  index_t const pairs = detail::rope_pairs(options, x_rhd.extent[2]);
  for (index_t n = 0; n < seq.count(); ++n)
    for (index_t r = seq.begin(n); r < seq.end(n); ++r)
      for (index_t i = 0; i < pairs; ++i) {
        double const at = double(r - seq.begin(n) + (position_n ? position_n[n] : 0));
        double const angle = at * detail::rope_frequency(options, pairs, i);
        index_t const first = options.interleaved ? 2 * i : i, second = options.interleaved ? 2 * i + 1 : i + pairs;
        T const c(std::cos(angle)), s(direction * std::sin(angle));
        for (index_t h = 0; h < x_rhd.extent[1]; ++h) {
          T const a = x_rhd(r, h, first), b = x_rhd(r, h, second);
          x_rhd(r, h, first) = a * c - b * s;
          x_rhd(r, h, second) = b * c + a * s;
        }
      }
}
/// The same for all numbers in half-split pairs.
template <class Device, class T>
void rope(Device dev, sequences const& seq, index_t const* position_n, double base, double direction,
          view3<T> x_rhd, arena& ws) {
  rope(dev, seq, position_n, rope_options{.base = base}, direction, x_rhd, ws);
}

/// o [R,H,V] += d_h v: the own-token skip. Value head of h as everywhere.
template <class T>
void skip_forward(device::reference, view3<T const> v_rhv, same<T> const* d_h, view3<same<T>> o_rhv) {
  index_t const H = o_rhv.extent[1];
  for (index_t r = 0; r < o_rhv.extent[0]; ++r)
    for (index_t h = 0; h < H; ++h)
      for (index_t v = 0; v < o_rhv.extent[2]; ++v) o_rhv(r, h, v) += d_h[h] * v_rhv(r, h * v_rhv.extent[1] / H, v);
}

/// x [R,D] = rows of the table.
template <class T>
void embedding_forward(device::reference, std::int32_t const* tokens, view2<T const> table_vd,
                       view2<same<T>> x_rd) {
  for (index_t r = 0; r < x_rd.extent[0]; ++r)
    for (index_t d = 0; d < x_rd.extent[1]; ++d) x_rd(r, d) = table_vd(tokens[r], d);
}

/// Sum of -log softmax(logits)[label] over the rows whose label is not negative; returns how many those are.
template <class T>
index_t cross_entropy_forward(device::reference, view2<T const> logits_rv, std::int32_t const* labels,
                              same<T>* loss) {
  index_t counted = 0;
  *loss = T(0);
  for (index_t r = 0; r < logits_rv.extent[0]; ++r) {
    if (labels[r] < 0) continue;
    ++counted;
    auto most = value_of(logits_rv(r, 0));
    for (index_t v = 1; v < logits_rv.extent[1]; ++v) most = (std::max)(most, value_of(logits_rv(r, v)));
    T sum(0);
    for (index_t v = 0; v < logits_rv.extent[1]; ++v) sum += exp(logits_rv(r, v) - T(most));
    *loss += T(most) + log(sum) - logits_rv(r, labels[r]);
  }
  return counted;
}

}  // namespace seqmix::inline v0::kernels
