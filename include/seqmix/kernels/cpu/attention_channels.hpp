#pragma once

#include <seqmix/kernels/cpu/attention.hpp>

/// Attention with weights that multiply decays, under a gate with one decay per key channel, inside the dot
/// product:
///   score_ij = scale sum_c q_ic k_jc e^(G_ic - G_jc)
/// Exponents are sums of log-decays over the tokens between, never differences of longer sums. A tile of keys
/// before the block of queries is reached in three steps, all of them <= 0: from the key to the end of its tile,
/// from there to the start of the block, from there to the query; then scores are products of tiles. Within a
/// block's own tile they are summed pair by pair. Source: Yang et al. (arXiv 2312.06635), section 4, for their
/// recurrence's chunks.
namespace seqmix::inline v0::kernels {

namespace detail {

inline constexpr index_t channel_tile = 32;  ///< queries per block and keys per tile

/// The log-decays of one head's tokens, or of the products that they are.
template <class T>
struct channel_decays {
  attention_input<T> const& in;

  bool rated() const noexcept { return in.rate_hk.extent[1] > 0; }
  bool constant() const noexcept { return in.g_rhk.stride[0] == 0; }
  T step(head_place<T> const& p, index_t j, index_t c) const noexcept {
    index_t const at = rated() ? 0 : c;
    if (constant()) return in.g_rhk(0, p.gate_head, at);
    return j < p.past ? in.past_g_nlhk(p.sequence, j, p.gate_head, at)
                      : in.g_rhk(p.first + j - p.past, p.gate_head, at);
  }
  T rate(head_place<T> const& p, index_t c) const noexcept { return rated() ? in.rate_hk(p.gate_head, c) : T(1); }
  /// Before the bound is applied.
  T raw(head_place<T> const& p, index_t j, index_t c) const noexcept { return step(p, j, c) * rate(p, c); }
};

/// One thread's memory beside attention_scratch: rows of padded channels, a row a token unless said otherwise.
template <class Isa, class T>
struct channel_attention_scratch {
  T *g, *key, *key_far;             ///< keys as they are and at the end of their tile
  T *total, *gap;                   ///< [tiles] of a tile's tokens; from its end to the block
  T *from_start, *q_near, *q_far;   ///< [channel_tile] queries seen from the block's start, from a tile's end
  T *to_end, *d_key_far, *d_decay;  // backward
  T *d_near, *d_far;                // backward [channel_tile]
  double* after;                    // backward, one row

  static channel_attention_scratch carve(arena& a, attention_shape const& s, index_t keys, bool backward) {
    index_t const tiles = (keys + channel_tile - 1) / channel_tile, row = simd::padded<Isa, T>(s.key_dim);
    index_t const tile = channel_tile * row, all = tiles * tile;
    channel_attention_scratch w{};
    for (T** p : {&w.g, &w.key}) *p = a.take<T>(all);
    for (T** p : {&w.total, &w.gap}) *p = a.take<T>(tiles * row);
    for (T** p : {&w.from_start, &w.q_near, &w.q_far}) *p = a.take<T>(tile);
    w.key_far = a.take<T>(backward ? all : tile);
    if (!backward) return w;
    for (T** p : {&w.to_end, &w.d_key_far, &w.d_decay}) *p = a.take<T>(all);
    for (T** p : {&w.d_near, &w.d_far}) *p = a.take<T>(tile);
    w.after = a.take<double>(row);
    return w;
  }
};

/// One head of one sequence. Blocks of queries and tiles of keys lie on one grid that counts from the first token
/// of the past, so that a block's tokens are in one tile.
template <class Which, class How, class Isa, class T>
class channel_attention_head : attention_head<Which, How, Isa, T> {
  using base = attention_head<Which, How, Isa, T>;
  using V = simd::vec<Isa, T>;
  static constexpr index_t tile = channel_tile, lanes = Isa::template lanes<T>;

 public:
  /// `tokens` is the input without its gate, which `decays` has.
  channel_attention_head(attention_shape const& s, attention_input<T> const& tokens,
                         channel_decays<T> const& decays, index_t n, index_t h,
                         attention_scratch<Isa, How, T> const& w, channel_attention_scratch<Isa, T> const& c)
      : base(s, tokens, n, h, w), decays_(decays), c_(c) {}

