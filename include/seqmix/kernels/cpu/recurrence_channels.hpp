#pragma once

#include <seqmix/kernels/cpu/channel_blocks.hpp>

/// The additive recurrence with a decay of its own for every number of the state, vectorised over channels
/// c = (h, v):
///   S[k][c] = e^(g_h rate_hk) S[k][c] + write_h k_k v_c,     o_c = scale sum over k of q_k S[k][c]
/// with every query and key 1 when there are none: h = a h + b per channel. Mamba-1 (Gu, Dao, arXiv 2312.00752,
/// algorithm 2) has H = channels, V = 1, K = states, and queries and keys shared by all heads. Token by token, a
/// chunk of tokens for a few keys and one vector of channels (a strip) after the other; forward keeps one state a
/// chunk, backward computes the others and the factors again inside it and walks it backwards.
/// Work: one exponential and 4 flops a token, key and channel forward, twice that and 14 flops backward.
namespace seqmix::inline v0::kernels::detail {

/// Where a unit's derivatives go: queries and keys perhaps to its own partial sums, whose first head is not 0.
template <class T>
struct channel_gradient : recurrence_gradient<T> {
  index_t unit_begin = 0, first_query = 0, first_key = 0;
};

/// One block of heads, for one sequence after the other.
template <class Isa, class T>
class channel_heads {
  static constexpr index_t w = Isa::template lanes<T>;
  static constexpr T log2_e = T(1.4426950408889634);
  using vec = simd::vec<Isa, T>;

 public:
  channel_heads(recurrence_shape const& s, recurrence_input<T> const& in, channel_blocks<Isa, T> const& cut,
                channel_form<T> const& form, index_t block, channel_scratch<Isa, T> const& m)
      : s_(s), in_(in), cut_(cut), form_(form), m_(m), block_(block), h_(cut.block(s, block).begin),
        end_(cut.block(s, block).end), K_(s.key_dim), V_(s.value_dim), n_channels_((end_ - h_) * V_), L_(cut.row),
        width_(simd::padded<Isa, T>(n_channels_)) {
    load_rates();
  }

  void forward(index_t n, view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    begin_sequence(n);
    load_state(in_.initial_nhkv, m_.S);
    for (index_t at = 0, chunk = s_.chunks_before(n); at < rows_; at += s_.chunk, ++chunk) {
      if (saved) copy_rows(m_.S, L_, K_, cut_.lanes, saved_state(*saved, chunk), cut_.lanes);
      load_chunk(at);
      ask_for_inputs(first_ + at + s_.chunk);
      ask_for(o_rhv, s_.heads, first_ + at);
      std::fill_n(m_.o, count_ * L_, T(0));
      with_source([&](auto source) { walk_chunk<source()>(); });
      for (index_t t = 0; t < count_; ++t) write_channels(m_.o + t * L_, o_rhv, s_.heads, first_ + at_ + t);
    }
    if (final_nhkv) store_state(m_.S, final_nhkv);
  }

  /// Adds to the block's sums of d_rate and of a constant decay's derivative.
  void backward(index_t n, recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                channel_gradient<T> const& d) {
    begin_sequence(n);
    load_state(d_final_nhkv, m_.dS);
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n);
    for (index_t c = chunks; c-- > 0;) {
      copy_rows(saved_state(saved, base + c), cut_.lanes, K_, cut_.lanes, m_.S, L_);
      load_chunk(c * s_.chunk);
      for (index_t t = 0; t < count_; ++t) read_channels(d_o_rhv, s_.heads, first_ + at_ + t, m_.dout + t * L_);
      std::fill_n(m_.dv, count_ * L_, T(0));
      std::fill_n(m_.dg, count_ * L_, T(0));
      with_source(
          [&](auto source) { for_keys([&](index_t k, auto keys) { keys_backward<source(), keys()>(k, d); }); });
      write_chunk(d);
    }
    if (d.initial_nhkv) store_state(m_.dS, d.initial_nhkv);
  }

