#pragma once

#include <cmath>
#include <limits>
#include <numeric>

#include <seqmix/kernels/cpu/causal_tiles.hpp>
#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/kernels/stabilised_shape.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// A stabilised recurrence, a chunk of tokens at a time. The normaliser is one more column of the state that is
/// written with value 1. For row i of a chunk, l_ij is the log-weight of token j <= i and l_iS that of the state
/// before the chunk, each the sum of its parts as of row i, and r_i their running maximum:
///   W_ij = e^(l_ij - r_i),   num_i, den_i = sum_j W_ij (q_i.k_j) (v_j, 1) + e^(l_iS - r_i) q_i' (S, n)
/// and the state behind the chunk likewise with the maximum there. l is carried from row to row beside r, so that
/// no exponent is above 0 and none is a difference of long sums. Source: the form of Beck et al. (arXiv
/// 2405.04517), appendix A, cut into chunks with the maximum carried along.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: state [chunks, H, K (V + 1)] and maximum [chunks, H] before every chunk, and
/// den before floor and eps [R,H]. The form over channels keeps N and M [chunks, 2, H] for the state, and no den.
template <class T>
struct stabilised_saved {
  T *states = nullptr, *maxima = nullptr, *den = nullptr;
};

namespace detail {

template <class Isa, class T>
struct stabilised_scratch {
  T *q, *k, *v, *o, *q_decayed, *k_decayed, *key_t, *W, *P, *S, *from_state, *to_end;
  T *dq, *dk, *dv, *dout, *dW, *value_t, *S_t, *dS_t, *dS, *through, *column_sum;
  double *log_weight, *top, *row, *read, *written, *d_top;
  bool *kept, *read_past;

  static stabilised_scratch carve(arena& a, recurrence_shape const& s, bool backward) {
    index_t const C = s.chunk, Cp = simd::padded<Isa, T>(C), kp = simd::padded<Isa, T>(s.key_dim),
                  vp = simd::padded<Isa, T>(s.value_dim + 1);
    stabilised_scratch w{};
    for (T** p : {&w.q, &w.k, &w.q_decayed, &w.k_decayed}) *p = a.take<T>(C * kp);
    for (T** p : {&w.v, &w.o}) *p = a.take<T>(C * vp);
    for (T** p : {&w.W, &w.P}) *p = a.take<T>(C * Cp);
    for (T** p : {&w.from_state, &w.to_end}) *p = a.take<T>(Cp);
    w.key_t = a.take<T>(s.key_dim * Cp);
    w.S = a.take<T>(s.key_dim * vp);
    for (double** p : {&w.log_weight, &w.top}) *p = a.take<double>(C);
    for (bool** p : {&w.kept, &w.read_past}) *p = a.take<bool>(C);
    if (!backward) return w;
    for (T** p : {&w.dq, &w.dk, &w.through}) *p = a.take<T>(C * kp);
    for (T** p : {&w.dv, &w.dout}) *p = a.take<T>(C * vp);
    w.dW = a.take<T>(C * Cp);
    w.column_sum = a.take<T>(Cp);
    w.value_t = a.take<T>((s.value_dim + 1) * Cp);
    for (T** p : {&w.S_t, &w.dS_t}) *p = a.take<T>((s.value_dim + 1) * kp);
    w.dS = a.take<T>(s.key_dim * vp);
    for (double** p : {&w.row, &w.read, &w.written, &w.d_top}) *p = a.take<double>(C);
    return w;
  }
};

/// One head of one sequence.
template <class State, class Isa, class T>
class stabilised_head {
 public:
  static stabilised_saved<T> carve(arena& a, recurrence_shape const& s) {
    index_t const chunks = s.chunks_before(s.seq.count());
    return {a.take<T>(chunks * s.heads * s.key_dim * simd::padded<Isa, T>(s.value_dim + 1)),
            a.take<T>(chunks * s.heads), a.take<T>(s.seq.rows() * s.heads)};
  }

