#pragma once

#include <type_traits>

#include <seqmix/kernels/cpu/recurrence_tokens.hpp>
#include <seqmix/kernels/cpu/recurrence_weights.hpp>

/// The generic step S = Diag(e^g) S + b (a' S) + w v' for any state, a chunk of n tokens at a time. With A^, Q^ the
/// decayed rows that meet the state S before the chunk, Y^ those of w and b behind it, and weights P = <.,.>
/// between tokens (recurrence_weights.hpp):
///   U = A^ S + P_aw V + P_ab U  (triangular: token by token),   O = Q^ S + P_qw V + P_qb U,
///   S' = Diag(e^G) S + W^' V + B^' U
/// With b = w one set of rows writes Z = V + U. Source: the chunkwise form of the delta rule (Yang et al., arXiv
/// 2406.06484), of gated ones (arXiv 2312.06635, 2412.06464) and of RWKV-7's step (arXiv 2503.14456), which are all
/// this; the backward is its derivative.
namespace seqmix::inline v0::kernels::detail {

/// What a state and its decays make of a chunk.
template <class State, bool PerChannel>
struct generic_form {
  static constexpr state_spec spec = State::spec;
  using kind =
      chunk_kind<spec.low_rank, spec.read == read_order::exclusive, spec.low_rank && !spec.shares_write ? 2 : 1>;
  template <class Isa, class T>
  using weights = std::conditional_t<PerChannel, channel_weights<kind, Isa, T>, head_weights<kind, Isa, T>>;
};

/// One thread's memory for the chunks of one head.
template <class Form, class Isa, class T>
struct generic_scratch {
  typename Form::template weights<Isa, T> weights;
  chunk_rows<T> rows;
  T *S, *z, *u, *o;
  T *dS, *S_t, *dS_t, *z_t, *d_z, *d_o, *d_key;

  static generic_scratch carve(arena& arena, recurrence_shape const& s, bool backward) {
    constexpr index_t m = Form::kind::rows;
    index_t const C = s.chunk, kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim),
                  row = simd::padded<Isa, T>(m * C);
    generic_scratch w{};
    w.weights = Form::template weights<Isa, T>::carve(arena, C, s.key_dim, backward);
    auto& c = w.rows;
    for (T** p : {&c.q, &c.a, &c.factor, &c.q_decayed, &c.a_decayed}) *p = arena.take<T>(C * kp);
    for (T** p : {&c.y, &c.y_decayed}) *p = arena.take<T>(m * C * kp);
    for (T** p : {&c.read, &c.erased}) *p = arena.take<T>(C * row);
    c.total = arena.take<T>(kp);
    w.S = arena.take<T>(s.key_dim * vp);
    w.z = arena.take<T>(m * C * vp);
    for (T** p : {&w.u, &w.o}) *p = arena.take<T>(C * vp);
    if (!backward) return w;
    for (T** p : {&c.d_q, &c.d_a, &c.d_factor}) *p = arena.take<T>(C * kp);
    c.d_y = arena.take<T>(m * C * kp);
    for (T** p : {&c.d_read, &c.d_erased}) *p = arena.take<T>(C * row);
    for (T** p : {&c.d_total, &w.d_key}) *p = arena.take<T>(kp);
    w.dS = arena.take<T>(s.key_dim * vp);
    for (T** p : {&w.S_t, &w.dS_t}) *p = arena.take<T>(s.value_dim * kp);
    w.z_t = arena.take<T>(s.value_dim * row);
    w.d_z = arena.take<T>(m * C * vp);
    w.d_o = arena.take<T>(C * vp);
    return w;
  }
};

/// One head of one sequence.
template <class State, class Form, class Isa, class T>
class generic_head : head_tokens<State, Isa, T> {
  using base = head_tokens<State, Isa, T>;
  using base::in_, base::s_, base::n_, base::h_, base::K_, base::V_, base::vp_, base::first_, base::rows_;
  using base::spec;

 public:
  static constexpr index_t together(recurrence_shape const&) noexcept { return 1; }

