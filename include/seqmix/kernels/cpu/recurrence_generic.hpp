#pragma once

#include <type_traits>

#include <seqmix/kernels/cpu/recurrence_strips.hpp>
#include <seqmix/kernels/cpu/recurrence_tokens.hpp>

/// The generic step S = Diag(e^g) S + b u' + w v', u = S' a, for any state and any decays, in walks over the tokens
/// of a chunk (recurrence_strips.hpp). Forward is one walk; backward, with the state before every chunk kept, is
/// three:
///   dS with value lanes, backwards in time:  dS_t = e^(g_t+1) dS_t+1 + a_t+1 du_t+1' + q_t do_t',
///                                            dv_t = dS_t' w_t,  du_t = dS_t' b_t
///   S with key lanes, forwards:              dq_t = S_t do_t,  da_t = S_t-1 du_t
///   dS with key lanes, backwards:            dw_t = dS_t v_t,  db_t = dS_t u_t,  and for the factor e^(g_t) of
///   each
///                                            key channel the sum over values of S_t-1 dS_t
/// so that no derivative is a difference of others. A state read before it is written has q_t do_t' one token
/// later. What a low-rank state has erased is kept, so that backward need not find it again. Source: the derivative
/// of the step; three walks of an additive one are also FLA's backward of GLA (arXiv 2312.06635, appendix C), which
/// takes the decays' derivative from the differences q dq - k dk.
namespace seqmix::inline v0::kernels::detail {

/// One thread's memory for the chunks of `heads` heads, each with a state of its own. Rows of tokens have one more
/// behind the chunk, of a token that changes nothing.
template <class State, class Isa, class T>
struct generic_scratch {
  T *q, *a, *b, *w, *factor;            ///< [C+1,kp]
  T *z, *u, *o, *S;                     ///< what w and b write [C+1,vp], outputs [C,vp], [K,vp]
  T *d_q, *d_a, *d_b, *d_w, *d_factor;  ///< [C,kp]
  T *d_z, *d_u, *d_o;                   ///< [C+1,vp]
  T *dS, *S_t, *dS_t;                   ///< [K,vp], [V,kp] twice
  T *past, *d_key;                      ///< [C,strip], [kp]

  static constexpr index_t strip = strip_rows<Isa> * strip_vectors * Isa::template lanes<T>;

  static generic_scratch carve(arena& arena, recurrence_shape const& s, index_t heads, bool backward) {
    constexpr bool low_rank = State::spec.low_rank, own_b = low_rank && !State::spec.shares_write;
    index_t const C = s.chunk + 1, kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    generic_scratch m{};
    for (T** p : {&m.q, &m.w, &m.factor}) *p = arena.take<T>(C * kp);
    m.a = arena.take<T>(low_rank ? C * kp : 0);
    m.b = own_b ? arena.take<T>(C * kp) : m.w;
    for (T** p : {&m.z, &m.o}) *p = arena.take<T>(C * vp);
    m.u = arena.take<T>(low_rank ? C * vp : 0);
    m.S = arena.take<T>(heads * s.key_dim * vp);
    if (!backward) return m;
    for (T** p : {&m.d_q, &m.d_a, &m.d_w, &m.d_factor}) *p = arena.take<T>(C * kp);
    m.d_b = own_b ? arena.take<T>(C * kp) : m.d_w;
    for (T** p : {&m.d_z, &m.d_o}) *p = arena.take<T>(C * vp);
    m.d_u = own_b ? arena.take<T>(C * vp) : m.d_z;
    m.dS = arena.take<T>(heads * s.key_dim * vp);
    m.S_t = arena.take<T>(s.value_dim * kp);
    m.dS_t = arena.take<T>(heads * s.value_dim * kp);
    m.past = arena.take<T>(s.chunk * strip);
    m.d_key = arena.take<T>(kp);
    return m;
  }
};

/// One chunk of one head at a time, of one sequence.
template <class State, class Isa, class T>
class generic_head : head_tokens<State, Isa, T> {
  using base = head_tokens<State, Isa, T>;
  using base::in_, base::s_, base::n_, base::h_, base::K_, base::V_, base::vp_, base::first_, base::rows_;
  using base::spec;