  stabilised_head(recurrence_shape const& s, stabilised_input<T> const& in, index_t n, index_t h,
                  stabilised_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(h), K_(s.key_dim), V_(s.value_dim), Cp_(simd::padded<Isa, T>(s.chunk)),
        kp_(simd::padded<Isa, T>(s.key_dim)), vp_(simd::padded<Isa, T>(s.value_dim + 1)), first_(s.seq.begin(n)),
        rows_(s.seq.length(n)) {}

  void forward(view3<T> o_rhv, stabilised_saved<T> const* saved, stabilised_state<T> const& final) {
    load_state(in_.initial, w_.S);
    m_ = in_.initial ? in_.initial.m_nh(n_, h_) : first_maximum<State, T>();
    index_t chunk = saved ? s_.chunks_before(n_) : 0;
    for (index_t at = 0; at < rows_; at += s_.chunk, ++chunk) {
      if (saved) {
        std::copy_n(w_.S, K_ * vp_, saved_state(*saved, chunk));
        saved->maxima[chunk * s_.heads + h_] = m_;
      }
      load_chunk(at);
      chunk_forward(o_rhv, saved);
    }
    if (final) store_state(w_.S, m_, final);
  }

  /// Adds to d_constant and d_bonus what a constant log-decay and the bonus get.
  void backward(stabilised_saved<T> const& saved, view3<T const> o_rhv, view3<T const> d_o_rhv,
                stabilised_state<T const> const& d_final, stabilised_gradient<T> const& d, double& d_constant,
                double& d_bonus) {
    load_state(d_final, w_.dS);
    double d_m = d_final ? double(d_final.m_nh(n_, h_)) : 0.0;
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      m_ = saved.maxima[(base + c) * s_.heads + h_];
      load_chunk(c * s_.chunk);
      chunk_backward(saved_state(saved, base + c), saved.den, o_rhv, d_o_rhv);
      if (c == chunks - 1) d_m -= at_end_ + std::accumulate(w_.written, w_.written + count_, 0.0);
      through_logarithms(d_m, d, d_constant, d_bonus);
      write(w_.dq, T(s_.scale), d.q_rhk, s_.query_heads);
      write(w_.dk, T(1), d.k_rhk, s_.key_heads);
      write_rows(w_.dv, vp_, count_, V_, T(1), d.v_rhv.at(first_ + at_, of(s_.value_heads)), d.v_rhv.stride[0],
                 !begins_group(s_.value_heads));
    }
    if (!d.initial) return;
    if (chunks > 0) d_m += double(dot(w_.dS, saved_state(saved, base), K_ * vp_));
    store_state(w_.dS, T(d_m), d.initial);
  }

 private:
  static constexpr bool keyed = State::stabilised.keyed;
  static constexpr bool inclusive = State::spec.read == read_order::inclusive;

  index_t of(index_t heads) const noexcept { return h_ * heads / s_.heads; }
  bool begins_group(index_t heads) const noexcept { return h_ % (s_.heads / heads) == 0; }
  T* saved_state(stabilised_saved<T> const& saved, index_t chunk) const noexcept {
    return saved.states + (chunk * s_.heads + h_) * K_ * vp_;
  }
  double log_decay(index_t i) const noexcept {
    return in_.g_rhk ? double(in_.g_rhk(first_ + at_ + i, of(s_.gate_heads), 0)) : 0.0;
  }
  double log_weight(index_t i) const noexcept {
    return in_.write_rh ? double(in_.write_rh(first_ + at_ + i, of(s_.gate_heads))) : 0.0;
  }
  double bonus() const noexcept { return in_.bonus_hk ? double(in_.bonus_hk(h_, 0)) : 0.0; }
  static T dot(T const* x, T const* y, index_t n) noexcept {
    return simd::map_sum<Isa, T>(
        n, [](auto const& a, auto const& b) { return a * b; }, x, y);
  }

  void load_state(stabilised_state<T const> const& from, T* to) const {
    std::fill_n(to, K_ * vp_, T(0));
    if (!from) return;
    copy_rows(from.S_nhkv.at(n_, h_), from.S_nhkv.stride[2], K_, V_, to, vp_);
    for (index_t k = 0; k < K_; ++k) to[k * vp_ + V_] = from.n_nhk(n_, h_, k);
  }
  void store_state(T const* from, T m, stabilised_state<T> const& to) const {
    write_rows(from, vp_, K_, V_, T(1), to.S_nhkv.at(n_, h_), to.S_nhkv.stride[2], false);
    for (index_t k = 0; k < K_; ++k) to.n_nhk(n_, h_, k) = from[k * vp_ + V_];
    to.m_nh(n_, h_) = m;
  }

