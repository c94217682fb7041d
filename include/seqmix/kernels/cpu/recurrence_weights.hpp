#pragma once

#include <seqmix/kernels/cpu/causal_tiles.hpp>
#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/tensor/arena.hpp>

/// How much of what token j writes a later token reads: the decays between them, for one head and a chunk of n
/// tokens. Decays are products of factors e^g <= 1, taken one token further at a time: nothing is divided, no
/// e^(-G) is formed, and the derivative of every factor is a sum of terms that cross its token, without
/// cancellation.
namespace seqmix::inline v0::kernels::detail {

/// A chunk of tokens: what reads the state (queries q, erasing vectors a) and what writes it (y: m rows a token, w
/// or w and b in turn). `_decayed` rows meet the state before the chunk (q, a) or behind it (y); `read` and
/// `erased` are the weights of the rows of y in what q and a find: [n, row]. Level l of a token's decays is before
/// token l: a reads at its own level, q there too when the read is exclusive, else one further.
template <class T>
struct chunk_rows {
  T *q, *a, *y, *factor;                         ///< [n,kp], [n,kp], [m n,kp], [n,kp]
  T *q_decayed, *a_decayed, *y_decayed, *total;  ///< the same; total [kp]: the whole chunk's decay
  T *read, *erased;                              ///< [n, row]
  T *d_q, *d_a, *d_y, *d_factor, *d_total;       ///< derivatives: first of the decayed rows, then of the rows
  T *d_read, *d_erased;                          ///< lower triangles
  index_t count = 0;                             ///< n
};

/// Lane i of the sum over the lanes of row i, for as many rows as a vector has lanes; the rows are used up.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> sum_each(simd::vec<Isa, T>* rows) noexcept {
  constexpr int n = Isa::template lanes<T>;
  constexpr auto lanes = std::make_index_sequence<std::size_t(n)>{};
  for (int half = n / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      rows[i] = simd::interleave<false>(rows[i], rows[i + half], lanes) +
                simd::interleave<true>(rows[i], rows[i + half], lanes);
  return rows[0];
}

/// Which vectors a chunk has, and how they are read.
template <bool Erases, bool Exclusive, int Rows>
struct chunk_kind {
  static constexpr bool erases = Erases, exclusive = Exclusive;
  static constexpr int rows = Rows;           ///< m: rows of y a token
  static constexpr int q_level = !Exclusive;  ///< levels that a query stands above its token's
};

/// One decay per head (or none): weights are products q.y, by tiles, times numbers.
template <class Kind, class Isa, class T>
class head_weights {
 public:
  static head_weights carve(arena& arena, index_t chunk, index_t keys, bool backward) {
    head_weights w{};
    w.keys_ = keys, w.kp_ = simd::padded<Isa, T>(keys), w.row_ = simd::padded<Isa, T>(m * chunk);
    w.y_t_ = arena.take<T>(keys * w.row_);
    w.level_ = arena.take<T>((chunk + 1) * w.row_);
    w.from_start_ = arena.take<T>(chunk + 1);
    for (T** p : {&w.raw_read_, &w.raw_erased_}) *p = arena.take<T>(chunk * w.row_);
    if (backward) w.d_level_ = arena.take<T>(w.row_);
    return w;
  }

  void forward(chunk_rows<T> const& c) const {
    index_t const n = c.count;
    auto const tiles = causal(n);
    transpose<Isa>(c.y, kp_, m * n, keys_, y_t_, row_);
    tiles.products(keys_, {c.q, kp_, 1}, y_t_, raw_read_);
    if constexpr (Kind::erases) tiles.products(keys_, {c.a, kp_, 1}, y_t_, raw_erased_);
    set_levels(c);
    for (index_t i = 0; i < n; ++i) {
      weigh(raw_read_, i, i + Kind::q_level, c.read);
      scale_row(c.q + i * kp_, from_start_[i + Kind::q_level], c.q_decayed + i * kp_);
      if constexpr (Kind::erases) {
        weigh(raw_erased_, i, i, c.erased);
        scale_row(c.a + i * kp_, from_start_[i], c.a_decayed + i * kp_);
      }
    }
    for (index_t j = 0; j < m * n; ++j) scale_row(c.y + j * kp_, level(n)[j], c.y_decayed + j * kp_);
    std::fill_n(c.total, kp_, from_start_[n]);
  }

