#pragma once

#include <seqmix/kernels/cpu/recurrence_tokens.hpp>

/// The generic step token by token, for every state and every decay. Backward keeps one state a chunk and
/// recomputes the others inside it.
namespace seqmix::inline v0::kernels::detail {

template <class Isa, class T>
struct token_scratch {
  T *S, *v, *o, *erased, *a, *b, *w, *factor;
  T *history, *dS, *dout, *d_erased, *da, *db, *dw, *d_factor, *d_key, *d_v;

  static token_scratch carve(arena& arena, recurrence_shape const& s, index_t, bool backward) {
    index_t const kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    token_scratch w{};
    w.S = arena.take<T>(s.key_dim * vp);
    for (T** p : {&w.v, &w.o, &w.erased}) *p = arena.take<T>(vp);
    for (T** p : {&w.a, &w.b, &w.w, &w.factor}) *p = arena.take<T>(kp);
    if (!backward) return w;
    w.history = arena.take<T>((s.chunk + 1) * s.key_dim * vp);
    w.dS = arena.take<T>(s.key_dim * vp);
    for (T** p : {&w.dout, &w.d_erased, &w.d_v}) *p = arena.take<T>(vp);
    for (T** p : {&w.da, &w.db, &w.dw, &w.d_factor, &w.d_key}) *p = arena.take<T>(kp);
    return w;
  }
};

template <class State, class Isa, class T>
class sequential_head : head_tokens<State, Isa, T> {
  using base = head_tokens<State, Isa, T>;
  using base::in_, base::s_, base::n_, base::h_, base::K_, base::V_, base::vp_, base::first_, base::rows_;