  void forward(view3<T> o_rhv, attention_saved<How, T> const* saved, attention_record const& record) {
    bool const soft = How::soft(s_.knobs, saved != nullptr);
    auto const start = base::first_row();
    pack();
    for (index_t i0 = 0, count = 0; i0 < p_.rows; i0 += count) {
      count = begin_block(i0, false);
      std::fill_n(w_.acc, count * vp_, T(0));
      std::fill_n(w_.run, count, start);
      for (index_t j0 = low_; j0 < high_; j0 += tile) {
        score_tile(count, i0, j0);
        base::absorb_tile(count, j0, soft, tile);
      }
      base::end_block(i0, count, soft, o_rhv, saved, record);
    }
  }

  /// `sums` [K] takes what a rate or a constant gate gathers over the tokens.
  void backward(view3<T const> o_rhv, view3<T const> d_o_rhv, attention_saved<How, T> const& saved,
                attention_gradient<T> const& d, double* sums, double* d_sink) {
    pack();
    transpose_tiles<Isa>(w_.value, vp_, p_.keys, s_.value_dim, w_.value_t, tile);
    *d_sink = 0.0;
    std::fill_n(w_.d_key, padded_keys() * kp_, T(0));
    std::fill_n(c_.d_key_far, padded_keys() * kp_, T(0));
    std::fill_n(c_.d_decay, padded_keys() * kp_, T(0));
    std::fill_n(w_.d_value, padded_keys() * vp_, T(0));
    for (index_t i0 = 0, count = 0; i0 < p_.rows; i0 += count) {
      count = begin_block(i0, true);
      copy_rows(d_o_rhv.at(p_.first + i0, p_.head), d_o_rhv.stride[0], count, s_.value_dim, w_.dout, vp_);
      for (index_t i = 0; i < count; ++i) w_.upstream[i] = base::upstream_of_row(i, i0, o_rhv, saved);
      base::add_sink_gradient(i0, count, saved, d_sink);
      std::fill_n(w_.d_q, count * kp_, T(0));
      std::fill_n(c_.d_near, count * kp_, T(0));
      for (index_t j0 = low_; j0 < high_; j0 += tile) backward_tile(i0, count, j0, saved);
      finish_queries(i0, count, d);
    }
    finish_keys();
    double none = 0.0;
    std::fill_n(w_.d_g, p_.keys, 0.0);
    write_token_gradients(s_, p_, w_.d_key, kp_, w_.d_value, vp_, w_.d_g, d, &none);
    write_decay_gradients(d, sums);
  }

 private:
  using base::high_;
  using base::kp_;
  using base::low_;
  using base::p_;
  using base::s_;
  using base::vp_;
  using base::w_;

  index_t padded_keys() const noexcept { return (p_.keys + tile - 1) / tile * tile; }
  static V load(T const* p) noexcept { return simd::load<Isa>(p); }
  static void add(T* p, V const& x) noexcept { simd::store<Isa>(p, load(p) + x); }
  static V exp(V const& x) noexcept { return simd::exp<Isa, T>(x); }
  static void multiply(index_t n, T const* x, T const* y, T* to) noexcept {
    simd::map<Isa>(
        n, [](auto const& a, auto const& b) { return a * b; }, to, x, y);
  }

  /// Values, keys and bounded log-decays of the past and of this call behind one another, in whole tiles.
  void pack() {
    base::pack_values();
    for (index_t j = 0; j < p_.keys; ++j) {
      copy_rows(p_.key(j), 0, 1, s_.key_dim, c_.key + j * kp_, kp_);
      T* const g = c_.g + j * kp_;
      for (index_t c = 0; c < s_.key_dim; ++c) g[c] = bounded_log_decay(decays_.raw(p_, j, c));
      std::fill(g + s_.key_dim, g + kp_, T(0));
    }
    std::fill(c_.key + p_.keys * kp_, c_.key + padded_keys() * kp_, T(0));
    std::fill(c_.g + p_.keys * kp_, c_.g + padded_keys() * kp_, T(0));
    done_ = 0;
  }

