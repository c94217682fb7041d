#pragma once

#include <seqmix/kernels/cpu/stabilised_chunkwise.hpp>

/// A stabilised recurrence of many heads with one number each and no keys, token by token with heads as lanes:
/// RWKV-4. The step of kernels/stabilised_shape.hpp for K = V = 1 with an exclusive read, no floor and no eps, so
/// that o = num / den is a weighted mean and the derivatives of its two log-weights are opposite.
namespace seqmix::inline v0::kernels::detail {

template <class Isa>
inline constexpr index_t channel_block_bytes = 4 * Isa::vector_bytes;

/// One thread's memory: rows of one block of heads.
template <class Isa, class T>
struct stabilised_channel_scratch {
  T *N, *M, *m;  ///< [chunk + 1] rows in a backward, which computes a chunk's states again; else 1
  T *zero, *d_N, *d_M, *d_m, *d_bonus, *d_constant;

  static stabilised_channel_scratch carve(arena& a, recurrence_shape const& s, bool backward) {
    index_t const width = channel_block_bytes<Isa> / index_t(sizeof(T));
    stabilised_channel_scratch w{};
    for (T** p : {&w.N, &w.M, &w.m}) *p = a.take<T>((backward ? s.chunk + 1 : 1) * width);
    for (T** p : {&w.zero, &w.d_N, &w.d_M, &w.d_m, &w.d_bonus, &w.d_constant}) *p = a.take<T>(width);
    return w;
  }
};

/// e^(a - top) and e^(b - top) for the greater of the two, both 0 where both are -inf: one exponential, since one
/// of the exponents is 0.
template <class Isa, class T>
struct weight_pair {
  using V = simd::vec<Isa, T>;
  V top, a, b;

  SEQMIX_INLINE weight_pair(V const& x, V const& y) noexcept {
    V const zero{}, one = zero + T(1);
    top = y > x ? y : x;
    V const d = x - y, e = simd::exp<Isa, T>(d > zero ? -d : d);
    a = nothing() ? zero : (d >= zero ? one : e);
    b = nothing() ? zero : (d <= zero ? one : e);
  }
  SEQMIX_INLINE simd::ivec<Isa, T> nothing() const noexcept {
    return top == V{} - std::numeric_limits<T>::infinity();
  }
};

/// A block of heads of one sequence.
template <class State, class Isa, class T>
class stabilised_channels {
 public:
  static constexpr index_t width = channel_block_bytes<Isa> / index_t(sizeof(T));
  using scratch = stabilised_channel_scratch<Isa, T>;

  static index_t blocks(recurrence_shape const& s) noexcept { return (s.heads + width - 1) / width; }
  /// Whether a shape can be computed this way.
  static bool fits(recurrence_shape const& s) noexcept {
    return s.value_dim == 1 && s.value_heads == s.heads && s.gate_heads == s.heads;
  }
  static stabilised_saved<T> carve(arena& a, recurrence_shape const& s) {
    index_t const chunks = s.chunks_before(s.seq.count());
    return {a.take<T>(chunks * 2 * s.heads), a.take<T>(chunks * s.heads), nullptr};
  }