  void clear_sums() {
    std::fill_n(m_.d_rate_sum, K_ * L_, 0.0);
    std::fill_n(m_.d_constant_sum, K_ * L_, 0.0);
  }
  /// The block's sums, one number per head and key: to [H,rate_keys] and [H,decay_keys].
  void store_sums(double* d_rate, index_t rate_keys, double* d_constant, index_t decay_keys) const {
    for (index_t h = h_; h < end_; ++h) {
      for (index_t k = 0; k < rate_keys; ++k) d_rate[h * rate_keys + k] = head_sum(m_.d_rate_sum + k * L_, h);
      for (index_t k = 0; k < decay_keys; ++k)
        d_constant[h * decay_keys + k] = head_sum(m_.d_constant_sum + k * L_, h);
    }
  }

 private:
  /// Rows `step` apart.
  struct asked {
    T const* data;
    index_t step;
  };
  index_t of(index_t h, index_t heads) const noexcept { return h * heads / s_.heads; }
  bool begins_group(index_t h, index_t heads) const noexcept { return h % (s_.heads / heads) == 0; }
  index_t head_of(index_t channel) const noexcept { return h_ + channel / V_; }
  bool gated() const noexcept { return in_.g_rhk.data != nullptr; }
  template <class X>
  X head_sum(X const* from, index_t h) const noexcept {
    X sum(0);
    for (index_t v = 0; v < V_; ++v) sum += from[(h - h_) * V_ + v];
    return sum;
  }
  T* saved_state(recurrence_saved<T> const& saved, index_t chunk) const noexcept {
    return saved.states + (chunk * cut_.blocks() + block_) * K_ * cut_.lanes;
  }
  void begin_sequence(index_t n) {
    n_ = n;
    first_ = s_.seq.begin(n);
    rows_ = s_.seq.length(n);
  }

  void load_state(view4<T const> from, T* to) const {
    std::fill_n(to, K_ * L_, T(0));
    for (index_t h = h_; from && h < end_; ++h)
      for (index_t k = 0; k < K_; ++k) std::copy_n(from.at(n_, h, k), V_, to + k * L_ + (h - h_) * V_);
  }
  void store_state(T const* from, view4<T> to) const {
    for (index_t h = h_; h < end_; ++h)
      for (index_t k = 0; k < K_; ++k) std::copy_n(from + k * L_ + (h - h_) * V_, V_, to.at(n_, h, k));
  }
  /// [K,lanes]; 1 where g is the log-decay itself.
  void load_rates() {
    for (index_t k = 0; k < K_; ++k)
      for (index_t c = 0; c < L_; ++c) {
        index_t const at = k * L_ + c;
        m_.rate[at] = c < n_channels_ && form_.rated ? in_.rate_hk(of(head_of(c), s_.gate_heads), k) : T(1);
        m_.binary_rate[at] = m_.rate[at] * log2_e;
      }
  }
  /// One row's channels, from whichever heads they belong to; zero behind them.
  void read_channels(view3<T const> x, index_t heads, index_t r, T* to) const {
    if (heads == s_.heads && x.stride[1] == V_)
      std::copy_n(x.at(r, h_), n_channels_, to);
    else
      for (index_t h = h_; h < end_; ++h) std::copy_n(x.at(r, of(h, heads)), V_, to + (h - h_) * V_);
    std::fill(to + n_channels_, to + width_, T(0));
  }
  /// Back again; added when an earlier head began the group.
  void write_channels(T const* from, view3<T> to, index_t heads, index_t r) const {
    if (heads == s_.heads && to.stride[1] == V_) {
      std::copy_n(from, n_channels_, to.at(r, h_));
      return;
    }
    for (index_t h = h_; h < end_; ++h, from += V_)
      write_rows(from, V_, 1, V_, T(1), to.at(r, of(h, heads)), V_, !begins_group(h, heads));
  }
  /// One number per gate head and row for each channel.
  void read_numbers(T const* x, index_t stride, T* to) const {
    if (V_ == 1 && s_.gate_heads == s_.heads && stride == 1)
      std::copy_n(x + h_, n_channels_, to);
    else
      for (index_t h = h_; h < end_; ++h) std::fill_n(to + (h - h_) * V_, V_, x[of(h, s_.gate_heads) * stride]);
    std::fill(to + n_channels_, to + width_, T(0));
  }
  void write_numbers(T const* from, T* to, index_t stride) const {
    if (V_ == 1 && s_.gate_heads == s_.heads && stride == 1) {
      std::copy_n(from, n_channels_, to + h_);
      return;
    }
    for (index_t h = h_; h < end_; ++h) {
      T& x = to[of(h, s_.gate_heads) * stride];
      x = head_sum(from, h) + (begins_group(h, s_.gate_heads) ? T(0) : x);
    }
  }