  /// The queries of a block, seen from the start of their tile; what tiles before it need.
  index_t begin_block(index_t i0, bool backward) {
    index_t const token = p_.past + i0;
    index_t const count = (std::min)(tile - token % tile, p_.rows - i0);
    base::load_block(i0, count, tile);
    start_ = token - token % tile;
    for (; done_ < start_; done_ += tile) finish_tile(done_, backward);
    for (index_t c = 0; c < kp_; c += lanes) {
      V between{};
      for (index_t j0 = start_ - tile; j0 >= low_; j0 -= tile) {
        simd::store<Isa>(c_.gap + j0 / tile * kp_ + c, between);
        between += load(c_.total + j0 / tile * kp_ + c);
      }
      V since{};
      for (index_t j = start_; j < token; ++j) since += load(c_.g + j * kp_ + c);
      for (index_t i = 0; i < count; ++i) {
        since += load(c_.g + (token + i) * kp_ + c);
        simd::store<Isa>(c_.from_start + i * kp_ + c, exp(since));
      }
    }
    multiply(count * kp_, w_.q, c_.from_start, c_.q_near);
    return count;
  }
  /// The keys of a whole tile seen from its end.
  void finish_tile(index_t j0, bool backward) {
    T* const far = c_.key_far + (backward ? j0 * kp_ : 0);
    for (index_t c = 0; c < kp_; c += lanes) {
      V between{};
      for (index_t j = j0 + tile; j-- > j0;) {
        V const factor = exp(between);
        simd::store<Isa>(far + (j - j0) * kp_ + c, load(c_.key + j * kp_ + c) * factor);
        if (backward) simd::store<Isa>(c_.to_end + j * kp_ + c, factor);
        between += load(c_.g + j * kp_ + c);
      }
      simd::store<Isa>(c_.total + j0 / tile * kp_ + c, between);
    }
    transpose<Isa>(far, kp_, tile, s_.key_dim, w_.key_t + j0 * s_.key_dim, tile);
  }

  /// score = scale sum_c q_c k_c e^(decay of c between) / temperature where visible, 0 elsewhere.
  void score_tile(index_t count, index_t i0, index_t j0) {
    if (j0 < start_) {
      for (index_t c = 0; c < kp_; c += lanes) {
        V const factor = exp(load(c_.gap + j0 / tile * kp_ + c));
        for (index_t i = c; i < count * kp_ + c; i += kp_)
          simd::store<Isa>(c_.q_far + i, load(c_.q_near + i) * factor);
      }
      tile_product<Isa>(count, tile, s_.key_dim, tile_operand<T>{c_.q_far, kp_, 1}, w_.key_t + j0 * s_.key_dim,
                        tile, w_.score, tile, false);
    } else {
      for (index_t i = 0; i < count; ++i) score_pairs(i, p_.past + i0 + i);
    }
    for (index_t i = 0; i < count; ++i) base::mask(w_.seen[i], j0, w_.score + i * tile, T(0), tile);
  }
  /// The scores of row i, token t, with the keys of its own tile up to itself.
  void score_pairs(index_t i, index_t t) {
    V sum[std::size_t(tile)] = {};
    for (index_t c = 0; c < kp_; c += lanes) {
      V const q = load(w_.q + i * kp_ + c);
      sum[t - start_] += q * load(c_.key + t * kp_ + c);
      V between = load(c_.g + t * kp_ + c);
      for (index_t j = t; j-- > start_;) {
        sum[j - start_] += q * load(c_.key + j * kp_ + c) * exp(between);
        between += load(c_.g + j * kp_ + c);
      }
    }
    for (index_t j = 0; j < tile; ++j) w_.score[i * tile + j] = simd::sum<Isa, T>(sum[j]);
  }

  void backward_tile(index_t i0, index_t count, index_t j0, attention_saved<How, T> const& saved) {
    score_tile(count, i0, j0);
    tile_product<Isa>(count, tile, s_.value_dim, tile_operand<T>{w_.dout, vp_, 1}, w_.value_t + j0 * s_.value_dim,
                      tile, w_.gv, tile, false);
    for (index_t i = 0; i < count; ++i) {
      T* const d_score = w_.d_score + i * tile;
      How::template pullback<Isa>(base::kept(saved, i0 + i), w_.upstream[i], w_.score + i * tile, w_.gv + i * tile,
                                  d_score, tile, j0, s_.knobs);
      base::mask(w_.seen[i], j0, d_score, T(0), tile);
    }
    if (j0 < start_)
      far_gradient(count, j0);
    else
      for (index_t i = 0; i < count; ++i) pair_gradient(i, p_.past + i0 + i);
    tile_product<Isa>(tile, vp_, count, tile_operand<T>{w_.score, 1, tile}, w_.dout, vp_, w_.d_value + j0 * vp_,
                      vp_, true);
  }
  void far_gradient(index_t count, index_t j0) {
    tile_product<Isa>(count, kp_, tile, tile_operand<T>{w_.d_score, tile, 1}, c_.key_far + j0 * kp_, kp_, c_.d_far,
                      kp_, false);
    for (index_t c = 0; c < kp_; c += lanes) {
      V const factor = exp(load(c_.gap + j0 / tile * kp_ + c));
      for (index_t i = c; i < count * kp_ + c; i += kp_) add(c_.d_near + i, load(c_.d_far + i) * factor);
    }
    tile_product<Isa>(tile, kp_, count, tile_operand<T>{w_.d_score, 1, tile}, c_.q_far, kp_,
                      c_.d_key_far + j0 * kp_, kp_, true);
  }
  void pair_gradient(index_t i, index_t t) {
    T const* const d_score = w_.d_score + i * tile - start_;
    for (index_t c = 0; c < kp_; c += lanes) {
      V const q = load(w_.q + i * kp_ + c);
      V d_q = d_score[t] * load(c_.key + t * kp_ + c);
      add(w_.d_key + t * kp_ + c, d_score[t] * q);
      V between = load(c_.g + t * kp_ + c);
      for (index_t j = t; j-- > start_;) {
        V const d = d_score[j] * exp(between);
        d_q += d * load(c_.key + j * kp_ + c);
        add(w_.d_key + j * kp_ + c, d * q);
        between += load(c_.g + j * kp_ + c);
      }
      add(w_.d_q + i * kp_ + c, d_q);
    }
  }