  stabilised_channels(recurrence_shape const& s, stabilised_input<T> const& in, index_t n, index_t block,
                      scratch const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(block * width), count_((std::min)(width, s.heads - h_)),
        first_(s.seq.begin(n)), rows_(s.seq.length(n)) {
    std::fill_n(w_.zero, width, T(0));
  }

  void forward(view3<T> o_rhv, stabilised_saved<T> const* saved, stabilised_state<T> const& final) {
    load_initial();
    index_t chunk = saved ? s_.chunks_before(n_) : 0;
    for (index_t t = 0; t < rows_; ++t) {
      if (saved && t % s_.chunk == 0) keep(*saved, chunk++);
      read_row(t, o_rhv.at(first_ + t, h_));
      write_row(t, 0, 0);
    }
    if (final) store(w_.N, w_.M, w_.m, final);
  }

  /// Adds to d_constant [H] and d_bonus [H] what constant log-decays and the bonuses get.
  void backward(stabilised_saved<T> const& saved, view3<T const> o_rhv, view3<T const> d_o_rhv,
                stabilised_state<T const> const& d_final, stabilised_gradient<T> const& d, double* d_constant,
                double* d_bonus) {
    load_final(d_final);
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      index_t const begin = c * s_.chunk, count = (std::min)(s_.chunk, rows_ - begin);
      restore(saved, base + c);
      for (index_t i = 0; i < count; ++i) write_row(begin + i, i, i + 1);
      if (c == chunks - 1) through_scale(count, T(-1));
      std::fill_n(w_.d_bonus, width, T(0));
      std::fill_n(w_.d_constant, width, T(0));
      for (index_t i = count; i-- > 0;) row_backward(begin + i, i, o_rhv, d_o_rhv, d);
      for (index_t j = 0; j < count_; ++j) {
        d_constant[h_ + j] += double(w_.d_constant[j]);
        d_bonus[h_ + j] += double(w_.d_bonus[j]);
      }
    }
    if (!d.initial) return;
    if (chunks > 0) through_scale(0, T(1));
    store(w_.d_N, w_.d_M, w_.d_m, d.initial);
  }

 private:
  T const* decays(index_t t) const noexcept { return in_.g_rhk ? in_.g_rhk.at(first_ + t, h_) : w_.zero; }
  T const* log_weights(index_t t) const noexcept {
    return in_.write_rh ? in_.write_rh.at(first_ + t, h_) : w_.zero;
  }
  T const* bonuses() const noexcept { return in_.bonus_hk ? in_.bonus_hk.at(h_) : w_.zero; }
  T const* values(index_t t) const noexcept { return in_.v_rhv.at(first_ + t, h_); }

  /// body(first head of the block, lanes) a vector of heads at a time.
  template <class Body>
  SEQMIX_INLINE void each(Body const& body) const {
    simd::for_vectors<Isa, T>(count_, body);
  }

  void load_initial() const {
    for (index_t j = 0; j < count_; ++j) {
      bool const given = bool(in_.initial);
      w_.N[j] = given ? in_.initial.S_nhkv(n_, h_ + j, 0, 0) : T(0);
      w_.M[j] = given ? in_.initial.n_nhk(n_, h_ + j, 0) : T(0);
      w_.m[j] = given ? in_.initial.m_nh(n_, h_ + j) : first_maximum<State, T>();
    }
  }
  void load_final(stabilised_state<T const> const& d_final) const {
    for (index_t j = 0; j < count_; ++j) {
      w_.d_N[j] = d_final ? d_final.S_nhkv(n_, h_ + j, 0, 0) : T(0);
      w_.d_M[j] = d_final ? d_final.n_nhk(n_, h_ + j, 0) : T(0);
      w_.d_m[j] = d_final ? d_final.m_nh(n_, h_ + j) : T(0);
    }
  }
  void store(T const* N, T const* M, T const* m, stabilised_state<T> const& to) const {
    for (index_t j = 0; j < count_; ++j) {
      to.S_nhkv(n_, h_ + j, 0, 0) = N[j];
      to.n_nhk(n_, h_ + j, 0) = M[j];
      to.m_nh(n_, h_ + j) = m[j];
    }
  }
  void keep(stabilised_saved<T> const& saved, index_t chunk) const {
    std::copy_n(w_.N, count_, saved.states + 2 * chunk * s_.heads + h_);
    std::copy_n(w_.M, count_, saved.states + (2 * chunk + 1) * s_.heads + h_);
    std::copy_n(w_.m, count_, saved.maxima + chunk * s_.heads + h_);
  }
  void restore(stabilised_saved<T> const& saved, index_t chunk) const {
    std::copy_n(saved.states + 2 * chunk * s_.heads + h_, count_, w_.N);
    std::copy_n(saved.states + (2 * chunk + 1) * s_.heads + h_, count_, w_.M);
    std::copy_n(saved.maxima + chunk * s_.heads + h_, count_, w_.m);
  }

