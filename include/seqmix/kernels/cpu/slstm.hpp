#pragma once

#include <type_traits>

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/kernels/cpu/tile_product.hpp>
#include <seqmix/kernels/slstm_shape.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// sLSTM on the CPU: tokens one after another, a head's channels as lanes, heads and groups of sequences in
/// parallel. What the gates' input and the recurrent weight get is separated: d_x on the way back, d_R from it
/// block by block behind.
///
/// The maximum drops out of y; backward works in e^m c and e^m n with derivatives scaled by e^m, as
/// kernels/stabilised_shape.hpp says, so that what reaches m comes from the states handed in and out alone.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: the four gates and c, n, m of every token and head, rows padded to whole
/// vectors. Bytes: 7 D sizeof(T) a token and head.
template <class T>
struct slstm_saved {
  T *gates = nullptr, *cells = nullptr;

  template <class Isa>
  static slstm_saved carve(arena& a, slstm_shape const& s) {
    index_t const rows = s.seq.rows() * s.heads, dp = simd::padded<Isa, T>(s.head_dim);
    return {a.take<T>(rows * 4 * dp), a.take<T>(rows * 3 * dp)};
  }
};

namespace detail {

inline constexpr index_t slstm_token_block = 64;
inline constexpr index_t slstm_group = 4;  ///< sequences that go through the recurrent weight together

/// log sigmoid(x) = min(x, 0) - log(1 + e), e = e^-|x| <= 1, by log(1 + e) = 2 artanh(e / (2 + e)).
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> vector_log_sigmoid(simd::vec<Isa, T> const& x) noexcept {
  using V = simd::vec<Isa, T>;
  constexpr int terms = sizeof(T) == 4 ? 8 : 17;
  V const zero{}, e = simd::exp<Isa, T>(x > zero ? -x : x), s = e / (T(2) + e), square = s * s;
  V sum = zero + T(1.0 / (2 * terms + 1));
  SEQMIX_UNROLL(17)
  for (int k = terms - 1; k >= 0; --k) sum = sum * square + T(1.0 / (2 * k + 1));
  return (x > zero ? zero : x) - T(2) * s * sum;
}

/// A vector of channels of one token: the gates' values and the two weights.
template <class Isa, class T>
struct slstm_lanes {
  using V = simd::vec<Isa, T>;
  using mask = simd::ivec<Isa, T>;
  V keep, write, cell_in, out, m;
  mask takes, bounded;  ///< the maximum is the input gate's; the kept weight is bounded by 1

  SEQMIX_INLINE slstm_lanes(T const* gates, index_t dp, V const& m_before, bool fresh) noexcept {
    V const one = V{} + T(1), in = simd::load<Isa>(gates + slstm_input_gate * dp);
    V const past = m_before + vector_log_sigmoid<Isa, T>(simd::load<Isa>(gates + slstm_forget_gate * dp));
    takes = fresh ? in == in : in > past;
    m = takes ? in : past;
    bounded = past > m;
    keep = bounded ? one : simd::exp<Isa, T>(past - m);
    write = simd::exp<Isa, T>(in - m);
    cell_in = vector_tanh<Isa, T>(simd::load<Isa>(gates + slstm_cell_input * dp));
    out = simd::sigmoid<Isa, T>(simd::load<Isa>(gates + slstm_output_gate * dp));
  }
};

/// One thread's memory: a row for each sequence of a group.
template <class Isa, class T>
struct slstm_scratch {
  T *y, *c, *n, *m, *gates;
  T *d_y, *d_c, *d_n, *d_m, *initial, *through;