  /// What all strips of a chunk read: written values, decays per head, shared queries and keys.
  void load_chunk(index_t at) {
    at_ = at;
    count_ = (std::min)(s_.chunk, rows_ - at);
    for (index_t t = 0; t < count_; ++t) {
      index_t const r = first_ + at + t;
      T* const v = m_.v + t * L_;
      read_channels(in_.v_rhv, s_.value_heads, r, v);
      if (in_.write_rh) {
        read_numbers(in_.write_rh.at(r), in_.write_rh.stride[1], m_.write + t * L_);
        simd::map<Isa>(
            width_, [](auto const& x, auto const& scale) { return x * scale; }, m_.written + t * L_, v,
            m_.write + t * L_);
      }
      if (gated() && !form_.per_key) read_numbers(in_.g_rhk.at(r), in_.g_rhk.stride[1], m_.g + t * L_);
      if (form_.keys != key_source::shared) continue;
      simd::map<Isa>(
          K_, [&](auto const& x) { return x * T(s_.scale); }, m_.q + t * K_,
          in_.q_rhk.at(r, of(h_, s_.query_heads)));
      std::copy_n(in_.k_rhk.at(r, of(h_, s_.key_heads)), K_, m_.k + t * K_);
    }
  }
  void load_own_keys(index_t l, index_t first, index_t keys) const {
    read_keys(in_.q_rhk, s_.query_heads, l, first, keys, count_, m_.q);
    read_keys(in_.k_rhk, s_.key_heads, l, first, keys, count_, m_.k);
    simd::map<Isa>(
        count_ * keys * w, [&](auto const& x) { return x * T(s_.scale); }, m_.q, m_.q);
  }
  /// [tokens,keys,w]: for each channel of a strip some keys of its head's.
  void read_keys(view3<T const> x, index_t heads, index_t l, index_t first, index_t keys, index_t tokens,
                 T* to) const {
    index_t const width = (std::min)(w, n_channels_ - l);
    for (index_t r = first_ + at_; tokens-- > 0; ++r, to += keys * w) {
      if (V_ == 1 && heads == s_.heads && x.unit_inner_stride()) {
        transpose<Isa>(x.at(r, h_ + l, first), x.stride[1], width, keys, to, w);
        continue;
      }
      for (index_t k = 0; k < keys; ++k)
        for (index_t c = 0; c < w; ++c)
          to[k * w + c] = c < width ? x(r, of(head_of(l + c), heads), first + k) : T(0);
    }
  }
  /// Back again, times scale; added where an earlier channel of the unit began.
  void write_keys(T const* from, T scale, view3<T> to, index_t heads, index_t first_head, index_t unit_begin,
                  index_t l, index_t first, index_t keys) const {
    for (index_t t = 0; t < count_; ++t, from += keys * w)
      for (index_t c = l; c < (std::min)(l + w, n_channels_); ++c) {
        index_t const h = head_of(c);
        bool const begins = c % V_ == 0 && (h == unit_begin || begins_group(h, heads));
        for (index_t k = 0; k < keys; ++k) {
          T& x = to(first_ + at_ + t, of(h, heads) - first_head, first + k);
          x = scale * from[k * w + c - l] + (begins ? T(0) : x);
        }
      }
  }
  /// The sums over a block's channels of [tokens,keys,w], times scale.
  template <int N>
  void write_shared_keys(T const* from, T scale, view3<T> to, index_t heads, index_t first_head, index_t unit_begin,
                         index_t first) const {
    bool const begins = h_ == unit_begin || begins_group(h_, heads);
    for (index_t t = 0; t < count_; ++t, from += N * w) {
      T* const row = to.at(first_ + at_ + t, of(h_, heads) - first_head, first);
      for (int i = 0; i < N; ++i)
        row[i] = scale * simd::sum<Isa, T>(simd::load<Isa>(from + i * w)) + (begins ? T(0) : row[i]);
    }
  }