  void read_row(index_t t, T* o) const {
    T const *const u = bonuses(), *const i = log_weights(t), *const v = values(t);
    each([&](index_t j, auto const& lanes) {
      weight_pair<Isa, T> const w(lanes.load(w_.m + j), lanes.load(u + j) + lanes.load(i + j));
      auto const num = w.a * lanes.load(w_.N + j) + w.b * lanes.load(v + j);
      auto const den = w.a * lanes.load(w_.M + j) + w.b;
      lanes.store(o + j, w.nothing() ? num : num / den);
    });
  }
  /// The state in row `from` of the scratch to row `to`.
  void write_row(index_t t, index_t from, index_t to) const {
    T const *const g = decays(t), *const i = log_weights(t), *const v = values(t);
    each([&](index_t j, auto const& lanes) {
      index_t const a = from * width + j, b = to * width + j;
      weight_pair<Isa, T> const w(lanes.load(w_.m + a) + lanes.load(g + j), lanes.load(i + j));
      lanes.store(w_.N + b, w.a * lanes.load(w_.N + a) + w.b * lanes.load(v + j));
      lanes.store(w_.M + b, w.a * lanes.load(w_.M + a) + w.b);
      lanes.store(w_.m + b, w.top);
    });
  }

  /// d_m += sign (d_N N + d_M M): between derivatives at a fixed maximum and derivatives at a fixed e^m (N, M).
  void through_scale(index_t row, T sign) const {
    each([&](index_t j, auto const& lanes) {
      auto const sum = lanes.load(w_.d_N + j) * lanes.load(w_.N + row * width + j) +
                       lanes.load(w_.d_M + j) * lanes.load(w_.M + row * width + j);
      lanes.store(w_.d_m + j, lanes.load(w_.d_m + j) + sign * sum);
    });
  }

  void row_backward(index_t t, index_t row, view3<T const> o_rhv, view3<T const> d_o_rhv,
                    stabilised_gradient<T> const& d) const {
    index_t const r = first_ + t;
    T const *const g = decays(t), *const i = log_weights(t), *const u = bonuses(), *const v = values(t),
                   *const o = o_rhv.at(r, h_), *const d_o = d_o_rhv.at(r, h_);
    bool const constant = in_.g_rhk && in_.g_rhk.stride[0] == 0;
    T* const d_g = d.g_rhk && !constant ? d.g_rhk.at(r, h_) : nullptr;
    T* const d_i = d.write_rh ? d.write_rh.at(r, h_) : nullptr;
    T* const d_v = d.v_rhv.at(r, h_);
    each([&](index_t j, auto const& lanes) {
      using V = simd::vec<Isa, T>;
      V const zero{}, N = lanes.load(w_.N + row * width + j), M = lanes.load(w_.M + row * width + j),
                      m = lanes.load(w_.m + row * width + j), value = lanes.load(v + j), own = lanes.load(i + j),
                      past = m + lanes.load(g + j), out = lanes.load(o + j);
      weight_pair<Isa, T> const write(past, own), read(m, lanes.load(u + j) + own);
      V const d_num = read.nothing() ? zero : lanes.load(d_o + j) / (read.a * M + read.b), d_den = -d_num * out;
      V const d_N = lanes.load(w_.d_N + j), d_M = lanes.load(w_.d_M + j), d_m = lanes.load(w_.d_m + j);
      V const through_read = read.b * d_num * (value - out);
      V const kept = own > past ? zero : d_m, taken = own > past ? d_m : zero;
      lanes.store(w_.d_m + j, kept);
      lanes.store(d_v + j, read.b * d_num + write.b * d_N);
      lanes.store(w_.d_bonus + j, lanes.load(w_.d_bonus + j) + through_read);
      if (d_i) lanes.store(d_i + j, through_read + write.b * (value * d_N + d_M) + taken);
      V const decay = write.a * (N * d_N + M * d_M) + kept;
      if (d_g) lanes.store(d_g + j, decay);
      lanes.store(w_.d_constant + j, lanes.load(w_.d_constant + j) + decay);
      lanes.store(w_.d_N + j, write.a * d_N + read.a * d_num);
      lanes.store(w_.d_M + j, write.a * d_M + read.a * d_den);
    });
  }

  recurrence_shape const& s_;
  stabilised_input<T> const& in_;
  scratch const& w_;
  index_t n_, h_, count_, first_, rows_;
};

}  // namespace seqmix::inline v0::kernels::detail