 public:
  generic_head(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h,
               generic_scratch<State, Isa, T> const& m, index_t place)
      : base(s, in, n, h), m_(m), kp_(simd::padded<Isa, T>(s.key_dim)), S_(m.S + place * K_ * vp_),
        dS_(m.dS + place * K_ * vp_), dS_t_(m.dS_t + place * V_ * kp_) {}

  void begin_forward() const { this->load_state(in_.initial_nhkv, S_); }
  void forward(index_t c, view3<T> o_rhv, recurrence_saved<T> const* saved) {
    index_t const begin = c * s_.chunk, end = (std::min)(rows_, begin + s_.chunk);
    if (saved) std::copy_n(S_, K_ * vp_, this->saved_state(*saved, s_.chunks_before(n_) + c));
    for (index_t at = begin; at < end; at += block) {
      load_tokens(at, (std::min)(block, end - at));
      if constexpr (low_rank)
        erasing_forward();
      else
        additive_forward();
      write_rows(m_.o, vp_, count_, V_, T(1), o_rhv.at(first_ + at_, h_), o_rhv.stride[0], false);
      if constexpr (low_rank)
        if (saved) copy_written(*saved, [](T const* from, T* to, index_t width) { std::copy_n(from, width, to); });
    }
  }
  void end_forward(view4<T> final_nhkv) const { this->store_state(S_, final_nhkv); }

  void begin_backward(view4<T const> d_final_nhkv) const {
    this->load_state(d_final_nhkv, dS_);
    transpose<Isa>(dS_, vp_, K_, V_, dS_t_, kp_);
  }
  void backward(index_t c, recurrence_saved<T> const& saved, view3<T const> d_o_rhv,
                recurrence_gradient<T> const& d, decay_sums const& sums) {
    load_tokens(c * s_.chunk, (std::min)(s_.chunk, rows_ - c * s_.chunk));
    if constexpr (low_rank)
      copy_written(saved, [](T* to, T const* from, index_t width) { std::copy_n(from, width, to); });
    copy_rows(d_o_rhv.at(first_ + at_, h_), d_o_rhv.stride[0], count_, V_, m_.d_o, vp_);
    std::fill_n(m_.d_o + count_ * vp_, vp_, T(0));
    through_values();
    through_keys(this->saved_state(saved, s_.chunks_before(n_) + c));
    write_chunk(d, sums);
  }
  void end_backward(view4<T> d_initial_nhkv) const { this->store_state(dS_, d_initial_nhkv); }

 private:
  static constexpr bool low_rank = spec.low_rank, own_b = low_rank && !spec.shares_write,
                        exclusive = spec.read == read_order::exclusive;
  static constexpr index_t block = 16;  ///< tokens of a forward walk: their rows stay in the first cache

  /// Some tokens from `at` on.
  void load_tokens(index_t at, index_t count) {
    at_ = at;
    count_ = count;
    for (index_t i = 0; i < count_; ++i) load_token(i);
    index_t const behind = count_ * kp_;
    std::fill_n(m_.factor + behind, kp_, T(1));
    std::fill_n(m_.q + behind, kp_, T(0));
    if constexpr (low_rank) std::fill_n(m_.a + behind, kp_, T(0));
  }
  void load_token(index_t i) {
    T *const q = m_.q + i * kp_, *const a = low_rank ? m_.a + i * kp_ : nullptr, *const b = m_.b + i * kp_,
             *const w = m_.w + i * kp_, *const factor = m_.factor + i * kp_;
    load_row(this->query(at_ + i), K_, T(s_.scale), q);
    this->load_factors(at_ + i, factor);
    State::template coefficients<T>(this->token(at_ + i, factor), state_update<T>{a, b, w});
    for (T* x : {w, b, factor})
      for (index_t k = K_; k < kp_; ++k) x[k] = T(0);
    for (index_t k = K_; low_rank && k < kp_; ++k) a[k] = T(0);
    load_row(this->value(at_ + i), V_, this->value_scale(at_ + i), m_.z + i * vp_);
  }
  /// Numbers times a factor, zero behind them to whole vectors.
  static void load_row(T const* from, index_t count, T factor, T* to) {
    simd::for_vectors<Isa, T>(
        count, [&](index_t c, auto const& lanes) { simd::store<Isa>(to + c, lanes.load(from + c) * factor); });
  }
  /// What these tokens have erased, beside or within what they write.
  template <class Copy>
  void copy_written(recurrence_saved<T> const& saved, Copy const& copy) const {
    T* const written = spec.shares_write ? m_.z : m_.u;
    for (index_t i = 0; i < count_; ++i)
      copy(written + i * vp_, saved.written + ((first_ + at_ + i) * s_.heads + h_) * vp_, vp_);
  }