  static slstm_scratch carve(arena& a, slstm_shape const& s, bool backward) {
    index_t const rows = slstm_group * simd::padded<Isa, T>(s.head_dim);
    slstm_scratch w{};
    for (T** p : {&w.y, &w.c, &w.n, &w.m}) *p = a.take<T>(rows);
    w.gates = a.take<T>(4 * rows);
    if (!backward) return w;
    for (T** p : {&w.d_y, &w.d_c, &w.d_n, &w.d_m, &w.through}) *p = a.take<T>(rows);
    w.initial = a.take<T>(3 * rows);
    return w;
  }
};

/// One head of a group of sequences, which share the passes over the recurrent weight. A sequence's bits do not
/// depend on its group: rows of a tile product are independent.
template <class Isa, class T>
class slstm_heads {
 public:
  slstm_heads(slstm_shape const& s, slstm_input<T> const& in, index_t group, index_t h,
              slstm_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(group * slstm_group), count_((std::min)(slstm_group, s.seq.count() - n_)), h_(h),
        D_(s.head_dim), dp_(simd::padded<Isa, T>(s.head_dim)) {
    for (index_t i = 0; i < count_; ++i) longest_ = (std::max)(longest_, s.seq.length(n_ + i));
  }

  /// `weight` [D, 4 Dp]: the head's R from earlier outputs to gates.
  void forward(T const* weight, view3<T> y_rhd, slstm_saved<T> const* saved, slstm_state<T> const& final) {
    for (index_t i = 0; i < count_; ++i)
      load(in_.initial, i, row(w_.y, i), row(w_.c, i), row(w_.n, i), row(w_.m, i));
    for (index_t t = 0; t < longest_; ++t) {
      each_sequence(t, [&](index_t i) {
        for (index_t g = 0; g < 4; ++g)
          copy_rows(in_.x_rghd.at(token(i, t), g, h_), D_, 1, D_, gates(i) + g * dp_, dp_);
      });
      tile_product<Isa>(count_, 4 * dp_, D_, tile_operand<T>{w_.y, dp_, 1}, weight, 4 * dp_, w_.gates, 4 * dp_,
                        true);
      each_sequence(t, [&](index_t i) {
        step(i, t == 0 && starts_fresh(in_.initial, n_ + i));
        std::copy_n(row(w_.y, i), D_, y_rhd.at(token(i, t), h_));
        if (!saved) return;
        std::copy_n(gates(i), 4 * dp_, saved_gates(*saved, i, t));
        T* const cell = saved_cell(*saved, i, t);
        std::copy_n(row(w_.c, i), dp_, cell);
        std::copy_n(row(w_.n, i), dp_, cell + dp_);
        std::copy_n(row(w_.m, i), dp_, cell + 2 * dp_);
      });
    }
    for (index_t i = 0; final && i < count_; ++i)
      store(row(w_.y, i), row(w_.c, i), row(w_.n, i), row(w_.m, i), i, final);
  }

  /// `weight` [4 Dp, Dp]: the head's R as it is, from gates back to earlier outputs.
  void backward(T const* weight, slstm_saved<T> const& saved, view3<T const> d_y_rhd,
                slstm_state<T const> const& d_final, slstm_gradient<T> const& d) {
    for (index_t i = 0; i < count_; ++i) {
      load(d_final, i, row(w_.d_y, i), row(w_.d_c, i), row(w_.d_n, i), row(w_.d_m, i));
      load(in_.initial, i, row(w_.y, i), initial(i), initial(i) + dp_, initial(i) + 2 * dp_);
      if (length(i) > 0) through_scale(i, saved_cell(saved, i, length(i) - 1), T(-1));
    }
    for (index_t t = longest_; t-- > 0;) {
      each_sequence(t, [&](index_t i) {
        token_backward(i, saved_gates(saved, i, t), t > 0 ? saved_cell(saved, i, t - 1) : initial(i),
                       saved_cell(saved, i, t), d_y_rhd.at(token(i, t), h_),
                       t == 0 && starts_fresh(in_.initial, n_ + i));
        for (index_t g = 0; g < 4; ++g) std::copy_n(gates(i) + g * dp_, D_, d.x_rghd.at(token(i, t), g, h_));
      });
      tile_product<Isa>(count_, dp_, 4 * dp_, tile_operand<T>{w_.gates, 4 * dp_, 1}, weight, dp_, w_.through, dp_,
                        false);
      each_sequence(t, [&](index_t i) { std::copy_n(row(w_.through, i), dp_, row(w_.d_y, i)); });
    }
    for (index_t i = 0; d.initial && i < count_; ++i) {
      if (length(i) > 0) through_scale(i, initial(i), T(1));
      store(row(w_.d_y, i), row(w_.d_c, i), row(w_.d_n, i), row(w_.d_m, i), i, d.initial);
    }
  }

 private:
  using V = simd::vec<Isa, T>;
  index_t length(index_t i) const noexcept { return s_.seq.length(n_ + i); }
  index_t token(index_t i, index_t t) const noexcept { return s_.seq.begin(n_ + i) + t; }
  T* row(T* x, index_t i) const noexcept { return x + i * dp_; }
  T* gates(index_t i) const noexcept { return w_.gates + i * 4 * dp_; }
  T* initial(index_t i) const noexcept { return w_.initial + i * 3 * dp_; }
  T* saved_gates(slstm_saved<T> const& saved, index_t i, index_t t) const noexcept {
    return saved.gates + (token(i, t) * s_.heads + h_) * 4 * dp_;
  }
  T* saved_cell(slstm_saved<T> const& saved, index_t i, index_t t) const noexcept {
    return saved.cells + (token(i, t) * s_.heads + h_) * 3 * dp_;
  }
  /// body(i) for the sequences that have a token t; what the others' rows hold is never used.
  template <class Body>
  void each_sequence(index_t t, Body const& body) const {
    for (index_t i = 0; i < count_; ++i)
      if (t < length(i)) body(i);
  }
  void load(slstm_state<T const> const& from, index_t i, T* y, T* c, T* n, T* m) const {
    for (T* part : {y, c, n, m}) std::fill_n(part, dp_, T(0));
    if (!from) return;
    std::copy_n(from.y_nhd.at(n_ + i, h_), D_, y);
    std::copy_n(from.c_nhd.at(n_ + i, h_), D_, c);
    std::copy_n(from.n_nhd.at(n_ + i, h_), D_, n);
    std::copy_n(from.m_nhd.at(n_ + i, h_), D_, m);
  }
  void store(T const* y, T const* c, T const* n, T const* m, index_t i, slstm_state<T> const& to) const {
    std::copy_n(y, D_, to.y_nhd.at(n_ + i, h_));
    std::copy_n(c, D_, to.c_nhd.at(n_ + i, h_));
    std::copy_n(n, D_, to.n_nhd.at(n_ + i, h_));
    std::copy_n(m, D_, to.m_nhd.at(n_ + i, h_));
  }
  /// body(first channel) for whole vectors; all rows are padded to them.
  template <class Body>
  SEQMIX_INLINE void each_vector(Body const& body) const {
    for (index_t j = 0; j < dp_; j += Isa::template lanes<T>) body(j);
  }

  void step(index_t i, bool fresh) const {
    T *const y = row(w_.y, i), *const c = row(w_.c, i), *const n = row(w_.n, i), *const m = row(w_.m, i);
    each_vector([&](index_t j) {
      slstm_lanes<Isa, T> const x(gates(i) + j, dp_, simd::load<Isa>(m + j), fresh);
      V const cell = x.keep * simd::load<Isa>(c + j) + x.write * x.cell_in;
      V const normaliser = x.keep * simd::load<Isa>(n + j) + x.write;
      simd::store<Isa>(c + j, cell);
      simd::store<Isa>(n + j, normaliser);
      simd::store<Isa>(m + j, x.m);
      simd::store<Isa>(y + j, V(x.out * cell / normaliser));
    });
  }
  /// d_m += sign (d_c c + d_n n): between derivatives at a fixed maximum and derivatives at a fixed e^m (c, n).
  void through_scale(index_t i, T const* cell, T sign) const {
    T* const d = row(w_.d_m, i);
    simd::map<Isa>(
        dp_,
        [=](auto const& d_m, auto const& d_c, auto const& d_n, auto const& c, auto const& n) {
          return d_m + sign * (d_c * c + d_n * n);
        },
        d, d, row(w_.d_c, i), row(w_.d_n, i), cell, cell + dp_);
  }
  /// The gates' derivatives in place of their values, from d_y of the token and from what later tokens left.
  void token_backward(index_t i, T const* values, T const* before, T const* after, T const* d_y, bool fresh) const {
    T *const d_out_row = row(w_.d_y, i), *const d_c_row = row(w_.d_c, i), *const d_n_row = row(w_.d_n, i),
             *const d_m_row = row(w_.d_m, i), *const to = gates(i);
    for (index_t j = 0; j < D_; ++j) d_out_row[j] += d_y[j];
    each_vector([&](index_t j) {
      slstm_lanes<Isa, T> const x(values + j, dp_, simd::load<Isa>(before + 2 * dp_ + j), fresh);
      V const zero{}, n = simd::load<Isa>(after + dp_ + j), mean = simd::load<Isa>(after + j) / n;
      V const d_out = simd::load<Isa>(d_out_row + j), d_mean = d_out * x.out / n;
      V const d_c = simd::load<Isa>(d_c_row + j) + d_mean, d_n = simd::load<Isa>(d_n_row + j) - d_mean * mean;
      V const through_write = x.write * (d_c * x.cell_in + d_n);
      V const through_keep = x.keep * (d_c * simd::load<Isa>(before + j) + d_n * simd::load<Isa>(before + dp_ + j));
      V const d_m = simd::load<Isa>(d_m_row + j), d_in = through_write + (x.takes ? d_m : zero),
              d_past = through_keep + (x.takes ? zero : d_m);
      // A bounded weight is relative to the input gate and knows nothing of the past's logarithm.
      V const d_log = x.bounded ? zero : d_past, forget = simd::load<Isa>(values + slstm_forget_gate * dp_ + j);
      simd::store<Isa>(to + slstm_input_gate * dp_ + j, V(x.bounded ? d_in + through_keep : d_in));
      simd::store<Isa>(to + slstm_forget_gate * dp_ + j, V(d_log * simd::sigmoid<Isa, T>(-forget)));
      simd::store<Isa>(to + slstm_cell_input * dp_ + j, V(d_c * x.write * (T(1) - x.cell_in * x.cell_in)));
      simd::store<Isa>(to + slstm_output_gate * dp_ + j, V(d_out * mean * x.out * (T(1) - x.out)));
      simd::store<Isa>(d_m_row + j, V(x.bounded ? -through_keep : (x.takes ? zero : d_m)));
      simd::store<Isa>(d_c_row + j, V(x.keep * d_c));
      simd::store<Isa>(d_n_row + j, V(x.keep * d_n));
    });
  }

  slstm_shape const& s_;
  slstm_input<T> const& in_;
  slstm_scratch<Isa, T> const& w_;
  index_t n_, count_, h_, D_, dp_, longest_ = 0;
};

/// Every head's R with rows padded to whole vectors: [H, 4 Dp, Dp] as it is, or [H, D, 4 Dp] from outputs to gates.
template <class Isa, class Threads, class T>
T* slstm_weights(device::basic_cpu<Isa, Threads> dev, slstm_shape const& s, view4<T const> R_hgoi, bool transposed,
                 arena& ws) {
  index_t const D = s.head_dim, dp = simd::padded<Isa, T>(D), size = 4 * dp * (transposed ? D : dp);
  T* const all = ws.take<T>(s.heads * size);
  parallel_for(dev, s.heads, [&](index_t h, int) {
    T* const to = all + h * size;
    for (index_t g = 0; g < 4; ++g)
      if (transposed) {
        for (index_t i = 0; i < D; ++i)
          for (index_t o = 0; o < dp; ++o) to[(i * 4 + g) * dp + o] = o < D ? R_hgoi(h, g, o, i) : T(0);
      } else {
        copy_rows(R_hgoi.at(h, g), R_hgoi.stride[2], D, D, to + g * dp * dp, dp);
        std::fill_n(to + (g * dp + D) * dp, (dp - D) * dp, T(0));
      }
  });
  return all;
}

/// d_R [D,D] of one head and gate += sum over tokens of d_x_t y_{t-1}', partial sums over blocks in their order.
template <class Isa, class T>
void slstm_weight_gradient(slstm_shape const& s, slstm_input<T> const& in, view3<same<T const>> y_rhd,
                           slstm_gradient<same<T>> const& d, index_t h, index_t g, T* y, T* partial) {
  index_t const D = s.head_dim, dp = simd::padded<Isa, T>(D);
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t begin = s.seq.begin(n); begin < s.seq.end(n); begin += slstm_token_block) {
      index_t const count = (std::min)(slstm_token_block, s.seq.end(n) - begin);
      bool const first = begin == s.seq.begin(n);
      std::fill_n(y, dp, T(0));
      if (!first)
        std::copy_n(y_rhd.at(begin - 1, h), D, y);
      else if (in.initial)
        std::copy_n(in.initial.y_nhd.at(n, h), D, y);
      copy_rows(y_rhd.at(begin, h), y_rhd.stride[0], count - 1, D, y + dp, dp);
      tile_product<Isa>(D, dp, count, tile_operand<T>{d.x_rghd.at(begin, g, h), 1, d.x_rghd.stride[0]}, y, dp,
                        partial, dp, false);
      write_rows(partial, dp, D, D, T(1), d.R_hgoi.at(h, g), d.R_hgoi.stride[2], true);
    }
}

template <class Isa, class T>
slstm_scratch<Isa, T>* slstm_scratch_per_thread(arena& ws, int threads, slstm_shape const& s, bool backward) {
  using scratch = slstm_scratch<Isa, T>;
  scratch* const all = ws.take<scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = scratch::carve(ws, s, backward);
    if (all) all[t] = one;
  }
  return all;
}

}  // namespace detail

