#pragma once

#include <algorithm>
#include <limits>
#include <numeric>

#include <seqmix/kernels/cpu/attention_parts.hpp>
#include <seqmix/kernels/cpu/tile_product.hpp>
#include <seqmix/selectors/softmax.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// Tiled attention for any `which` and `how`: scores live in a tile of 64 x 64, keys are packed once per head, no T
/// x T memory. Work is cut by (sequence, head); shared key heads add up in the order of their query heads.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: per row what the selector asks for, and its soft output where a hard selector's
/// surrogate needs it. Bytes: R H sizeof(How::saved) [+ R H V sizeof(T)].
template <class How, class T>
struct attention_saved {
  typename How::template saved<T>* row = nullptr;  ///< [R,H]
  view3<T> soft_rhv;

  static attention_saved carve(arena& a, attention_shape const& s) {
    attention_saved saved;
    saved.row = a.take<typename How::template saved<T>>(s.seq.rows() * s.heads);
    if constexpr (How::spec.soft_output) saved.soft_rhv = a.take_view<T, 3>({s.seq.rows(), s.heads, s.value_dim});
    return saved;
  }
};

namespace detail {

inline constexpr index_t tile_rows = 64;  ///< queries per block
inline constexpr index_t tile_keys = 64;  ///< keys per tile

/// One thread's memory for one head of one sequence of `keys` tokens, past ones included.
template <class Isa, class How, class T>
struct attention_scratch {
  T *key_t, *value, *q, *score, *forward, *acc;                    // forward
  T *key, *value_t, *gv, *d_score, *dout, *d_q, *d_key, *d_value;  // backward
  double *g, *d_g;
  typename How::template row<T>* run;
  row_gradient<T>* upstream;
  key_ranges* seen;

  static attention_scratch carve(arena& a, attention_shape const& s, index_t keys, bool backward) {
    index_t const wide = (keys + tile_keys - 1) / tile_keys * tile_keys;
    index_t const kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    attention_scratch w{};
    w.key_t = a.take<T>(wide * s.key_dim);
    w.value = a.take<T>(wide * vp);
    w.q = a.take<T>(tile_rows * kp);
    w.score = a.take<T>(tile_rows * tile_keys);
    w.forward = a.take<T>(tile_rows * tile_keys);
    w.acc = a.take<T>(tile_rows * vp);
    w.g = a.take<double>(keys);
    w.run = a.take<typename How::template row<T>>(tile_rows);
    w.seen = a.take<key_ranges>(tile_rows);
    if (!backward) return w;
    w.key = a.take<T>(wide * kp);
    w.value_t = a.take<T>(wide * s.value_dim);
    w.gv = a.take<T>(tile_rows * tile_keys);
    w.d_score = a.take<T>(tile_rows * tile_keys);
    w.dout = a.take<T>(tile_rows * vp);
    w.d_q = a.take<T>(tile_rows * kp);
    w.d_key = a.take<T>(wide * kp);
    w.d_value = a.take<T>(wide * vp);
    w.d_g = a.take<double>(keys);
    w.upstream = a.take<row_gradient<T>>(tile_rows);
    return w;
  }
};

/// Padded rows [count, channels] to tiles [tile][channel][key], zero beyond the end.
template <class Isa, class T>
void transpose_tiles(T const* from, index_t from_row, index_t count, index_t channels, T* to,
                     index_t tile = tile_keys) noexcept {
  for (index_t j0 = 0; j0 < count; j0 += tile, to += channels * tile)
    transpose<Isa>(from + j0 * from_row, from_row, (std::min)(tile, count - j0), channels, to, tile);
}

/// One head of one sequence.
template <class Which, class How, class Isa, class T>
class attention_head {
 public:
  attention_head(attention_shape const& s, attention_input<T> const& in, index_t n, index_t h,
                 attention_scratch<Isa, How, T> const& w)
      : s_(s), w_(w), p_(s, in, n, h), kp_(simd::padded<Isa, T>(s.key_dim)), vp_(simd::padded<Isa, T>(s.value_dim)),
        two_temperatures_(How::spec.hard && s.knobs.forward() != s.knobs.temperature) {}