  void backward(chunk_rows<T> const& c) const {
    index_t const n = c.count;
    T* const d = d_level_;
    std::fill_n(d, row_, T(0));
    for (index_t j = 0; j < m * n; ++j) {
      d[j] = dot(c.d_y + j * kp_, c.y + j * kp_);
      scale_row(c.d_y + j * kp_, level(n)[j], c.d_y + j * kp_);
    }
    T d_start = simd::map_sum<Isa, T>(
        keys_, [](auto const& x) { return x; }, c.d_total);
    auto const q_backward = [&](index_t i) {
      weigh_backward(raw_read_, i, i + Kind::q_level, c.d_read, d);
      d_start += dot(c.d_q + i * kp_, c.q + i * kp_);
      scale_row(c.d_q + i * kp_, from_start_[i + Kind::q_level], c.d_q + i * kp_);
    };
    for (index_t i = n; i-- > 0;) {
      if constexpr (!Kind::exclusive) q_backward(i);
      T const factor = c.factor[i * kp_];
      T* const d_factor = c.d_factor + i * kp_;
      std::fill_n(d_factor, kp_, T(0));  // one decay for all channels: the first takes the sum
      d_factor[0] = simd::map_sum<Isa, T>(
                        m * i, [](auto const& x, auto const& y) { return x * y; }, d, level(i)) +
                    d_start * from_start_[i];
      simd::map<Isa>(
          m * i, [=](auto const& x) { return x * factor; }, d, d);
      d_start *= factor;
      if constexpr (Kind::exclusive) q_backward(i);
      if constexpr (Kind::erases) {
        weigh_backward(raw_erased_, i, i, c.d_erased, d);
        d_start += dot(c.d_a + i * kp_, c.a + i * kp_);
        scale_row(c.d_a + i * kp_, from_start_[i], c.d_a + i * kp_);
      }
    }
    auto const tiles = causal(n);
    tiles.sums(c.d_read, c.y, kp_, c.d_q, true);
    tiles.sums_back(c.d_read, c.q, kp_, c.d_y, true);
    if constexpr (Kind::erases) {
      tiles.sums(c.d_erased, c.y, kp_, c.d_a, true);
      tiles.sums_back(c.d_erased, c.a, kp_, c.d_y, true);
    }
  }

 private:
  static constexpr index_t m = Kind::rows;
  causal_tiles<Isa, T, Kind::rows> causal(index_t n) const noexcept { return {n, row_}; }
  /// Decays of the rows of y from their tokens to before token l; 0 from token l on.
  T* level(index_t l) const noexcept { return level_ + l * row_; }
  T dot(T const* x, T const* y) const noexcept {
    return simd::map_sum<Isa, T>(
        kp_, [](auto const& a, auto const& b) { return a * b; }, x, y);
  }
  void scale_row(T const* from, T factor, T* to) const noexcept {
    simd::map<Isa>(
        kp_, [=](auto const& x) { return x * factor; }, to, from);
  }
  void set_levels(chunk_rows<T> const& c) const {
    from_start_[0] = T(1);
    std::fill_n(level(0), row_, T(0));
    for (index_t i = 0; i < c.count; ++i) {
      T const factor = c.factor[i * kp_];
      from_start_[i + 1] = from_start_[i] * factor;
      simd::map<Isa>(
          row_, [=](auto const& x) { return x * factor; }, level(i + 1), level(i));
      std::fill_n(level(i + 1) + m * i, m, T(1));
    }
  }
  /// Products of token i with the rows below level l, times their decays.
  void weigh(T const* raw, index_t i, index_t l, T* to) const noexcept {
    simd::map<Isa>(
        m * l, [](auto const& x, auto const& decay) { return x * decay; }, to + i * row_, raw + i * row_, level(l));
    std::fill(to + i * row_ + m * l, to + (i + 1) * row_, T(0));
  }
  void weigh_backward(T const* raw, index_t i, index_t l, T* d_weight, T* d) const noexcept {
    simd::map<Isa>(
        m * l, [](auto const& sum, auto const& x, auto const& y) { return sum + x * y; }, d, d, d_weight + i * row_,
        raw + i * row_);
    weigh(d_weight, i, l, d_weight);
  }