/// sLSTM (kernels/slstm_shape.hpp): y [R,H,D] and the final state (empty: not wanted). `saved` is nullptr when no
/// backward follows. Work: 8 D^2 flops and 5 exponentials a channel and token; one token after another.
/// Deterministic: the same bits for any number of threads.
template <class Isa, class Threads, class T>
void slstm_forward(device::basic_cpu<Isa, Threads> dev, slstm_shape const& s, slstm_input<T> const& in,
                   view3<same<T>> y_rhd, slstm_saved<same<T>> const* saved, slstm_state<same<T>> const& final,
                   arena& ws) {
  validate(s, in);
  expect_shape("sLSTM output y", y_rhd, {s.seq.rows(), s.heads, s.head_dim});
  expect_contiguous("sLSTM output y", y_rhd);
  validate_state("sLSTM final state", s, final);
  arena_scope const scope(ws);
  index_t const dp = simd::padded<Isa, T>(s.head_dim);
  T const* const weights = detail::slstm_weights<Isa>(dev, s, in.R_hgoi, true, ws);
  auto* const scratch = detail::slstm_scratch_per_thread<Isa, T>(ws, thread_count(dev), s, false);
  index_t const groups = (s.seq.count() + detail::slstm_group - 1) / detail::slstm_group;
  parallel_for(dev, groups * s.heads, [&](index_t unit, int thread) {
    index_t const h = unit % s.heads;
    detail::slstm_heads<Isa, T>(s, in, unit / s.heads, h, scratch[thread])
        .forward(weights + h * s.head_dim * 4 * dp, y_rhd, saved, final);
  });
}