  void forward(view3<T> o_rhv, attention_saved<How, T> const* saved, attention_record const& record) {
    bool const soft = How::soft(s_.knobs, saved != nullptr);
    auto const start = first_row();
    pack_keys(false);
    for (index_t i0 = 0; i0 < p_.rows; i0 += tile_rows) {
      index_t const count = begin_block(i0);
      std::fill_n(w_.acc, count * vp_, T(0));
      std::fill_n(w_.run, count, start);
      for (index_t j0 = low_; j0 < high_; j0 += tile_keys) {
        score_tile(count, i0, j0);
        absorb_tile(count, j0, soft);
      }
      end_block(i0, count, soft, o_rhv, saved, record);
    }
  }

  void backward(view3<T const> o_rhv, view3<T const> d_o_rhv, attention_saved<How, T> const& saved,
                attention_gradient<T> const& d, double* d_constant, double* d_sink) {
    pack_keys(true);
    *d_sink = 0.0;
    std::fill_n(w_.d_key, keys_padded() * kp_, T(0));
    std::fill_n(w_.d_value, keys_padded() * vp_, T(0));
    std::fill_n(w_.d_g, p_.keys, 0.0);
    for (index_t i0 = 0; i0 < p_.rows; i0 += tile_rows) {
      index_t const count = begin_block(i0);
      copy_rows(d_o_rhv.at(p_.first + i0, p_.head), d_o_rhv.stride[0], count, s_.value_dim, w_.dout, vp_);
      for (index_t i = 0; i < count; ++i) w_.upstream[i] = upstream_of_row(i, i0, o_rhv, saved);
      add_sink_gradient(i0, count, saved, d_sink);
      std::fill_n(w_.d_q, count * kp_, T(0));
      if (scatters()) scatter_values(i0, count, saved);
      if (!scatters() || How::soft(s_.knobs, true))
        for (index_t j0 = low_; j0 < high_; j0 += tile_keys) backward_tile(i0, count, j0, saved);
      if (d.q_rhk)
        write_rows(w_.d_q, kp_, count, s_.key_dim, q_scale(), d.q_rhk.at(p_.first + i0, p_.head), d.q_rhk.stride[0],
                   false);
    }
    write_token_gradients(s_, p_, w_.d_key, kp_, w_.d_value, vp_, w_.d_g, d, d_constant);
  }

 protected:
  T q_scale() const noexcept { return T(s_.scale / s_.knobs.temperature); }
  index_t keys_padded() const noexcept { return (p_.keys + tile_keys - 1) / tile_keys * tile_keys; }

  /// Keys and values of the past and of this call behind one another; the running log-decay G in double.
  void pack_keys(bool backward) {
    pack_values();
    if (!backward) {
      transpose_keys();
    } else {
      p_.copy_keys(s_.key_dim, w_.key, kp_);
      std::fill(w_.key + p_.keys * kp_, w_.key + keys_padded() * kp_, T(0));
      transpose_tiles<Isa>(w_.key, kp_, p_.keys, s_.key_dim, w_.key_t);
      transpose_tiles<Isa>(w_.value, vp_, p_.keys, s_.value_dim, w_.value_t);
    }
    running_decay(p_, w_.g);
  }
  void pack_values() {
    p_.copy_values(s_.value_dim, w_.value, vp_);
    std::fill(w_.value + p_.keys * vp_, w_.value + keys_padded() * vp_, T(0));
    finite_values_ = p_.keys == 0 || !simd::may_hold_nan<Isa>(w_.value, p_.keys * vp_);
  }
  void transpose_keys() {
    for (index_t j0 = 0; j0 < p_.keys; j0 += tile_keys)
      p_.template transpose_keys<Isa>(j0, (std::min)(p_.keys, j0 + tile_keys), s_.key_dim,
                                      w_.key_t + j0 * s_.key_dim, tile_keys);
  }

  typename How::template row<T> first_row() const noexcept {
    if constexpr (How::spec.takes_sink)
      if (p_.in->sink_h) return How::template start<T>(p_.in->sink_h(p_.head));
    return {};
  }
  void add_sink_gradient(index_t i0, index_t count, attention_saved<How, T> const& saved,
                         double* d_sink) const noexcept {
    if constexpr (How::spec.takes_sink)
      if (p_.in->sink_h)
        for (index_t i = 0; i < count; ++i)
          *d_sink +=
              double(How::template sink_pullback<T>(kept(saved, i0 + i), w_.upstream[i], p_.in->sink_h(p_.head)));
  }