  index_t keys_, kp_, row_;
  T *y_t_, *level_, *from_start_, *raw_read_, *raw_erased_, *d_level_;
};

/// One decay per key channel: the rows of y are decayed token by token, channel by channel, and met by each reader
/// as it comes. Work: about 6 m n flops a channel and token, besides what tiles do; backward keeps all levels.
template <class Kind, class Isa, class T>
class channel_weights {
 public:
  static channel_weights carve(arena& arena, index_t chunk, index_t keys, bool backward) {
    channel_weights w{};
    w.kp_ = simd::padded<Isa, T>(keys), w.row_ = simd::padded<Isa, T>(m * chunk);
    w.from_start_ = arena.take<T>((chunk + 1) * w.kp_);
    if (backward) w.level_ = arena.take<T>(m * chunk * (chunk + 1) / 2 * w.kp_);
    return w;
  }

  void forward(chunk_rows<T> const& c) const {
    std::fill_n(from_start_, kp_, T(1));
    for (index_t i = 0; i < c.count; ++i) {
      T const* const factor = c.factor + i * kp_;
      multiply(from_start(i), factor, from_start(i + 1));
      multiply(c.q + i * kp_, from_start(i + Kind::q_level), c.q_decayed + i * kp_);
      if constexpr (Kind::erases) multiply(c.a + i * kp_, from_start(i), c.a_decayed + i * kp_);
      advance(c, i);
    }
    std::copy_n(from_start(c.count), kp_, c.total);
    if (level_) std::copy_n(level(c, c.count), m * c.count * kp_, c.y_decayed);
  }

  void backward(chunk_rows<T> const& c) const {
    for (index_t i = c.count; i-- > 0;)
      for (index_t k = 0; k < kp_; k += lanes) token_backward(c, i, k);
  }

 private:
  using V = simd::vec<Isa, T>;
  static constexpr index_t m = Kind::rows, lanes = Isa::template lanes<T>;

  T* from_start(index_t l) const noexcept { return from_start_ + l * kp_; }
  /// The rows of y of the tokens before l, decayed to before token l. Forward overwrites them level by level.
  T* level(chunk_rows<T> const& c, index_t l) const noexcept {
    return level_ ? level_ + m * l * (l - 1) / 2 * kp_ : c.y_decayed;
  }
  void multiply(T const* x, T const* y, T* to) const noexcept {
    simd::map<Isa>(
        kp_, [](auto const& a, auto const& b) { return a * b; }, to, x, y);
  }