 public:
  using base::spec;
  sequential_head(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h,
                  token_scratch<Isa, T> const& w)
      : base(s, in, n, h), w_(w) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    this->load_state(in_.initial_nhkv, w_.S);
    index_t chunk = saved ? s_.chunks_before(n_) : 0;
    for (index_t t = 0; t < rows_; ++t) {
      if (saved && t % s_.chunk == 0) std::copy_n(w_.S, K_ * vp_, this->saved_state(*saved, chunk++));
      load_token(t);
      if constexpr (exclusive) read(t, o_rhv);
      step(w_.S, w_.S);
      if constexpr (!exclusive) read(t, o_rhv);
    }
    this->store_state(w_.S, final_nhkv);
  }

  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, decay_sums const& sums) {
    this->load_state(d_final_nhkv, w_.dS);
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, first = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      index_t const begin = c * s_.chunk, end = (std::min)(rows_, begin + s_.chunk);
      std::copy_n(this->saved_state(saved, first + c), K_ * vp_, w_.history);
      for (index_t t = begin; t < end; ++t) {
        load_token(t);
        step(state_at(t - begin), state_at(t - begin + 1));
      }
      for (index_t t = end; t-- > begin;)
        token_backward(t, state_at(t - begin), state_at(t - begin + 1), d_o_rhv, d, sums);
    }
    this->store_state(w_.dS, d.initial_nhkv);
  }

 private:
  static constexpr bool low_rank = spec.low_rank, exclusive = spec.read == read_order::exclusive;

  T* state_at(index_t i) const noexcept { return w_.history + i * K_ * vp_; }
  /// What erases: with b = w the state names w alone.
  T const* erasing() const noexcept { return spec.shares_write ? w_.w : w_.b; }
  void add(T const* x, T factor, T* to) const noexcept {
    simd::map<Isa>(
        vp_, [=](auto const& sum, auto const& part) { return sum + factor * part; }, to, to, x);
  }
  T dot(T const* x, T const* y) const noexcept {
    return simd::map_sum<Isa, T>(
        vp_, [](auto const& a, auto const& b) { return a * b; }, x, y);
  }

  void load_token(index_t t) {
    copy_rows(this->value(t), V_, 1, V_, w_.v, vp_);
    if constexpr (spec.shares_write) scale(w_.v, this->value_scale(t));
    this->load_factors(t, w_.factor);
    State::template coefficients<T>(this->token(t, w_.factor), state_update<T>{w_.a, w_.b, w_.w});
  }
  void scale(T* x, T factor) const noexcept {
    simd::map<Isa>(
        vp_, [=](auto const& e) { return e * factor; }, x, x);
  }
  void read(index_t t, view3<T> o_rhv) {
    std::fill_n(w_.o, vp_, T(0));
    T const* const q = this->query(t);
    for (index_t k = 0; k < K_; ++k) add(w_.S + k * vp_, T(s_.scale) * q[k], w_.o);
    std::copy_n(w_.o, V_, o_rhv.at(first_ + t, h_));
  }
  /// erased = a' S
  void erase(T const* S) {
    std::fill_n(w_.erased, vp_, T(0));
    for (index_t k = 0; k < K_; ++k) add(S + k * vp_, w_.a[k], w_.erased);
  }
  /// to = Diag(e^g) from + b (a' from) + w v'
  void step(T const* from, T* to) {
    if constexpr (low_rank) erase(from);
    for (index_t k = 0; k < K_; ++k) {
      T const keep = w_.factor[k], write = w_.w[k];
      if constexpr (low_rank) {
        T const erase = erasing()[k];
        simd::map<Isa>(
            vp_, [=](auto const& S, auto const& v, auto const& u) { return keep * S + erase * u + write * v; },
            to + k * vp_, from + k * vp_, w_.v, w_.erased);
      } else {
        simd::map<Isa>(
            vp_, [=](auto const& S, auto const& v) { return keep * S + write * v; }, to + k * vp_, from + k * vp_,
            w_.v);
      }
    }
  }

  void token_backward(index_t t, T const* before, T const* after, view3<T const> d_o_rhv,
                      recurrence_gradient<T> const& d, decay_sums const& sums) {
    load_token(t);
    copy_rows(d_o_rhv.at(first_ + t, h_), V_, 1, V_, w_.dout, vp_);
    if constexpr (!exclusive) read_backward(t, after, d);
    std::fill_n(w_.d_v, vp_, T(0));
    std::fill_n(w_.d_erased, vp_, T(0));
    if constexpr (low_rank) erase(before);
    for (index_t k = 0; k < K_; ++k) {
      T* const dS = w_.dS + k * vp_;
      w_.dw[k] = dot(dS, w_.v);
      w_.d_factor[k] = dot(dS, before + k * vp_);
      add(dS, w_.w[k], w_.d_v);
      if constexpr (low_rank) {
        T const through_erased = dot(dS, w_.erased);
        if constexpr (spec.shares_write)
          w_.dw[k] += through_erased;
        else
          w_.db[k] = through_erased;
        add(dS, erasing()[k], w_.d_erased);
      }
    }
    for (index_t k = 0; k < K_; ++k) {
      T* const dS = w_.dS + k * vp_;
      scale(dS, w_.factor[k]);
      if constexpr (low_rank) {
        w_.da[k] = dot(before + k * vp_, w_.d_erased);
        add(w_.d_erased, w_.a[k], dS);
      }
    }
    if constexpr (exclusive) read_backward(t, before, d);
    write_gradients(t, d, sums);
  }
  /// Through o = scale S' q.
  void read_backward(index_t t, T const* S, recurrence_gradient<T> const& d) {
    T const* const q = this->query(t);
    bool const add_q = this->of_query_.added;
    T* const dq = d.q_rhk ? d.q_rhk.at(first_ + t, this->of_query_.head) : nullptr;
    for (index_t k = 0; k < K_; ++k) {
      if (dq) dq[k] = T(s_.scale) * dot(S + k * vp_, w_.dout) + (add_q ? dq[k] : T(0));
      add(w_.dout, T(s_.scale) * q[k], w_.dS + k * vp_);
    }
  }
  void write_gradients(index_t t, recurrence_gradient<T> const& d, decay_sums const& sums) {
    token_gradient<T> from{w_.da, w_.db, w_.dw, w_.d_factor, w_.d_key};
    if constexpr (spec.shares_write) {
      T const* const v = this->value(t);
      for (index_t c = 0; c < V_; ++c) from.write += w_.d_v[c] * v[c];
      scale(w_.d_v, this->value_scale(t));
    }
    this->write_token(t, w_.factor, from, d, sums);
    write_rows(w_.d_v, vp_, 1, V_, T(1), d.v_rhv.at(first_ + t, this->of_value_.head), V_, this->of_value_.added);
  }

  token_scratch<Isa, T> const& w_;
};

/// Some heads of one sequence, one after the other.
template <class State, class Isa, class T>
class sequential_heads {
 public:
  /// Heads that must be computed together.
  static constexpr index_t sharing(recurrence_shape const&) noexcept { return 1; }

  sequential_heads(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h, index_t count,
                   token_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(h), end_(h + count) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) const {
    for (index_t h = h_; h < end_; ++h)
      sequential_head<State, Isa, T>(s_, in_, n_, h, w_).forward(o_rhv, saved, final_nhkv);
  }
  template <class Sums>
  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, Sums const& sums) const {
    for (index_t h = h_; h < end_; ++h)
      sequential_head<State, Isa, T>(s_, in_, n_, h, w_).backward(saved, d_o_rhv, d_final_nhkv, d, sums.at(n_, h));
  }

 private:
  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  token_scratch<Isa, T> const& w_;
  index_t n_, h_, end_;
};

}  // namespace seqmix::inline v0::kernels::detail