  /// The factors e^(g rate) of a chunk for a strip and some keys, and how far they lie apart: a constant decay has
  /// one token, a decay per head one key.
  struct factors {
    T const* data;
    index_t token, key;
  };
  /// The bound on log-decays needs no comparison: the factor is 0 there already, and so is the derivative.
  factors load_factors(index_t l, index_t first, index_t keys) const {
    T* const to = m_.factor;
    if (!gated()) {
      simd::store<Isa>(to, vec{} + T(1));
      return {to, 0, 0};
    }
    index_t const different = form_.constant ? 1 : count_;
    if (form_.per_key) {
      read_keys(in_.g_rhk, s_.gate_heads, l, first, keys, different, to);
      simd::map<Isa>(
          different * keys * w, [](auto const& x) { return decay_factor<Isa, T>(x * log2_e); }, to, to);
      return {to, form_.constant ? 0 : keys * w, w};
    }
    if (!form_.rated) keys = 1;
    for (index_t t = 0; t < different; ++t)
      for (index_t k = 0; k < keys; ++k)
        simd::store<Isa>(to + (t * keys + k) * w,
                         decay_factor<Isa, T>(simd::load<Isa>(m_.g + t * L_ + l) *
                                              simd::load<Isa>(m_.binary_rate + (first + k) * L_ + l)));
    return {to, form_.constant ? 0 : keys * w, form_.rated ? w : 0};
  }

  /// f(first key, how many as a constant) for all keys.
  template <int Together = keys_together<Isa>, class F>
  void for_keys(F const& f) const {
    index_t k = 0;
    for (; k + Together <= K_; k += Together) f(k, std::integral_constant<int, Together>{});
    for (; k < K_; ++k) f(k, std::integral_constant<int, 1>{});
  }
  /// f(where queries and keys come from) as a constant.
  template <class F>
  void with_source(F const& f) const {
    if (form_.keys == key_source::none)
      f(std::integral_constant<key_source, key_source::none>{});
    else if (form_.keys == key_source::shared)
      f(std::integral_constant<key_source, key_source::shared>{});
    else
      f(std::integral_constant<key_source, key_source::own>{});
  }
  /// x times the number, or the vector of numbers, of token t and key first + i; times `otherwise` where there are
  /// none.
  template <key_source Source, int N>
  SEQMIX_INLINE static vec times(vec const& x, T const* keys, index_t K, index_t t, index_t first, int i,
                                 T otherwise) noexcept {
    if constexpr (Source == key_source::none)
      return x * otherwise;
    else if constexpr (Source == key_source::shared)
      return x * keys[t * K + first + i];
    else
      return x * simd::load<Isa>(keys + (t * N + i) * w);
  }

  /// A chunk's tokens for one strip and N keys: outputs and the state behind them, or with Keep the state after
  /// each of them.
  template <bool Keep, key_source Source, int N>
  void walk(factors const& a, index_t l, index_t first) const {
    auto const m = m_;
    index_t const K = K_, L = L_, count = count_;
    T const scale = T(s_.scale);
    T const* const written = in_.write_rh ? m.written : m.v;
    vec S[std::size_t(N)];
    for (int i = 0; i < N; ++i) S[i] = simd::load<Isa>(m.S + (first + i) * L + l);
    for (index_t t = 0; t < count; ++t) {
      auto const v = simd::load<Isa>(written + t * L + l);
      vec o{};
      if constexpr (!Keep) o = simd::load<Isa>(m.o + t * L + l);
      for (int i = 0; i < N; ++i) {
        if constexpr (Keep) simd::store<Isa>(m.history + (t * N + i) * w, S[i]);
        S[i] = simd::load<Isa>(a.data + t * a.token + i * a.key) * S[i] +
               times<Source, N>(v, m.k, K, t, first, i, T(1));
        if constexpr (!Keep) o += times<Source, N>(S[i], m.q, K, t, first, i, scale);
      }
      if constexpr (!Keep) simd::store<Isa>(m.o + t * L + l, o);
    }
    for (int i = 0; i < N; ++i)
      simd::store<Isa>(Keep ? m.history + (count * N + i) * w : m.S + (first + i) * L + l, S[i]);
  }