  /// The derivatives of a block's queries; times the queries they are those of the running decays G_i.
  void finish_queries(index_t i0, index_t count, attention_gradient<T> const& d) {
    T* const d_decay = c_.d_decay + (p_.past + i0) * kp_;
    for (index_t x = 0; x < count * kp_; x += lanes) {
      add(w_.d_q + x, load(c_.d_near + x) * load(c_.from_start + x));
      add(d_decay + x, load(w_.d_q + x) * load(w_.q + x));
    }
    if (d.q_rhk)
      write_rows(w_.d_q, kp_, count, s_.key_dim, base::q_scale(), d.q_rhk.at(p_.first + i0, p_.head),
                 d.q_rhk.stride[0], false);
  }
  /// The same of keys, whose running decays count negatively.
  void finish_keys() {
    for (index_t x = 0; x < done_ * kp_; x += lanes)
      add(w_.d_key + x, load(c_.d_key_far + x) * load(c_.to_end + x));
    for (index_t x = 0; x < padded_keys() * kp_; x += lanes)
      add(c_.d_decay + x, -load(w_.d_key + x) * load(c_.key + x));
  }
  /// From running decays to log-decays, and on to what they are products of. No pair lies across the first token.
  void write_decay_gradients(attention_gradient<T> const& d, double* sums) const {
    index_t const K = s_.key_dim;
    bool const begins = p_.head % (s_.heads / s_.gate_heads) == 0;
    std::fill_n(sums, K, 0.0);
    std::fill_n(c_.after, K, 0.0);
    for (index_t j = p_.keys; j-- > 0;) {
      T d_step(0);
      auto const put = [&](index_t at, T x) {
        T* const to = j >= p_.past ? (d.g_rhk ? &d.g_rhk(p_.first + j - p_.past, p_.gate_head, at) : nullptr)
                                   : (d.past_g_nlhk ? &d.past_g_nlhk(p_.sequence, j, p_.gate_head, at) : nullptr);
        if (to) *to = x + (begins ? T(0) : *to);
      };
      for (index_t c = 0; c < K; ++c) {
        c_.after[c] += double(c_.d_decay[j * kp_ + c]);
        bool const felt = j > 0 && !(decays_.raw(p_, j, c) < log_decay_bound<T>);
        T const dg = felt ? T(c_.after[c]) : T(0);
        d_step += decays_.rate(p_, c) * dg;
        if (decays_.constant())
          sums[c] += double(dg);
        else if (decays_.rated())
          sums[c] += double(decays_.step(p_, j, c)) * double(dg);
        else
          put(c, dg);
      }
      if (decays_.rated() && !decays_.constant()) put(0, d_step);
    }
  }