  /// Weights of what token i reads, and the rows of y one level further.
  void advance(chunk_rows<T> const& c, index_t i) const {
    T const *const q = c.q + i * kp_, *const a = c.a + i * kp_, *const factor = c.factor + i * kp_;
    T const* const from = level(c, i);
    T *const to = level(c, i + 1), *const read = c.read + i * row_, *const erased = c.erased + i * row_;
    std::copy_n(c.y + m * i * kp_, m * kp_, to + m * i * kp_);
    for (index_t j = 0; j < row_; j += lanes) {
      V by_q[std::size_t(lanes)] = {}, by_a[std::size_t(lanes)] = {};
      index_t const end = (std::min)(lanes, m * i - j);
      for (index_t l = 0; l < end; ++l) {
        T const* const x = from + (j + l) * kp_;
        T* const next = to + (j + l) * kp_;
        V q_sum{}, a_sum{};
        for (index_t k = 0; k < kp_; k += lanes) {
          V const here = simd::load<Isa>(x + k), there = here * simd::load<Isa>(factor + k);
          simd::store<Isa>(next + k, there);
          q_sum += simd::load<Isa>(q + k) * (Kind::exclusive ? here : there);
          if constexpr (Kind::erases) a_sum += simd::load<Isa>(a + k) * here;
        }
        by_q[l] = q_sum;
        if constexpr (Kind::erases) by_a[l] = a_sum;
      }
      if constexpr (!Kind::exclusive)
        for (index_t l = (std::max)(index_t(0), end); l < (std::min)(lanes, m * (i + 1) - j); ++l)
          for (index_t k = 0; k < kp_; k += lanes)
            by_q[l] += simd::load<Isa>(q + k) * simd::load<Isa>(to + (j + l) * kp_ + k);
      simd::store<Isa>(read + j, sum_each<Isa, T>(by_q));
      if constexpr (Kind::erases) simd::store<Isa>(erased + j, sum_each<Isa, T>(by_a));
    }
  }

  /// Token i and a vector of channels, from the level behind the token to the one before it.
  void token_backward(chunk_rows<T> const& c, index_t i, index_t k) const {
    index_t const at = i * kp_ + k;
    T const *const d_read = c.d_read + i * row_, *const d_erased = c.d_erased + i * row_;
    T const* const here = level(c, i) + k;
    T* const d_y = c.d_y + k;
    V const q = simd::load<Isa>(c.q + at), factor = simd::load<Isa>(c.factor + at),
            start = simd::load<Isa>(from_start(i) + k), d_q_decayed = simd::load<Isa>(c.d_q + at);
    V d_start = simd::load<Isa>(c.d_total + k);
    V d_q = d_q_decayed * (Kind::exclusive ? start : simd::load<Isa>(from_start(i + 1) + k)), d_a{}, a{};
    if constexpr (!Kind::exclusive) {
      d_start += d_q_decayed * q;
      for (index_t j = m * i; j < m * (i + 1); ++j) {
        d_q += simd::load<Isa>(c.y + j * kp_ + k) * d_read[j];
        simd::store<Isa>(d_y + j * kp_, simd::load<Isa>(d_y + j * kp_) + q * d_read[j]);
      }
    }
    V d_factor = d_start * start;
    d_start *= factor;
    if constexpr (Kind::exclusive) d_start += d_q_decayed * q;
    if constexpr (Kind::erases) {
      V const d_a_decayed = simd::load<Isa>(c.d_a + at);
      a = simd::load<Isa>(c.a + at);
      d_a = d_a_decayed * start;
      d_start += d_a_decayed * a;
    }
    V d_next{};  // of q through the level behind the token
    for (index_t j = 0; j < m * i; ++j) {
      V const x = simd::load<Isa>(here + j * kp_);
      V d_x = simd::load<Isa>(d_y + j * kp_);
      if constexpr (!Kind::exclusive) {
        d_next += x * d_read[j];
        d_x += q * d_read[j];
      }
      d_factor += d_x * x;
      d_x *= factor;
      if constexpr (Kind::exclusive) {
        d_q += x * d_read[j];
        d_x += q * d_read[j];
      }
      if constexpr (Kind::erases) {
        d_a += x * d_erased[j];
        d_x += a * d_erased[j];
      }
      simd::store<Isa>(d_y + j * kp_, d_x);
    }
    simd::store<Isa>(c.d_q + at, d_q + d_next * factor);
    if constexpr (Kind::erases) simd::store<Isa>(c.d_a + at, d_a);
    simd::store<Isa>(c.d_factor + at, d_factor);
    simd::store<Isa>(c.d_total + k, d_start);
  }

  index_t kp_, row_;
  T *from_start_, *level_;
};

}  // namespace seqmix::inline v0::kernels::detail