  /// Rows that the next chunk reads, and those that this one writes: lines of them are asked for while a strip's
  /// tokens pass, since rows lie pages apart, where no processor looks ahead by itself.
  template <class X>
  void ask_for(view3<X> x, index_t heads, index_t r) {
    if (x.data && heads == s_.heads && x.stride[1] == V_) asked_[n_asked_++] = {x.at(r, h_), x.stride[0]};
  }
  template <class X>
  void ask_for(view2<X> x, index_t r) {
    if (x.data && V_ == 1 && s_.gate_heads == s_.heads && x.stride[1] == 1) asked_[n_asked_++] = {x.at(r) + h_, x.stride[0]};
  }
  SEQMIX_INLINE static void ask(asked const* rows, int n, index_t t, index_t l) noexcept {
    for (int i = 0; i < n; ++i) simd::prefetch<2>(rows[i].data + t * rows[i].step, l);
  }

  void ask_for_inputs(index_t r) {
    n_asked_ = 0;
    ask_for(in_.v_rhv, s_.value_heads, r);
    if (in_.write_rh) ask_for(in_.write_rh, r);
    if (gated() && !form_.per_key && !form_.constant) ask_for(view2<T const>(in_.g_rhk.data, {in_.g_rhk.extent[0], in_.g_rhk.extent[1]}, {in_.g_rhk.stride[0], in_.g_rhk.stride[1]}), r);
  }
  /// Forward over a chunk, a strip of channels and some keys after the other.
  template <key_source Source>
  void walk_chunk() const {
    if constexpr (Source == key_source::shared)
      if (form_.rated && !form_.constant)
        return for_keys<2 * keys_together<Isa>>([&](index_t k, auto keys) {
          for (index_t l = 0; l < width_; l += w) walk_rated<keys()>(l, k);
        });
    for_keys([&](index_t k, auto keys) {
      for (index_t l = 0; l < width_; l += w) {
        if constexpr (Source == key_source::own) load_own_keys(l, k, keys());
        walk<false, Source, keys()>(load_factors(l, k, keys()), l, k);
      }
    });
  }
  /// walk<false> with shared keys, whose factors are not stored: the processor computes exponentials while it waits
  /// for states.
  template <int N>
  void walk_rated(index_t l, index_t first) const {
    index_t const K = K_, L = L_, count = count_;
    T const *g = m_.g + l, *v = (in_.write_rh ? m_.written : m_.v) + l, *q = m_.q + first, *k = m_.k + first;
    T* o = m_.o + l;
    vec S[std::size_t(N)], rate[std::size_t(N)];
    for (int i = 0; i < N; ++i) {
      S[i] = simd::load<Isa>(m_.S + (first + i) * L + l);
      rate[i] = simd::load<Isa>(m_.binary_rate + (first + i) * L + l);
    }
    asked const* const soon = asked_;
    int const n_soon = first == 0 ? n_asked_ : 0;
    for (index_t t = 0; t < count; ++t, g += L, v += L, o += L, q += K, k += K) {
      ask(soon, n_soon, t, l);
      auto const step = simd::load<Isa>(g), value = simd::load<Isa>(v);
      auto out = simd::load<Isa>(o);
      SEQMIX_UNROLL(8)
      for (int i = 0; i < N; ++i) {
        S[i] = decay_factor<Isa, T>(step * rate[i]) * S[i] + value * k[i];
        out += S[i] * q[i];
      }
      simd::store<Isa>(o, out);
    }
    for (int i = 0; i < N; ++i) simd::store<Isa>(m_.S + (first + i) * L + l, S[i]);
  }