  /// Rows of the chunk times `factor`; all 1 where a state has no keys.
  void load_keys(view3<T const> from, index_t heads, T factor, T* to) const {
    if (!from) {
      std::fill_n(to, count_ * kp_, T(0));
      for (index_t i = 0; i < count_; ++i) to[i * kp_] = T(1);
      return;
    }
    copy_rows(from.at(first_ + at_, of(heads)), from.stride[0], count_, K_, to, kp_);
    simd::map<Isa>(
        count_ * kp_, [=](auto const& x) { return x * factor; }, to, to);
  }
  /// to_i = factor_i from_i for rows of `width`.
  void scale_rows(T const* from, T const* factor, index_t width, T* to) const {
    for (index_t i = 0; i < count_; ++i) {
      T const f = factor[i];
      simd::map<Isa>(
          width, [=](auto const& x) { return x * f; }, to + i * width, from + i * width);
    }
  }
  /// Scaled queries, keys, values with their column of ones, weights, and P_ij = (q_i.k_j) W_ij.
  void load_chunk(index_t at) {
    at_ = at;
    count_ = (std::min)(s_.chunk, rows_ - at);
    load_keys(in_.q_rhk, s_.query_heads, T(s_.scale), w_.q);
    load_keys(in_.k_rhk, s_.key_heads, T(1), w_.k);
    copy_rows(in_.v_rhv.at(first_ + at, of(s_.value_heads)), in_.v_rhv.stride[0], count_, V_, w_.v, vp_);
    for (index_t i = 0; i < count_; ++i) w_.v[i * vp_ + V_] = T(1);
    weights();
    scale_rows(w_.q, w_.from_state, kp_, w_.q_decayed);
    scale_rows(w_.k, w_.to_end, kp_, w_.k_decayed);
    transpose<Isa>(w_.k, kp_, count_, K_, w_.key_t, Cp_);
    tile_product<Isa>(count_, Cp_, K_, tile_operand<T>{w_.q, kp_, 1}, w_.key_t, Cp_, w_.P, Cp_, false);
    weigh(w_.P, w_.W, w_.P);
  }
  /// to_ij = x_ij y_ij for j <= i, else 0, whatever x holds there.
  void weigh(T const* x, T const* y, T* to) const {
    for (index_t i = 0, at = 0; i < count_; ++i, at += Cp_)
      for (index_t j = 0; j < Cp_; j += Isa::template lanes<T>)
        simd::store<Isa>(to + at + j, simd::first_lanes<Isa, T>(
                                          simd::load<Isa>(x + at + j) * simd::load<Isa>(y + at + j), i + 1 - j));
  }
  void multiply(T const* x, T const* y, T* to) const {
    simd::map<Isa>(
        count_ * Cp_, [](auto const& a, auto const& b) { return a * b; }, to, x, y);
  }

  static double larger(double a, double b) noexcept { return b > a ? b : a; }
  /// What is taken from log-weights below a maximum: itself, or anything where nothing was seen.
  static double finite(double top) noexcept { return top == -std::numeric_limits<double>::infinity() ? 0.0 : top; }
  /// Rows of W, both maxima and which side won them, and the weights behind the chunk. m becomes the maximum there,
  /// rounded as it is stored.
  void weights() {
    double m = double(m_), state = m;
    for (index_t i = 0; i < count_; ++i) {
      double const g = log_decay(i), own = log_weight(i);
      if constexpr (!inclusive) {
        w_.top[i] = larger(m, bonus() + own);
        w_.read_past[i] = !(bonus() + own > m);
        w_.log_weight[i] = bonus() + own;
        weight_row(i, state);
      }
      w_.kept[i] = !(own > g + m);
      m = larger(g + m, own);
      state += g;
      for (index_t j = 0; j < i; ++j) w_.log_weight[j] += g;
      w_.log_weight[i] = own;
      if constexpr (inclusive) {
        w_.top[i] = m;
        weight_row(i, state);
      }
    }
    m_ = T(m);
    double const end = finite(double(m_));
    exponentials(count_, end, w_.to_end);
    std::fill(w_.to_end + count_, w_.to_end + Cp_, T(0));
    keep_ = std::exp(T(state - end));
    auto const exponential = [](auto const& x) { return simd::exp<Isa, T>(x); };
    simd::map<Isa>(count_, exponential, w_.from_state, w_.from_state);
  }
  /// W_ij for j <= i, zero behind; of the state the exponent alone.
  void weight_row(index_t i, double state) const {
    double const top = finite(w_.top[i]);
    exponentials(i + 1, top, w_.W + i * Cp_);
    std::fill(w_.W + i * Cp_ + i + 1, w_.W + (i + 1) * Cp_, T(0));
    w_.from_state[i] = T(state - top);
  }
  void exponentials(index_t n, double top, T* to) const {
    for (index_t j = 0; j < n; ++j) to[j] = T(w_.log_weight[j] - top);
    simd::map<Isa>(
        n, [](auto const& x) { return simd::exp<Isa, T>(x); }, to, to);
  }