  void additive_forward() const {
    std::fill_n(m_.o, count_ * vp_, T(0));
    strip_walk<T, decay_axis::rows, 1, exclusive, !exclusive> const walk{
        {m_.factor, kp_}, {{{m_.w, kp_}, {m_.z, vp_}}}, {{{m_.q, kp_}, m_.o, vp_}}};
    walk_strips<Isa>(count_, walk, K_, vp_, S_, vp_);
  }
  /// Every pass over the state also finds what the next token will erase.
  void erasing_forward() const {
    strip_walk<T, decay_axis::rows, own_b ? 2 : 1, exclusive, exclusive ? 1 : 2> walk{
        {m_.factor, kp_},
        {{{m_.w, kp_}, {m_.z, vp_}}},
        {{{m_.q, kp_}, m_.o, vp_}, {{m_.a + kp_, kp_}, m_.u + vp_, vp_}}};
    if constexpr (own_b) walk.write[1] = {{m_.b, kp_}, {m_.u, vp_}};
    for_columns<Isa, T>(vp_, [&]<int Vectors>(index_t lane, std::integral_constant<int, Vectors>) {
      find_erased<Vectors>(lane, S_);
      for (index_t t = 0; t < count_; ++t) {
        if constexpr (!own_b) join_erased<Vectors>(lane, t);
        pass_columns<Isa, Vectors>(walk, t, K_, lane, S_, vp_);
      }
    });
  }
  /// What the first token erases.
  template <int Vectors>
  void find_erased(index_t lane, T const* S) const {
    constexpr index_t w = Isa::template lanes<T>;
    simd::vec<Isa, T> sum[std::size_t(Vectors)] = {};
    for (index_t k = 0; k < K_; ++k)
      for (int c = 0; c < Vectors; ++c) sum[c] += simd::load<Isa>(S + k * vp_ + lane + c * w) * m_.a[k];
    for (int c = 0; c < Vectors; ++c) simd::store<Isa>(m_.u + lane + c * w, sum[c]);
  }
  /// One set of rows writes both the value and what was erased.
  template <int Vectors>
  void join_erased(index_t lane, index_t t) const {
    constexpr index_t w = Isa::template lanes<T>;
    T* const z = m_.z + t * vp_ + lane;
    T const* const u = m_.u + t * vp_ + lane;
    for (int c = 0; c < Vectors; ++c)
      simd::store<Isa>(z + c * w, simd::load<Isa>(z + c * w) + simd::load<Isa>(u + c * w));
  }