  index_t begin_block(index_t i0) {
    index_t const count = (std::min)(tile_rows, p_.rows - i0);
    load_block(i0, count, tile_keys);
    return count;
  }
  /// Scaled queries of a block, what its rows see, and the tiles it touches.
  void load_block(index_t i0, index_t count, index_t tile) {
    copy_rows(p_.query(i0), p_.in->q_rhk.stride[0], count, s_.key_dim, w_.q, kp_);
    T const scale = q_scale();
    for (index_t i = 0; i < count * kp_; ++i) w_.q[i] *= scale;
    low_ = all_end_ = p_.keys;
    high_ = all_begin_ = 0;
    for (index_t i = 0; i < count; ++i) {
      w_.seen[i] = Which::blocks(p_.position + i0 + i, -1, s_.select);
      bool const one_range = w_.seen[i].count == 1;
      all_begin_ = (std::max)(all_begin_, one_range ? w_.seen[i].range[0].begin : p_.keys);
      all_end_ = (std::min)(all_end_, one_range ? w_.seen[i].range[0].end : 0);
      if (w_.seen[i].count == 0) continue;
      low_ = (std::min)(low_, w_.seen[i].range[0].begin);
      high_ = (std::max)(high_, w_.seen[i].range[std::size_t(w_.seen[i].count - 1)].end);
    }
    low_ = low_ / tile * tile;
  }
  /// The scores of a tile to weights, and their values.
  void absorb_tile(index_t count, index_t j0, bool soft, index_t tile = tile_keys) {
    T const* const forward = two_temperatures_ ? w_.forward : nullptr;
    alignas(64) T factor[tile_rows];
    if constexpr (requires {
                    How::template absorb_rows<Isa>(w_.run, w_.score, forward, tile, count, j0, soft, factor);
                  })
      How::template absorb_rows<Isa>(w_.run, w_.score, forward, tile, count, j0, soft, factor);
    else
      for (index_t i = 0; i < count; ++i)
        factor[i] = How::template absorb<Isa>(w_.run[i], w_.score + i * tile,
                                              forward ? forward + i * tile : nullptr, tile, j0, soft);
    for (index_t i = 0; soft && i < count; ++i)
      if (factor[i] != T(1))
        simd::map<Isa>(
            vp_, [x = factor[i]](auto const& acc) { return acc * x; }, w_.acc + i * vp_, w_.acc + i * vp_);
    if (soft) add_values(count, j0, tile);
  }
  /// A weight of 0 would not keep an infinite value or a NaN out: where there are such, rows take what they see
  /// alone.
  void add_values(index_t count, index_t j0, index_t tile) {
    if (finite_values_ || all_seen(j0, tile))
      return for_strips(count, j0, tile, [&](index_t first, index_t rows, index_t keys) {
        tile_product<Isa>(rows, vp_, keys, tile_operand<T>{w_.score + first * tile, tile, 1}, w_.value + j0 * vp_,
                          vp_, w_.acc + first * vp_, vp_, true);
      });
    for (index_t i = 0; i < count; ++i)
      for (int r = 0; r < w_.seen[i].count; ++r) {
        auto const range = w_.seen[i].range[std::size_t(r)];
        index_t const begin = (std::max)(range.begin, j0), end = (std::min)(range.end, j0 + tile);
        tile_product<Isa>(1, vp_, end - begin, tile_operand<T>{w_.score + i * tile + begin - j0, tile, 1},
                          w_.value + begin * vp_, vp_, w_.acc + i * vp_, vp_, true);
      }
  }
  /// Whether every row of the block sees every key of a tile.
  bool all_seen(index_t j0, index_t tile) const noexcept { return all_begin_ <= j0 && j0 + tile <= all_end_; }
  /// f(first row, rows, how many keys of the tile they see at most): a tile at the causal boundary falls into
  /// strips.
  template <class F>
  void for_strips(index_t count, index_t j0, index_t tile, F const& f) const {
    constexpr index_t strip = 16;
    if (j0 + tile <= all_end_) return f(0, count, tile);
    for (index_t first = 0; first < count; first += strip) {
      index_t const rows = (std::min)(strip, count - first);
      index_t end = j0;
      for (index_t i = first; i < first + rows; ++i)
        for (int r = 0; r < w_.seen[i].count; ++r) end = (std::max)(end, w_.seen[i].range[std::size_t(r)].end);
      if (end > j0) f(first, rows, (std::min)(tile, simd::padded<Isa, T>(end - j0)));
    }
  }