  template <key_source Source, int N>
  void keys_backward(index_t first, channel_gradient<T> const& d) {
    if constexpr (Source == key_source::shared) {
      std::fill_n(m_.dq, count_ * N * w, T(0));
      std::fill_n(m_.dk, count_ * N * w, T(0));
    }
    for (index_t l = 0; l < width_; l += w) {
      if constexpr (Source == key_source::own) load_own_keys(l, first, N);
      auto const a = load_factors(l, first, N);
      walk<true, Source, N>(a, l, first);
      form_.per_key ? walk_back<true, Source, N>(a, l, first) : walk_back<false, Source, N>(a, l, first);
      if constexpr (Source == key_source::own) {
        write_keys(m_.dq, T(s_.scale), d.q_rhk, s_.query_heads, d.first_query, d.unit_begin, l, first, N);
        write_keys(m_.dk, T(1), d.k_rhk, s_.key_heads, d.first_key, d.unit_begin, l, first, N);
      }
      if (form_.per_key && d.g_rhk) write_key_decays(l, first, N, d);
    }
    if constexpr (Source == key_source::shared) {
      write_shared_keys<N>(m_.dq, T(s_.scale), d.q_rhk, s_.query_heads, d.first_query, d.unit_begin, first);
      write_shared_keys<N>(m_.dk, T(1), d.k_rhk, s_.key_heads, d.first_key, d.unit_begin, first);
    }
  }
  /// The same tokens from the last one on. d_q and d_k are left per channel: those of shared ones are added up over
  /// strips here and over lanes later.
  template <bool PerKey, key_source Source, int N>
  void walk_back(factors const& a, index_t l, index_t first) const {
    auto const m = m_;
    index_t const K = K_, L = L_;
    T const scale = T(s_.scale);
    T const* const written = in_.write_rh ? m.written : m.v;
    vec dS[std::size_t(N)], rate[std::size_t(N)], d_rate[std::size_t(N)];
    for (int i = 0; i < N; ++i) {
      dS[i] = simd::load<Isa>(m.dS + (first + i) * L + l);
      rate[i] = simd::load<Isa>(m.rate + (first + i) * L + l);
      d_rate[i] = vec{};
    }
    for (index_t t = count_; t-- > 0;) {
      index_t const row = t * L + l, tile = t * N * w;
      auto const dout = simd::load<Isa>(m.dout + row), v = simd::load<Isa>(written + row),
                 g = simd::load<Isa>(m.g + row);
      auto dv = simd::load<Isa>(m.dv + row), dg = simd::load<Isa>(m.dg + row);
      for (int i = 0; i < N; ++i) {
        dS[i] += times<Source, N>(dout, m.q, K, t, first, i, scale);
        dv += times<Source, N>(dS[i], m.k, K, t, first, i, T(1));
        if constexpr (Source != key_source::none) {
          keep<Source>(m.dq + tile + i * w, dout * simd::load<Isa>(m.history + tile + (N + i) * w));
          keep<Source>(m.dk + tile + i * w, dS[i] * v);
        }
        dS[i] *= simd::load<Isa>(a.data + t * a.token + i * a.key);
        auto const d_exponent = dS[i] * simd::load<Isa>(m.history + tile + i * w);
        if constexpr (PerKey) {
          simd::store<Isa>(m.dg_keys + tile + i * w, d_exponent);
        } else {
          dg += d_exponent * rate[i];
          d_rate[i] += d_exponent * g;
        }
      }
      simd::store<Isa>(m.dv + row, dv);
      simd::store<Isa>(m.dg + row, dg);
    }
    for (int i = 0; i < N; ++i) {
      simd::store<Isa>(m.dS + (first + i) * L + l, dS[i]);
      simd::store<Isa>(m.d_rate + (first + i) * L + l, d_rate[i]);
    }
  }
  template <key_source Source>
  SEQMIX_INLINE static void keep(T* to, vec const& x) noexcept {
    simd::store<Isa>(to, Source == key_source::shared ? simd::load<Isa>(to) + x : x);
  }