  /// The rows of a walk backwards in time: of the token itself, or of the one behind it.
  static token_rows<T> backwards(T const* rows, index_t row, index_t first) noexcept {
    return {rows + first * row, -row};
  }
  /// dS with value lanes.
  void through_values() const {
    index_t const n = count_, read = exclusive ? n : n - 1;
    if constexpr (low_rank) std::fill_n(m_.d_u + n * vp_, vp_, T(0));
    strip_walk<T, decay_axis::rows, 1 + low_rank, 0, 1 + own_b> walk{
        backwards(m_.factor, kp_, n),
        {{backwards(m_.q, kp_, read), backwards(m_.d_o, vp_, read)}},
        {{backwards(m_.w, kp_, n - 1), m_.d_z + (n - 1) * vp_, -vp_}}};
    if constexpr (own_b) walk.read[1] = {backwards(m_.b, kp_, n - 1), m_.d_u + (n - 1) * vp_, -vp_};
    if constexpr (low_rank) {
      walk.write[1] = {backwards(m_.a, kp_, n), backwards(m_.d_u, vp_, n)};
      for_columns<Isa, T>(vp_, [&]<int Vectors>(index_t lane, std::integral_constant<int, Vectors>) {
        for (index_t t = 0; t < n; ++t) pass_columns<Isa, Vectors>(walk, t, K_, lane, dS_, vp_);
      });
    } else {
      std::fill_n(m_.d_z, n * vp_, T(0));
      walk_strips<Isa>(n, walk, K_, vp_, dS_, vp_);
    }
    walk_strips<Isa>(1, derivative_behind<decay_axis::rows>(), K_, vp_, dS_, vp_);
  }
  /// S forwards and dS backwards with key lanes, strip by strip: S stays near until dS meets it.
  void through_keys(T const* before) const {
    index_t const n = count_;
    transpose<Isa>(before, vp_, K_, V_, m_.S_t, kp_);
    std::fill_n(m_.d_q, n * kp_, T(0));
    std::fill_n(m_.d_w, n * kp_, T(0));
    std::fill_n(m_.d_factor, n * kp_, T(0));
    if constexpr (low_rank) std::fill_n(m_.d_a, n * kp_, T(0));
    if constexpr (own_b) std::fill_n(m_.d_b, n * kp_, T(0));
    auto const forward = state_walk();
    auto const backward = derivative_walk();
    auto const first = derivative_behind<decay_axis::lanes>();
    for_strips<Isa, T>(V_, kp_, [&](index_t v, index_t k, auto rows, auto vectors) {
      constexpr index_t strip = rows() * vectors() * Isa::template lanes<T>;
      register_strip<Isa, rows(), vectors(), strip_history::keep>(n, forward, v, k, m_.S_t, kp_, {m_.past, strip});
      register_strip<Isa, rows(), vectors(), strip_history::meet>(
          n, backward, v, k, dS_t_, kp_, {m_.past + (n - 1) * strip, -strip, m_.d_factor + (n - 1) * kp_, -kp_});
      register_strip<Isa, rows(), vectors(), strip_history::none>(1, first, v, k, dS_t_, kp_, {});
    });
  }
  auto state_walk() const noexcept {
    strip_read<T> const to_q{{m_.d_o, vp_}, m_.d_q, kp_};
    strip_walk<T, decay_axis::lanes, 1 + own_b, low_rank + exclusive, !exclusive> walk{
        {m_.factor, kp_}, {{{m_.z, vp_}, {m_.w, kp_}}}, {to_q}};
    if constexpr (own_b) walk.write[1] = {{m_.u, vp_}, {m_.b, kp_}};
    if constexpr (low_rank) walk.read[exclusive] = {{m_.d_u, vp_}, m_.d_a, kp_};
    if constexpr (low_rank && !exclusive) walk.read[1] = to_q;
    return walk;
  }
  auto derivative_walk() const noexcept {
    index_t const n = count_, read = exclusive ? n : n - 1;
    strip_walk<T, decay_axis::lanes, 1 + low_rank, 0, 1 + own_b> walk{
        backwards(m_.factor, kp_, n),
        {{backwards(m_.d_o, vp_, read), backwards(m_.q, kp_, read)}},
        {{backwards(m_.z, vp_, n - 1), m_.d_w + (n - 1) * kp_, -kp_}}};
    if constexpr (low_rank) walk.write[1] = {backwards(m_.d_u, vp_, n), backwards(m_.a, kp_, n)};
    if constexpr (own_b) walk.read[1] = {backwards(m_.u, vp_, n - 1), m_.d_b + (n - 1) * kp_, -kp_};
    return walk;
  }
  /// dS before the chunk, from that of its first token.
  template <decay_axis Decay>
  auto derivative_behind() const noexcept {
    strip_walk<T, Decay, low_rank + exclusive, 0, 0> walk{{m_.factor, kp_}, {}, {}};
    auto const write = [](token_rows<T> key, token_rows<T> value) {
      return Decay == decay_axis::rows ? strip_write<T>{key, value} : strip_write<T>{value, key};
    };
    if constexpr (exclusive) walk.write[0] = write({m_.q, kp_}, {m_.d_o, vp_});
    if constexpr (low_rank) walk.write[exclusive] = write({m_.a, kp_}, {m_.d_u, vp_});
    return walk;
  }