  /// score = scale q.k / temperature + bias where visible, -inf elsewhere; or times the decay, 0 elsewhere.
  void score_tile(index_t count, index_t i0, index_t j0) {
    for_strips(count, j0, tile_keys, [&](index_t first, index_t rows, index_t keys) {
      tile_product<Isa>(rows, keys, s_.key_dim, tile_operand<T>{w_.q + first * kp_, kp_, 1},
                        w_.key_t + j0 * s_.key_dim, tile_keys, w_.score + first * tile_keys, tile_keys, false);
    });
    if (two_temperatures_) {
      T const ratio = T(s_.knobs.temperature / s_.knobs.forward());
      for (index_t x = 0; x < count * tile_keys; ++x) w_.forward[x] = w_.score[x] * ratio;
    }
    if (all_seen(j0, tile_keys) && !p_.gated()) return;
    for (index_t i = 0; i < count; ++i) {
      add_bias(i, i0, j0);
      mask(w_.seen[i], j0, w_.score + i * tile_keys, How::spec.multiplies_decay ? T(0) : hidden);
      if (two_temperatures_) mask(w_.seen[i], j0, w_.forward + i * tile_keys, hidden);
    }
  }
  void add_bias(index_t i, index_t i0, index_t j0) {
    if (!p_.gated()) return;
    double const here = w_.g[p_.past + i0 + i];
    index_t const n = (std::min)(tile_keys, p_.keys - j0);
    T* const score = w_.score + i * tile_keys;
    if constexpr (How::spec.multiplies_decay) {
      decay_row(here, j0, n);
      for (index_t j = 0; j < n; ++j) score[j] *= decay_[j];
    } else {
      for (index_t j = 0; j < n; ++j) score[j] += T(here - w_.g[j0 + j]);
      if (two_temperatures_)
        for (index_t j = 0; j < n; ++j) w_.forward[i * tile_keys + j] += T(here - w_.g[j0 + j]);
    }
  }
  /// e^(G_i - G_j) of one row; keys after the query are masked, their exponent is kept at 0.
  void decay_row(double here, index_t j0, index_t n) {
    for (index_t j = 0; j < tile_keys; ++j) decay_[j] = j < n ? T((std::min)(0.0, here - w_.g[j0 + j])) : T(0);
    simd::map<Isa>(
        tile_keys, [](auto const& x) { return simd::exp<Isa, T>(x); }, decay_, decay_);
  }
  static void mask(key_ranges const& seen, index_t j0, T* score, T nothing, index_t tile = tile_keys) noexcept {
    index_t at = j0;
    index_t const end = j0 + tile;
    for (int r = 0; r < seen.count; ++r) {
      auto const range = seen.range[std::size_t(r)];
      for (index_t j = at; j < (std::min)(range.begin, end); ++j) score[j - j0] = nothing;
      at = (std::max)(at, (std::min)(range.end, end));
    }
    for (index_t j = at; j < end; ++j) score[j - j0] = nothing;
  }

  void end_block(index_t i0, index_t count, bool soft, view3<T> o_rhv, attention_saved<How, T> const* saved,
                 attention_record const& record) {
    for (index_t i = 0; i < count; ++i) {
      index_t const r = p_.first + i0 + i;
      typename How::template saved<T> row{};
      auto const out = How::finish(w_.run[i], s_.knobs, row);
      T* const o = o_rhv.at(r, p_.head);
      T const* const acc = w_.acc + i * vp_;
      for (index_t c = 0; c < s_.value_dim; ++c) o[c] = out.soft == T(0) ? T(0) : out.soft * acc[c];
      if (out.chosen >= 0) {
        T const* const v = w_.value + out.chosen * vp_;
        for (index_t c = 0; c < s_.value_dim; ++c)
          o[c] = out.soft == T(0) ? out.hard * v[c] : o[c] + out.hard * v[c];
      }
      if (saved) kept(*saved, i0 + i) = row;
      if constexpr (How::spec.soft_output)
        if (saved && soft)
          for (index_t c = 0; c < s_.value_dim; ++c) *saved->soft_rhv.at(r, p_.head, c) = out.normaliser * acc[c];
      if constexpr (requires { row.lse; })
        if (record.lse_rh)
          record.lse_rh(r, p_.head) =
              out.normaliser == T(0) && out.chosen < 0 ? -std::numeric_limits<double>::infinity() : double(row.lse);
      if (record.choice_rh) record.choice_rh(r, p_.head) = out.chosen;
    }
  }