/// The derivatives of slstm_forward, from its y, d_y and the derivative of the final state (empty: zero): written
/// to d.x and d.initial, added to d.R.
template <class Isa, class Threads, class T>
void slstm_backward(device::basic_cpu<Isa, Threads> dev, slstm_shape const& s, slstm_input<T> const& in,
                    view3<same<T> const> y_rhd, slstm_saved<same<T>> const& saved, view3<same<T> const> d_y_rhd,
                    slstm_state<same<T> const> const& d_final, slstm_gradient<same<T>> const& d, arena& ws) {
  validate(s, in);
  for (auto const& x : {y_rhd, d_y_rhd}) {
    expect_shape("sLSTM output and its derivative", x, {s.seq.rows(), s.heads, s.head_dim});
    expect_contiguous("sLSTM output and its derivative", x);
  }
  validate_state("sLSTM final state derivative", s, d_final);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  index_t const D = s.head_dim, dp = simd::padded<Isa, T>(D);
  T const* const weights = detail::slstm_weights<Isa>(dev, s, in.R_hgoi, false, ws);
  auto* const scratch = detail::slstm_scratch_per_thread<Isa, T>(ws, thread_count(dev), s, true);
  index_t const groups = (s.seq.count() + detail::slstm_group - 1) / detail::slstm_group;
  parallel_for(dev, groups * s.heads, [&](index_t unit, int thread) {
    index_t const h = unit % s.heads;
    detail::slstm_heads<Isa, T>(s, in, unit / s.heads, h, scratch[thread])
        .backward(weights + h * 4 * dp * dp, saved, d_y_rhd, d_final, d);
  });
  index_t const block = (detail::slstm_token_block + D) * dp;
  T* const blocks = ws.take<T>(thread_count(dev) * block);
  if (dev.dry || !d.R_hgoi) return;
  parallel_for(dev, s.heads * 4, [&](index_t unit, int thread) {
    T* const y = blocks + thread * block;
    detail::slstm_weight_gradient<Isa, T>(s, in, y_rhd, d, unit / 4, unit % 4, y,
                                          y + detail::slstm_token_block * dp);
  });
}

}  // namespace seqmix::inline v0::kernels