  generic_head(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h,
               generic_scratch<Form, Isa, T> const& w)
      : base(s, in, n, h), w_(w), c_(w.rows), kp_(simd::padded<Isa, T>(s.key_dim)),
        row_(simd::padded<Isa, T>(m * s.chunk)) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    index_t chunk = s_.chunks_before(n_);
    this->load_state(in_.initial_nhkv, saved && rows_ > 0 ? this->saved_state(*saved, chunk) : w_.S);
    for (index_t at = 0; at < rows_; at += s_.chunk, ++chunk) {
      bool const last = at + s_.chunk >= rows_;
      T const* const before = saved ? this->saved_state(*saved, chunk) : w_.S;
      T* const after = saved && !last ? this->saved_state(*saved, chunk + 1) : w_.S;
      load_chunk(at, before);
      tile_product<Isa>(c_.count, vp_, K_, tile_operand<T>{c_.q_decayed, kp_, 1}, before, vp_, w_.o, vp_, false);
      tiles().sums(c_.read, w_.z, vp_, w_.o, true);
      write_rows(w_.o, vp_, c_.count, V_, T(1), o_rhv.at(first_ + at, h_), o_rhv.stride[0], false);
      decay_state(before, after);
      tile_product<Isa>(K_, vp_, m * c_.count, tile_operand<T>{c_.y_decayed, 1, kp_}, w_.z, vp_, after, vp_, true);
    }
    this->store_state(w_.S, final_nhkv);
  }

  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, decay_sums const& sums) {
    this->load_state(d_final_nhkv, w_.dS);
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, first = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      T const* const S = this->saved_state(saved, first + c);
      load_chunk(c * s_.chunk, S);
      load(d_o_rhv.at(first_ + at_, h_), d_o_rhv.stride[0], V_, T(1), w_.d_o, vp_);
      through_outputs(S);
      w_.weights.backward(c_);
      write_chunk(d, sums);
    }
    this->store_state(w_.dS, d.initial_nhkv);
  }

 private:
  using kind = typename Form::kind;
  static constexpr index_t m = kind::rows;
  static constexpr index_t block = 8;  ///< tokens of the triangular system solved one by one

  causal_tiles<Isa, T, kind::rows> tiles() const noexcept { return {c_.count, row_}; }
  /// Rows of the chunk times a number.
  void load(T const* from, index_t from_row, index_t channels, T factor, T* to, index_t to_row) const {
    for (index_t i = 0; i < c_.count; ++i)
      simd::for_vectors<Isa, T>(channels, [&](index_t k, auto const& lanes) {
        simd::store<Isa>(to + i * to_row + k, lanes.load(from + i * from_row + k) * factor);
      });
  }

  /// The chunk from token `at` on: its rows, the weights between them, and what it writes into the state `before`.
  void load_chunk(index_t at, T const* before) {
    at_ = at;
    c_.count = (std::min)(s_.chunk, rows_ - at);
    load(this->query(at), in_.q_rhk ? in_.q_rhk.stride[0] : 0, K_, T(s_.scale), c_.q, kp_);
    for (index_t i = 0; i < c_.count; ++i) load_token(i);
    w_.weights.forward(c_);
    if constexpr (spec.low_rank) erase(before);
  }
  void load_token(index_t i) {
    T *const a = c_.a + i * kp_, *const w = c_.y + m * i * kp_, *const b = w + (m - 1) * kp_,
             *const factor = c_.factor + i * kp_;
    for (T* x : {a, w, b, factor})
      for (index_t k = K_; k < kp_; ++k) x[k] = T(0);
    this->load_factors(at_ + i, factor);
    State::template coefficients<T>(this->token(at_ + i, factor), state_update<T>{a, b, w});
    T const scale = this->value_scale(at_ + i);
    T const* const v = this->value(at_ + i);
    simd::for_vectors<Isa, T>(V_, [&](index_t k, auto const& lanes) {
      simd::store<Isa>(w_.z + m * i * vp_ + k, lanes.load(v + k) * scale);
    });
  }
  /// U = A^ S + P U (+ P V), U joining V or standing beside it.
  void erase(T const* S) const {
    index_t const n = c_.count;
    tile_product<Isa>(n, vp_, K_, tile_operand<T>{c_.a_decayed, kp_, 1}, S, vp_, w_.u, vp_, false);
    for (index_t begin = 0; begin < n; begin += block) {
      index_t const end = (std::min)(n, begin + block);
      if (begin > 0)
        tile_product<Isa>(end - begin, vp_, m * begin, tile_operand<T>{c_.erased + begin * row_, row_, 1}, w_.z,
                          vp_, w_.u + begin * vp_, vp_, true);
      for (index_t i = begin; i < end; ++i) erase_token(i, begin);
    }
  }
  void erase_token(index_t i, index_t begin) const {
    T const* const weight = c_.erased + i * row_;
    T* const z = w_.z + (m * (i + 1) - 1) * vp_;
    simd::for_vectors<Isa, T>(vp_, [&](index_t k, auto const& lanes) {
      auto sum = lanes.load(w_.u + i * vp_ + k);
      for (index_t j = m * begin; j < m * i + m - 1; ++j) sum += lanes.load(w_.z + j * vp_ + k) * weight[j];
      lanes.store(z + k, m == 1 ? lanes.load(z + k) + sum : sum);
    });
  }
  /// The derivative of `erase`: what reaches U reaches the rows that it was made of, the last token first.
  void erase_backward() const {
    index_t const n = c_.count;
    for (index_t end = n; end > 0;) {
      index_t const begin = (end - 1) / block * block;
      if (end < n)
        tile_product<Isa>(m * (end - begin), vp_, n - end,
                          tile_operand<T>{c_.erased + end * row_ + m * begin, 1, row_}, d_u(end), m * vp_,
                          w_.d_z + m * begin * vp_, vp_, true);
      for (index_t j = m * end - 1; j-- > m * begin;) erase_row_backward(j, end);
      end = begin;
    }
  }
  void erase_row_backward(index_t j, index_t end) const {
    T* const d_z = w_.d_z + j * vp_;
    simd::for_vectors<Isa, T>(vp_, [&](index_t k, auto const& lanes) {
      auto sum = lanes.load(d_z + k);
      for (index_t i = end; i-- > j / m + 1;) sum += lanes.load(d_u(i) + k) * c_.erased[i * row_ + j];
      lanes.store(d_z + k, sum);
    });
  }
  T* d_u(index_t i) const noexcept { return w_.d_z + (m * (i + 1) - 1) * vp_; }

  /// to = Diag(e^G) from
  void decay_state(T const* from, T* to) const {
    for (index_t k = 0; k < K_; ++k) {
      T const factor = c_.total[k];
      simd::map<Isa>(
          vp_, [=](auto const& x) { return x * factor; }, to + k * vp_, from + k * vp_);
    }
  }

  /// From d_o and dS to the rows, the weights, what was written, and the state before the chunk.
  void through_outputs(T const* S) {
    index_t const n = c_.count;
    auto const causal = tiles();
    transpose<Isa>(S, vp_, K_, V_, w_.S_t, kp_);
    transpose<Isa>(w_.dS, vp_, K_, V_, w_.dS_t, kp_);
    transpose<Isa>(w_.z, vp_, m * n, V_, w_.z_t, row_);
    tile_product<Isa>(m * n, vp_, K_, tile_operand<T>{c_.y_decayed, kp_, 1}, w_.dS, vp_, w_.d_z, vp_, false);
    causal.sums_back(c_.read, w_.d_o, vp_, w_.d_z, true);
    causal.products(V_, {w_.d_o, vp_, 1}, w_.z_t, c_.d_read);
    tile_product<Isa>(n, kp_, V_, tile_operand<T>{w_.d_o, vp_, 1}, w_.S_t, kp_, c_.d_q, kp_, false);
    tile_product<Isa>(m * n, kp_, V_, tile_operand<T>{w_.z, vp_, 1}, w_.dS_t, kp_, c_.d_y, kp_, false);
    sum_products();
    decay_state(w_.dS, w_.dS);
    tile_product<Isa>(K_, vp_, n, tile_operand<T>{c_.q_decayed, 1, kp_}, w_.d_o, vp_, w_.dS, vp_, true);
    if constexpr (spec.low_rank) {
      erase_backward();
      tile_operand<T> const d_u_rows{d_u(0), m * vp_, 1};
      causal.products(V_, d_u_rows, w_.z_t, c_.d_erased);
      tile_product<Isa>(n, kp_, V_, d_u_rows, w_.S_t, kp_, c_.d_a, kp_, false);
      tile_product<Isa>(K_, vp_, n, tile_operand<T>{c_.a_decayed, 1, kp_}, d_u(0), m * vp_, w_.dS, vp_, true);
    }
  }
  /// d_total = the sum over values of S dS
  void sum_products() const {
    simd::for_vectors<Isa, T>(kp_, [&](index_t k, auto const& lanes) {
      simd::vec<Isa, T> sum{};
      for (index_t v = 0; v < V_; ++v) sum += lanes.load(w_.S_t + v * kp_ + k) * lanes.load(w_.dS_t + v * kp_ + k);
      lanes.store(c_.d_total + k, sum);
    });
  }

  void write_chunk(recurrence_gradient<T> const& d, decay_sums const& sums) const {
    index_t const n = c_.count, r = first_ + at_;
    if (d.q_rhk)
      write_rows(c_.d_q, kp_, n, K_, T(s_.scale), d.q_rhk.at(r, this->of_query_.head), d.q_rhk.stride[0],
                 this->of_query_.added);
    for (index_t i = 0; i < n; ++i) {
      T const* const d_w = c_.d_y + m * i * kp_;
      token_gradient<T> from{c_.d_a + i * kp_, d_w + (m - 1) * kp_, d_w, c_.d_factor + i * kp_, w_.d_key};
      if constexpr (spec.shares_write) from.write = value_scale_backward(i);
      this->write_token(at_ + i, c_.factor + i * kp_, from, d, sums);
    }
    write_rows(w_.d_z, m * vp_, n, V_, T(1), d.v_rhv.at(r, this->of_value_.head), d.v_rhv.stride[0],
               this->of_value_.added);
  }
  /// Where the write scale is the value's: its derivative, while d_z becomes the value's own.
  T value_scale_backward(index_t i) const {
    if (!in_.write_rh) return T(0);
    T* const d_z = w_.d_z + m * i * vp_;
    T const d = simd::map_sum<Isa, T>(
        V_, [](auto const& x, auto const& y) { return x * y; }, d_z, this->value(at_ + i));
    T const scale = this->value_scale(at_ + i);
    simd::map<Isa>(
        vp_, [=](auto const& x) { return x * scale; }, d_z, d_z);
    return d;
  }

  generic_scratch<Form, Isa, T> const& w_;
  chunk_rows<T> c_;
  index_t kp_, row_;
  index_t at_ = 0;
};

}  // namespace seqmix::inline v0::kernels::detail