  auto& kept(attention_saved<How, T> const& saved, index_t row) const noexcept {
    return saved.row[(p_.first + row) * s_.heads + p_.head];
  }
  /// Whether only the chosen values of hard rows get a derivative.
  bool scatters() const noexcept {
    if constexpr (requires { How::scatters(s_.knobs); })
      return How::scatters(s_.knobs);
    else
      return false;
  }
  void scatter_values(index_t i0, index_t count, attention_saved<How, T> const& saved) noexcept {
    if constexpr (How::spec.hard)
      for (index_t i = 0; i < count; ++i) {
        auto const& row = kept(saved, i0 + i);
        if (row.chosen >= 0)
          simd::map<Isa>(
              vp_, [held = row.held](auto const& d, auto const& g) { return d + held * g; },
              w_.d_value + row.chosen * vp_, w_.d_value + row.chosen * vp_, w_.dout + i * vp_);
      }
  }
  void backward_tile(index_t i0, index_t count, index_t j0, attention_saved<How, T> const& saved) {
    score_tile(count, i0, j0);
    for_strips(count, j0, tile_keys, [&](index_t first, index_t rows, index_t keys) {
      tile_product<Isa>(rows, keys, s_.value_dim, tile_operand<T>{w_.dout + first * vp_, vp_, 1},
                        w_.value_t + j0 * s_.value_dim, tile_keys, w_.gv + first * tile_keys, tile_keys, false);
    });
    for (index_t i = 0; i < count; ++i) {
      T* const score = w_.score + i * tile_keys;
      T* const d_score = w_.d_score + i * tile_keys;
      How::template pullback<Isa>(kept(saved, i0 + i), w_.upstream[i], score, w_.gv + i * tile_keys, d_score,
                                  tile_keys, j0, s_.knobs);
      if (!all_seen(j0, tile_keys)) mask(w_.seen[i], j0, d_score, T(0));
      if (p_.gated()) gate_gradient(i, i0, j0, score, d_score);
    }
    for_strips(count, j0, tile_keys, [&](index_t first, index_t rows, index_t keys) {
      T const *const score = w_.score + first * tile_keys, *const d_score = w_.d_score + first * tile_keys;
      tile_product<Isa>(rows, kp_, keys, tile_operand<T>{d_score, tile_keys, 1}, w_.key + j0 * kp_, kp_,
                        w_.d_q + first * kp_, kp_, true);
      tile_product<Isa>(keys, kp_, rows, tile_operand<T>{d_score, 1, tile_keys}, w_.q + first * kp_, kp_,
                        w_.d_key + j0 * kp_, kp_, true);
      if (!scatters())
        tile_product<Isa>(keys, vp_, rows, tile_operand<T>{score, 1, tile_keys}, w_.dout + first * vp_, vp_,
                          w_.d_value + j0 * vp_, vp_, true);
    });
  }
  row_gradient<T> upstream_of_row(index_t i, index_t i0, view3<T const> o_rhv,
                                  attention_saved<How, T> const& saved) const {
    T const* const g = w_.dout + i * vp_;
    // In the order of tile_product, so that a row that sees one key alone gets exact zeros.
    auto const dot = [&](T const* x) {
      T sum(0);
      for (index_t c = 0; c < s_.value_dim; ++c) sum += g[c] * x[c];
      return sum;
    };
    row_gradient<T> out;
    if constexpr (How::spec.soft_output) {
      index_t const chosen = kept(saved, i0 + i).chosen;
      if (How::soft(s_.knobs, true)) out.soft = dot(saved.soft_rhv.at(p_.first + i0 + i, p_.head));
      if (chosen >= 0) out.chosen = dot(w_.value + chosen * vp_);
    } else {
      out.soft = dot(o_rhv.at(p_.first + i0 + i, p_.head));
    }
    return out;
  }
  /// The bias G_i - G_j (or the factor e^(G_i - G_j), whose derivative then also reaches the raw score).
  void gate_gradient(index_t i, index_t i0, index_t j0, T const* score, T* d_score) {
    index_t const query = p_.past + i0 + i;
    index_t const n = (std::min)(tile_keys, p_.keys - j0);
    double row = 0.0;
    for (index_t j = 0; j < n; ++j) {
      double const d = double(How::spec.multiplies_decay ? d_score[j] * score[j] : d_score[j]);
      row += d;
      w_.d_g[j0 + j] -= d;
    }
    w_.d_g[query] += row;
    if constexpr (How::spec.multiplies_decay) {
      decay_row(w_.g[query], j0, n);
      for (index_t j = 0; j < n; ++j) d_score[j] *= decay_[j];
    }
  }