  channel_decays<T> const& decays_;
  channel_attention_scratch<Isa, T> const& c_;
  index_t start_ = 0;  ///< of the tile that the block of queries stands in
  index_t done_ = 0;   ///< tokens whose tiles are finished
};

/// d_rate, and d_g of a constant gate: the sums of `sums` [N,H,K] in the order of heads and sequences.
template <class T>
void write_channel_sums(attention_shape const& s, channel_decays<T> const& decays, double const* sums,
                        attention_gradient<T> const& d) {
  bool const constant = decays.constant(), rated = decays.rated();
  if (!constant && !rated) return;
  index_t const group = s.heads / s.gate_heads;
  for (index_t hg = 0; hg < s.gate_heads; ++hg) {
    double d_step = 0.0;
    for (index_t c = 0; c < s.key_dim; ++c) {
      double sum = 0.0;
      for (index_t h = hg * group; h < (hg + 1) * group; ++h)
        for (index_t n = 0; n < s.seq.count(); ++n) sum += sums[(n * s.heads + h) * s.key_dim + c];
      if (rated) d_step += double(decays.in.rate_hk(hg, c)) * sum;
      if (rated && d.rate_hk) d.rate_hk(hg, c) = T(constant ? double(decays.in.g_rhk(0, hg, 0)) * sum : sum);
      if (!rated && d.g_rhk) d.g_rhk(0, hg, c) = T(sum);
    }
    if (rated && constant && d.g_rhk) d.g_rhk(0, hg, 0) = T(d_step);
  }
}

/// Sizes and shapes of a call under a gate per key channel.
template <class How, class T>
void validate_channels(attention_shape const& s, which_spec const& which, attention_input<T> const& in) {
  static_assert(How::spec.multiplies_decay,
                "seqmix attention: a decay per key channel is no score bias; take weights that multiply decays");
  if (in.queries_alone)
    throw value_error("seqmix: attention: under a gate per key channel rows bring their own keys");
  validate(s, which);
  validate_input(s, in, true);
  validate_sink(s, How::spec, in.sink_h);
}
template <class T>
attention_input<T> without_gate(attention_input<T> in) noexcept {
  in.g_rhk = {};
  in.past_g_nlhk = {};
  return in;
}

}  // namespace detail

/// attention_forward under a gate per key channel: g [R,Hg,K], or [R,Hg,1] with rates. Work: 2 K + 2 V flops a
/// visible pair, and an exponential a channel for the pairs of one tile of 32. Memory a thread: T K numbers a few
/// times over. Deterministic: the same bits for any number of threads.
template <class Which, class How, class Isa, class Threads, class T>
void channel_attention_forward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                               attention_input<T> const& in, view3<same<T>> o_rhv,
                               attention_saved<How, same<T>> const* saved, attention_record const& record,
                               arena& ws) {
  detail::validate_channels<How>(s, Which::spec, in);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::attention_scratch<Isa, How, T>>(
      ws, thread_count(dev), [&] { return detail::attention_scratch<Isa, How, T>::carve(ws, s, keys, false); });
  auto* const channels = detail::scratch_of_threads<detail::channel_attention_scratch<Isa, T>>(
      ws, thread_count(dev), [&] { return detail::channel_attention_scratch<Isa, T>::carve(ws, s, keys, false); });
  auto const tokens = detail::without_gate(in);
  detail::channel_decays<T> const decays{in};
  parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int thread) {
    detail::channel_attention_head<Which, How, Isa, T> head(s, tokens, decays, unit / s.heads, unit % s.heads,
                                                            scratch[thread], channels[thread]);
    head.forward(o_rhv, saved, record);
  });
}

/// The derivatives of channel_attention_forward. Those of the running decays are q_i d_q_i - k_j d_k_j channel by
/// channel: no pair is met twice.
template <class Which, class How, class Isa, class Threads, class T>
void channel_attention_backward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                                attention_input<T> const& in, view3<same<T> const> o_rhv,
                                attention_saved<How, same<T>> const& saved, view3<same<T> const> d_o_rhv,
                                attention_gradient<same<T>> const& d, arena& ws) {
  detail::validate_channels<How>(s, Which::spec, in);
  expect_shape("attention output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::attention_scratch<Isa, How, T>>(
      ws, thread_count(dev), [&] { return detail::attention_scratch<Isa, How, T>::carve(ws, s, keys, true); });
  auto* const channels = detail::scratch_of_threads<detail::channel_attention_scratch<Isa, T>>(
      ws, thread_count(dev), [&] { return detail::channel_attention_scratch<Isa, T>::carve(ws, s, keys, true); });
  double* const sums = ws.take<double>(s.seq.count() * s.heads * s.key_dim);
  double* const d_sink = ws.take<double>(s.seq.count() * s.heads);
  auto const tokens = detail::without_gate(in);
  detail::channel_decays<T> const decays{in};
  index_t const groups = std::gcd(std::gcd(s.key_heads, s.value_heads), s.gate_heads);
  index_t const group = s.heads / groups;
  parallel_for(dev, s.seq.count() * groups, [&](index_t unit, int thread) {
    index_t const n = unit / groups;
    for (index_t h = unit % groups * group; h < (unit % groups + 1) * group; ++h) {
      index_t const place = n * s.heads + h;
      detail::channel_attention_head<Which, How, Isa, T> head(s, tokens, decays, n, h, scratch[thread],
                                                              channels[thread]);
      head.backward(o_rhv, d_o_rhv, saved, d, sums + place * s.key_dim, d_sink + place);
    }
  });
  if (dev.dry) return;
  detail::write_channel_sums<T>(s, decays, sums, d);
  if (in.sink_h) detail::write_sink<T>(s, d_sink, d.sink_h);
}

}  // namespace seqmix::inline v0::kernels