  void write_chunk(recurrence_gradient<T> const& d, decay_sums const& sums) const {
    index_t const n = count_, r = first_ + at_;
    if (d.q_rhk)
      write_rows(m_.d_q, kp_, n, K_, T(s_.scale), d.q_rhk.at(r, this->of_query_.head), d.q_rhk.stride[0],
                 this->of_query_.added);
    for (index_t i = 0; i < n; ++i) {
      token_gradient<T> from{m_.d_a + i * kp_, m_.d_b + i * kp_, m_.d_w + i * kp_, m_.d_factor + i * kp_, m_.d_key};
      if constexpr (spec.shares_write) from.write = value_scale_backward(i);
      this->write_token(at_ + i, m_.factor + i * kp_, from, d, sums);
    }
    write_rows(m_.d_z, vp_, n, V_, T(1), d.v_rhv.at(r, this->of_value_.head), d.v_rhv.stride[0],
               this->of_value_.added);
  }
  /// Where the write scale is the value's: its derivative, while d_z becomes the value's own.
  T value_scale_backward(index_t i) const {
    if (!in_.write_rh) return T(0);
    T* const d_z = m_.d_z + i * vp_;
    T const d = simd::map_sum<Isa, T>(
        V_, [](auto const& x, auto const& y) { return x * y; }, d_z, this->value(at_ + i));
    T const scale = this->value_scale(at_ + i);
    simd::map<Isa>(
        vp_, [=](auto const& x) { return x * scale; }, d_z, d_z);
    return d;
  }

  generic_scratch<State, Isa, T> const& m_;
  index_t kp_;
  T *S_, *dS_, *dS_t_;  ///< of this head
  index_t at_ = 0, count_ = 0;
};

/// Some heads of one sequence, a chunk of all of them after the other: their rows of a token lie side by side.
template <class State, class Isa, class T>
class generic_heads {
 public:
  /// Heads that must be computed together.
  static constexpr index_t sharing(recurrence_shape const&) noexcept { return 1; }

  generic_heads(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h, index_t count,
                generic_scratch<State, Isa, T> const& m)
      : s_(s), in_(in), m_(m), n_(n), h_(h), end_(h + count), chunks_((s.seq.length(n) + s.chunk - 1) / s.chunk) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) const {
    for (index_t h = h_; h < end_; ++h) head(h).begin_forward();
    for (index_t c = 0; c < chunks_; ++c)
      for (index_t h = h_; h < end_; ++h) head(h).forward(c, o_rhv, saved);
    for (index_t h = h_; h < end_; ++h) head(h).end_forward(final_nhkv);
  }
  template <class Sums>
  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, Sums const& sums) const {
    for (index_t h = h_; h < end_; ++h) head(h).begin_backward(d_final_nhkv);
    for (index_t c = chunks_; c-- > 0;)
      for (index_t h = h_; h < end_; ++h) head(h).backward(c, saved, d_o_rhv, d, sums.at(n_, h));
    for (index_t h = h_; h < end_; ++h) head(h).end_backward(d.initial_nhkv);
  }

 private:
  generic_head<State, Isa, T> head(index_t h) const { return {s_, in_, n_, h, m_, h - h_}; }

  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  generic_scratch<State, Isa, T> const& m_;
  index_t n_, h_, end_, chunks_;
};

}  // namespace seqmix::inline v0::kernels::detail