  static constexpr T hidden = -std::numeric_limits<T>::infinity();
  attention_shape const& s_;
  attention_scratch<Isa, How, T> const& w_;
  head_place<T> p_;
  index_t kp_, vp_;
  index_t low_ = 0, high_ = 0;           ///< keys that some row of the block sees
  index_t all_begin_ = 0, all_end_ = 0;  ///< keys that all its rows see
  bool two_temperatures_;
  bool finite_values_ = true;
  alignas(64) T decay_[tile_keys];
};

}  // namespace detail

/// o [R,H,V] = attention over the visible keys. `saved` is nullptr when no backward follows: a hard selector then
/// skips its surrogate. Work: 2 K + 2 V flops a visible pair (2 K for hard selection without surrogate).
/// Deterministic: the same bits for any number of threads.
template <class Which, class How, class Isa, class Threads, class T>
void attention_forward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s, attention_input<T> const& in,
                       view3<same<T>> o_rhv, attention_saved<How, same<T>> const* saved,
                       attention_record const& record, arena& ws) {
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, How::spec, in.sink_h);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::attention_scratch<Isa, How, T>>(
      ws, thread_count(dev), [&] { return detail::attention_scratch<Isa, How, T>::carve(ws, s, keys, false); });
  parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int thread) {
    detail::attention_head<Which, How, Isa, T> head(s, in, unit / s.heads, unit % s.heads, scratch[thread]);
    head.forward(o_rhv, saved, record);
  });
}

/// The derivatives of attention_forward: scores are recomputed from q and k, weights from what was saved.
template <class Which, class How, class Isa, class Threads, class T>
void attention_backward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s, attention_input<T> const& in,
                        view3<same<T> const> o_rhv, attention_saved<How, same<T>> const& saved,
                        view3<same<T> const> d_o_rhv, attention_gradient<same<T>> const& d, arena& ws) {
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, How::spec, in.sink_h);
  expect_shape("attention output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d, in.queries_alone);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::attention_scratch<Isa, How, T>>(
      ws, thread_count(dev), [&] { return detail::attention_scratch<Isa, How, T>::carve(ws, s, keys, true); });
  double* const d_constant = ws.take<double>(s.seq.count() * s.heads);
  double* const d_sink = ws.take<double>(s.seq.count() * s.heads);
  index_t const groups = std::gcd(std::gcd(s.key_heads, s.value_heads), s.gate_heads);
  index_t const group = s.heads / groups;
  parallel_for(dev, s.seq.count() * groups, [&](index_t unit, int thread) {
    index_t const n = unit / groups;
    for (index_t h = unit % groups * group; h < (unit % groups + 1) * group; ++h) {
      detail::attention_head<Which, How, Isa, T> head(s, in, n, h, scratch[thread]);
      head.backward(o_rhv, d_o_rhv, saved, d, d_constant + n * s.heads + h, d_sink + n * s.heads + h);
    }
  });
  if (dev.dry) return;
  detail::write_constant_gate<T>(s, in.g_rhk, d_constant, d.g_rhk);
  if (in.sink_h) detail::write_sink<T>(s, d_sink, d.sink_h);
}

}  // namespace seqmix::inline v0::kernels