  /// e^-r_i, which a floored denominator does not go below.
  T least(index_t i) const noexcept { return std::exp(T(-w_.top[i])); }
  bool floored(index_t i, T den) const noexcept { return State::stabilised.floor && !(std::abs(den) > least(i)); }
  T denominator(index_t i, T den) const noexcept {
    T const size = !State::stabilised.floor ? den : floored(i, den) ? least(i) : std::abs(den);
    return size + T(State::stabilised.eps);
  }
  bool saw_nothing(index_t i) const noexcept { return w_.top[i] == -std::numeric_limits<double>::infinity(); }

  void chunk_forward(view3<T> o_rhv, stabilised_saved<T> const* saved) {
    if (simd::may_hold_nan<Isa>(w_.v, count_ * vp_))
      causal_tiles<Isa, T, 1>{count_, Cp_}.sums_of_seen(w_.P, w_.v, vp_, w_.o, false);
    else
      tile_product<Isa>(count_, vp_, count_, tile_operand<T>{w_.P, Cp_, 1}, w_.v, vp_, w_.o, vp_, false);
    tile_product<Isa>(count_, vp_, K_, tile_operand<T>{w_.q_decayed, kp_, 1}, w_.S, vp_, w_.o, vp_, true);
    for (index_t i = 0; i < count_; ++i) {
      T* const o = w_.o + i * vp_;
      T const den = o[V_], inverse = saw_nothing(i) ? T(0) : T(1) / denominator(i, den);
      if (saved) saved->den[(first_ + at_ + i) * s_.heads + h_] = den;
      write_rows(o, vp_, 1, V_, inverse, o_rhv.at(first_ + at_ + i, h_), V_, false);
    }
    decay(w_.S);
    tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.k_decayed, 1, kp_}, w_.v, vp_, w_.S, vp_, true);
  }
  void decay(T* S) const {
    T const keep = keep_;
    simd::map<Isa>(
        K_ * vp_, [=](auto const& x) { return keep * x; }, S, S);
  }

  /// d num and d den of every row, and what eps passes to the rows' maxima.
  void load_output_derivatives(T const* saved_den, view3<T const> o_rhv, view3<T const> d_o_rhv) {
    for (index_t i = 0; i < count_; ++i) {
      index_t const r = first_ + at_ + i;
      T const *const o = o_rhv.at(r, h_), *const d_o = d_o_rhv.at(r, h_), den = saved_den[r * s_.heads + h_];
      T const inverse = saw_nothing(i) ? T(0) : T(1) / denominator(i, den);
      T const d_den = -dot(d_o, o, V_) * inverse;
      T* const to = w_.dout + i * vp_;
      std::fill_n(to, vp_, T(0));
      simd::map<Isa>(
          V_, [=](auto const& x) { return x * inverse; }, to, d_o);
      to[V_] = floored(i, den) ? T(0) : (State::stabilised.floor && den < T(0) ? -d_den : d_den);
      w_.d_top[i] = double(d_den) * State::stabilised.eps;
    }
  }

  void chunk_backward(T const* S, T const* den, view3<T const> o_rhv, view3<T const> d_o_rhv) {
    load_output_derivatives(den, o_rhv, d_o_rhv);
    transpose<Isa>(w_.v, vp_, count_, V_ + 1, w_.value_t, Cp_);
    tile_product<Isa>(count_, Cp_, V_ + 1, tile_operand<T>{w_.dout, vp_, 1}, w_.value_t, Cp_, w_.dW, Cp_, false);
    tile_product<Isa>(count_, vp_, count_, tile_operand<T>{w_.P, 1, Cp_}, w_.dout, vp_, w_.dv, vp_, false);
    tile_product<Isa>(count_, vp_, K_, tile_operand<T>{w_.k_decayed, kp_, 1}, w_.dS, vp_, w_.dv, vp_, true);
    multiply(w_.P, w_.dW, w_.P);  // from here on derivatives of the log-weights
    multiply(w_.W, w_.dW, w_.W);  // and of the products q.k
    if constexpr (keyed) {
      tile_product<Isa>(count_, kp_, count_, tile_operand<T>{w_.W, Cp_, 1}, w_.k, kp_, w_.dq, kp_, false);
      tile_product<Isa>(count_, kp_, count_, tile_operand<T>{w_.W, 1, Cp_}, w_.q, kp_, w_.dk, kp_, false);
    } else {
      std::fill_n(w_.dq, count_ * kp_, T(0));
      std::fill_n(w_.dk, count_ * kp_, T(0));
    }
    through_state(S, w_.S_t, w_.dout, w_.from_state, w_.q, w_.dq, w_.read);
    through_state(w_.dS, w_.dS_t, w_.v, w_.to_end, w_.k, w_.dk, w_.written);
    at_end_ = double(keep_ * dot(w_.dS, S, K_ * vp_));
    decay(w_.dS);
    tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.q_decayed, 1, kp_}, w_.dout, vp_, w_.dS, vp_, true);
  }
  /// Rows x_i of values meet a state through keys y_i with weight f_i: dy_i += f_i S x_i, and the whole product.
  void through_state(T const* S, T* S_t, T const* x, T const* f, T const* y, T* dy, double* product) const {
    transpose<Isa>(S, vp_, K_, V_ + 1, S_t, kp_);
    tile_product<Isa>(count_, kp_, V_ + 1, tile_operand<T>{x, vp_, 1}, S_t, kp_, w_.through, kp_, false);
    scale_rows(w_.through, f, kp_, w_.through);
    simd::map<Isa>(
        count_ * kp_, [](auto const& sum, auto const& part) { return sum + part; }, dy, dy, w_.through);
    for (index_t i = 0; i < count_; ++i) product[i] = double(dot(y + i * kp_, w_.through + i * kp_, kp_));
  }

  /// From the derivatives of the log-weights, row by row from the end, to those of g, i, u and of m before the
  /// chunk: `after` is what every log-weight that holds the row's decay gets.
  void through_logarithms(double& d_m, stabilised_gradient<T> const& d, double& d_constant, double& d_bonus) {
    sums_before_diagonal();
    double after = at_end_ + std::accumulate(w_.written, w_.written + count_, 0.0);
    for (index_t i = count_; i-- > 0;) {
      double const own = double(w_.P[i * Cp_ + i]), read = w_.row[i] + w_.read[i],
                   later = double(w_.column_sum[i]) + w_.written[i];
      if constexpr (inclusive) d_m += w_.d_top[i], after += read;
      after -= later;
      double d_g = after, d_i = own + later, d_u = 0.0;
      (w_.kept[i] ? d_g : d_i) += d_m;
      if (!w_.kept[i]) d_m = 0.0;
      if constexpr (!inclusive) {
        after += read;
        d_u = own;
        if (w_.read_past[i])
          d_m += w_.d_top[i];
        else
          d_u += w_.d_top[i], d_i += w_.d_top[i];
      }
      d_bonus += d_u;
      write_gate(first_ + at_ + i, d_g, d_i, d, d_constant);
    }
  }
  /// Of the derivatives of the log-weights, j < i: their sums over a row and over a column.
  void sums_before_diagonal() {
    std::fill_n(w_.column_sum, Cp_, T(0));
    for (index_t i = 0; i < count_; ++i) {
      simd::vec<Isa, T> row{};
      simd::for_vectors<Isa, T>(i, [&](index_t j, auto const& lanes) {
        auto const x = lanes.load(w_.P + i * Cp_ + j);
        row += x;
        lanes.store(w_.column_sum + j, lanes.load(w_.column_sum + j) + x);
      });
      w_.row[i] = double(simd::sum<Isa, T>(row));
    }
  }
  void write_gate(index_t r, double d_g, double d_i, stabilised_gradient<T> const& d, double& d_constant) const {
    index_t const hg = of(s_.gate_heads);
    bool const add = !begins_group(s_.gate_heads);
    if (d.write_rh) d.write_rh(r, hg) = T(d_i) + (add ? d.write_rh(r, hg) : T(0));
    if (!in_.g_rhk || !d.g_rhk) return;
    if (in_.g_rhk.stride[0] == 0)
      d_constant += d_g;
    else
      d.g_rhk(r, hg, 0) = T(d_g) + (add ? d.g_rhk(r, hg, 0) : T(0));
  }
  /// Rows of the chunk for queries or keys; added when an earlier head began them.
  void write(T const* from, T scale, view3<T> to, index_t heads) const {
    if constexpr (keyed)
      write_rows(from, kp_, count_, K_, scale, to.at(first_ + at_, of(heads)), to.stride[0], !begins_group(heads));
  }

  recurrence_shape const& s_;
  stabilised_input<T> const& in_;
  stabilised_scratch<Isa, T> const& w_;
  index_t n_, h_, K_, V_, Cp_, kp_, vp_, first_, rows_;
  index_t at_ = 0, count_ = 0;
  T m_{},
      keep_{};  ///< the running maximum, and what the state is multiplied by from one end of the chunk to the other
  double at_end_ = 0.0;
};

}  // namespace detail

}  // namespace seqmix::inline v0::kernels