  void write_key_decays(index_t l, index_t first, index_t keys, channel_gradient<T> const& d) {
    if (!form_.constant)
      return write_keys(m_.dg_keys, T(1), d.g_rhk, s_.gate_heads, 0, d.unit_begin, l, first, keys);
    for (index_t t = 0; t < count_; ++t)
      for (index_t k = 0; k < keys; ++k)
        for (index_t c = 0; c < w; ++c)
          m_.d_constant_sum[(first + k) * L_ + l + c] += double(m_.dg_keys[(t * keys + k) * w + c]);
  }
  void write_chunk(channel_gradient<T> const& d) {
    for (index_t t = 0; t < count_; ++t) {
      index_t const r = first_ + at_ + t;
      T *const dv = m_.dv + t * L_, *const dg = m_.dg + t * L_;
      if (d.write_rh) {
        simd::map<Isa>(
            width_, [](auto const& x, auto const& y) { return x * y; }, m_.o, m_.v + t * L_, dv);
        write_numbers(m_.o, d.write_rh.at(r), d.write_rh.stride[1]);
      }
      if (in_.write_rh)
        simd::map<Isa>(
            width_, [](auto const& x, auto const& scale) { return x * scale; }, dv, dv, m_.write + t * L_);
      write_channels(dv, d.v_rhv, s_.value_heads, r);
      if (!gated() || form_.per_key || !d.g_rhk) continue;
      if (!form_.constant) write_numbers(dg, d.g_rhk.at(r), d.g_rhk.stride[1]);
      for (index_t c = 0; form_.constant && c < width_; ++c) m_.d_constant_sum[c] += double(dg[c]);
    }
    for (index_t k = 0; form_.rated && k < K_; ++k)
      for (index_t i = k * L_; i < k * L_ + width_; ++i) m_.d_rate_sum[i] += double(m_.d_rate[i]);
  }

  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  channel_blocks<Isa, T> const& cut_;
  channel_form<T> const& form_;
  channel_scratch<Isa, T> const& m_;
  index_t block_, h_, end_, K_, V_, n_channels_, L_, width_;
  index_t n_ = 0, first_ = 0, rows_ = 0, at_ = 0, count_ = 0;
  asked asked_[8] = {};
  int n_asked_ = 0;
};

/// Derivatives of queries or keys that several units share: a partial sum [R,touched,K] per unit, where `touched`
/// is how many of the sharing heads one unit reads. Not needed (no memory) where no head is read by two units.
template <class Isa, class T>
class channel_key_sums {
 public:
  channel_key_sums(recurrence_shape const& s, channel_blocks<Isa, T> const& cut, channel_form<T> const& form,
                   index_t heads, view3<T> to, arena& ws)
      : s_(s), cut_(cut), to_(to), heads_(heads) {
    if (form.keys == key_source::none || cut.units == 1 || heads == s.heads) return;
    for (index_t u = 0; u < cut.units; ++u) touched_ = (std::max)(touched_, last(u) - first(u) + 1);
    partial_ = ws.take<T>(cut.units * s.seq.rows() * touched_ * s.key_dim);
  }
  index_t first(index_t unit) const noexcept {
    return touched_ > 0 ? cut_.unit_begin(unit) * heads_ / s_.heads : 0;
  }
  view3<T> of_unit(index_t unit) const noexcept {
    if (touched_ == 0) return to_;
    index_t const R = s_.seq.rows();
    return {partial_ + unit * R * touched_ * s_.key_dim, {R, touched_, s_.key_dim}};
  }
  /// The partial sums added in the order of the units.
  template <class Device>
  void add_up(Device dev) const {
    constexpr index_t rows = 64;
    index_t const R = s_.seq.rows(), group = s_.heads / heads_;
    if (touched_ == 0) return;
    parallel_for(dev, (R + rows - 1) / rows, [&](index_t block, int) {
      for (index_t h = 0; h < heads_; ++h)
        for (index_t r = block * rows; r < (std::min)(R, (block + 1) * rows); ++r) {
          index_t const begin = h * group / cut_.unit_heads, end = ((h + 1) * group - 1) / cut_.unit_heads;
          T* const to = to_.at(r, h);
          for (index_t u = begin; u <= end; ++u) {
            T const* const part = of_unit(u).at(r, h - first(u));
            for (index_t k = 0; k < s_.key_dim; ++k) to[k] = part[k] + (u == begin ? T(0) : to[k]);
          }
        }
    });
  }

 private:
  index_t last(index_t unit) const noexcept { return (cut_.unit_end(s_, unit) - 1) * heads_ / s_.heads; }
  recurrence_shape const& s_;
  channel_blocks<Isa, T> const& cut_;
  view3<T> to_;
  index_t heads_, touched_ = 0;
  T* partial_ = nullptr;
};

template <class Isa, class T>
channel_scratch<Isa, T>* channel_scratch_per_thread(arena& ws, int threads, recurrence_shape const& s,
                                                    channel_form<T> const& form, bool backward) {
  auto* const all = ws.take<channel_scratch<Isa, T>>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = channel_scratch<Isa, T>::carve(ws, s, form, backward);
    if (all) all[t] = one;
  }
  return all;
}

/// recurrence_forward for channels; all views are checked.
template <class Isa, class Threads, class T>
void channels_forward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s, recurrence_input<T> const& in,
                      view3<same<T>> o_rhv, recurrence_saved<same<T>> const* saved, view4<same<T>> final_nhkv,
                      arena& ws) {
  arena_scope const scope(ws);
  channel_blocks<Isa, T> const cut(s);
  channel_form<T> const form(cut, s, in);
  auto* const scratch = channel_scratch_per_thread<Isa>(ws, thread_count(dev), s, form, false);
  parallel_for(dev, cut.groups * cut.blocks(), [&](index_t i, int thread) {
    index_t const group = i / cut.blocks(), block = i % cut.blocks();
    channel_heads<Isa, T> heads(s, in, cut, form, block, scratch[thread]);
    for (index_t n = cut.group_begin(s, group); n < cut.group_begin(s, group + 1); ++n)
      heads.forward(n, o_rhv, saved, final_nhkv);
  });
}

/// to[head of h] = the sum over groups of sequences and heads h of from[groups,H,keys], in their order.
template <class T, class To>
void add_up_groups(recurrence_shape const& s, index_t groups, index_t keys, double const* from, To const& to) {
  index_t const sharing = s.heads / s.gate_heads;
  for (index_t h = 0; h < s.gate_heads; ++h)
    for (index_t k = 0; k < keys; ++k) {
      double sum = 0.0;
      for (index_t g = 0; g < groups; ++g)
        for (index_t i = h * sharing; i < (h + 1) * sharing; ++i) sum += from[(g * s.heads + i) * keys + k];
      to(h, k) = T(sum);
    }
}

/// recurrence_backward for channels; all views are checked.
template <class Isa, class Threads, class T>
void channels_backward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                       recurrence_input<T> const& in, recurrence_saved<same<T>> const& saved,
                       view3<same<T> const> d_o_rhv, view4<same<T> const> d_final_nhkv,
                       recurrence_gradient<same<T>> const& d, arena& ws) {
  arena_scope const scope(ws);
  channel_blocks<Isa, T> const cut(s);
  channel_form<T> const form(cut, s, in);
  auto* const scratch = channel_scratch_per_thread<Isa>(ws, thread_count(dev), s, form, true);
  channel_key_sums<Isa, T> const query_sums(s, cut, form, s.query_heads, d.q_rhk, ws),
      key_sums(s, cut, form, s.key_heads, d.k_rhk, ws);
  index_t const rate_keys = form.rated ? s.key_dim : 0, decay_keys = form.constant ? in.g_rhk.extent[2] : 0;
  double* const d_rate = ws.take<double>(cut.groups * s.heads * rate_keys);
  double* const d_constant = ws.take<double>(cut.groups * s.heads * decay_keys);
  parallel_for(dev, cut.groups * cut.units, [&](index_t i, int thread) {
    index_t const group = i / cut.units, unit = i % cut.units;
    channel_gradient<T> part{d, cut.unit_begin(unit), query_sums.first(unit), key_sums.first(unit)};
    part.q_rhk = query_sums.of_unit(unit);
    part.k_rhk = key_sums.of_unit(unit);
    for (index_t b = unit * cut.blocks_of_unit; b < (unit + 1) * cut.blocks_of_unit; ++b) {
      channel_heads<Isa, T> heads(s, in, cut, form, b, scratch[thread]);
      heads.clear_sums();
      for (index_t n = cut.group_begin(s, group); n < cut.group_begin(s, group + 1); ++n)
        heads.backward(n, saved, d_o_rhv, d_final_nhkv, part);
      heads.store_sums(d_rate + group * s.heads * rate_keys, rate_keys, d_constant + group * s.heads * decay_keys,
                       decay_keys);
    }
  });
  query_sums.add_up(dev);
  key_sums.add_up(dev);
  if (dev.dry) return;
  if (form.rated && d.rate_hk) add_up_groups<T>(s, cut.groups, rate_keys, d_rate, d.rate_hk);
  if (form.constant && d.g_rhk)
    add_up_groups<T>(s, cut.groups, decay_keys, d_constant,
                     [&](index_t h, index_t k) -> T& { return d.g_rhk(0, h, k); });
}

}  // namespace seqmix::inline v0::kernels::detail
