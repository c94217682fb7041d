#pragma once

#include <seqmix/kernels/cpu/recurrence_chunkwise.hpp>

/// The generic step token by token, for any state and for decays per channel. Backward keeps one state a chunk and
/// recomputes the others inside it.
namespace seqmix::inline v0::kernels::detail {

template <class Isa, class T>
struct token_scratch {
  T *S, *v, *o, *erased, *a, *b, *w, *factor, *key;
  T *history, *dS, *dout, *d_erased, *da, *db, *dw, *d_factor, *d_key, *d_v;
  double* g;

  static token_scratch carve(arena& arena, recurrence_shape const& s, bool backward) {
    index_t const kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    token_scratch w{};
    w.S = arena.take<T>(s.key_dim * vp);
    for (T** p : {&w.v, &w.o, &w.erased}) *p = arena.take<T>(vp);
    for (T** p : {&w.a, &w.b, &w.w, &w.factor, &w.key}) *p = arena.take<T>(kp);
    w.g = arena.take<double>(kp);
    if (!backward) return w;
    w.history = arena.take<T>((s.chunk + 1) * s.key_dim * vp);
    w.dS = arena.take<T>(s.key_dim * vp);
    for (T** p : {&w.dout, &w.d_erased, &w.d_v}) *p = arena.take<T>(vp);
    for (T** p : {&w.da, &w.db, &w.dw, &w.d_factor, &w.d_key}) *p = arena.take<T>(kp);
    return w;
  }
};

template <class State, class Isa, class T>
class sequential_head {
 public:
  static constexpr index_t together(recurrence_shape const&) noexcept { return 1; }

  sequential_head(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h,
                  token_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(h), K_(s.key_dim), V_(s.value_dim), vp_(simd::padded<Isa, T>(s.value_dim)),
        first_(s.seq.begin(n)), rows_(s.seq.length(n)) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    load_state(in_.initial_nhkv, w_.S);
    index_t chunk = saved ? s_.chunks_before(n_) : 0;
    for (index_t t = 0; t < rows_; ++t) {
      if (saved && t % s_.chunk == 0) std::copy_n(w_.S, K_ * vp_, saved_state(*saved, chunk++));
      load_token(t);
      step(w_.S, w_.S);
      std::fill_n(w_.o, vp_, T(0));
      T const* const q = query(t);
      for (index_t k = 0; k < K_; ++k) add(w_.S + k * vp_, T(s_.scale) * q[k], w_.o);
      std::copy_n(w_.o, V_, o_rhv.at(first_ + t, h_));
    }
    if (final_nhkv) write_rows(w_.S, vp_, K_, V_, T(1), final_nhkv.at(n_, h_), final_nhkv.stride[2], false);
  }

  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, double* d_constant) {
    load_state(d_final_nhkv, w_.dS);
    std::fill_n(d_constant, decay_keys(), 0.0);
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      index_t const begin = c * s_.chunk, end = (std::min)(rows_, begin + s_.chunk);
      std::copy_n(saved_state(saved, base + c), K_ * vp_, w_.history);
      for (index_t t = begin; t < end; ++t) {
        load_token(t);
        step(state_at(t - begin), state_at(t - begin + 1));
      }
      for (index_t t = end; t-- > begin;)
        token_backward(t, state_at(t - begin), state_at(t - begin + 1), d_o_rhv, d, d_constant);
    }
    if (d.initial_nhkv)
      write_rows(w_.dS, vp_, K_, V_, T(1), d.initial_nhkv.at(n_, h_), d.initial_nhkv.stride[2], false);
  }

 private:
  index_t head(index_t heads) const noexcept { return h_ * heads / s_.heads; }
  bool begins_group(index_t heads) const noexcept { return h_ % (s_.heads / heads) == 0; }
  index_t decay_keys() const noexcept { return in_.g_rhk ? in_.g_rhk.extent[2] : 0; }
  T* saved_state(recurrence_saved<T> const& saved, index_t chunk) const noexcept {
    return saved.states + (chunk * s_.heads + h_) * K_ * vp_;
  }
  T* state_at(index_t i) const noexcept { return w_.history + i * K_ * vp_; }
  void load_state(view4<T const> from, T* to) const {
    std::fill_n(to, K_ * vp_, T(0));
    if (from) copy_rows(from.at(n_, h_), from.stride[2], K_, V_, to, vp_);
  }
  T const* query(index_t t) const noexcept { return in_.q_rhk.at(first_ + t, head(s_.query_heads)); }
  void add(T const* x, T factor, T* to) const noexcept {
    simd::map<Isa>(
        vp_, [=](auto const& sum, auto const& part) { return sum + factor * part; }, to, to, x);
  }
  T dot(T const* x, T const* y) const noexcept {
    return simd::map_sum<Isa, T>(
        vp_, [](auto const& a, auto const& b) { return a * b; }, x, y);
  }
  T number(view2<T const> x_rh, index_t t) const noexcept {
    return x_rh ? x_rh(first_ + t, head(s_.gate_heads)) : T(1);
  }
  state_token<T> token(index_t t) const noexcept {
    return {w_.key, w_.factor, K_, number(in_.write_rh, t), number(in_.beta_rh, t)};
  }

  void load_token(index_t t) {
    index_t const r = first_ + t;
    std::copy_n(in_.k_rhk.at(r, head(s_.key_heads)), K_, w_.key);
    copy_rows(in_.v_rhv.at(r, head(s_.value_heads)), V_, 1, V_, w_.v, vp_);
    for (index_t k = 0; k < K_; ++k)
      w_.factor[k] = in_.g_rhk ? std::exp(in_.g_rhk(r, head(s_.gate_heads), decay_keys() == 1 ? 0 : k)) : T(1);
    State::template coefficients<T>(token(t), state_update<T>{w_.a, w_.b, w_.w});
  }
  /// to = Diag(e^g) from + b (a' from) + w v'
  void step(T const* from, T* to) {
    if constexpr (State::spec.low_rank) {
      std::fill_n(w_.erased, vp_, T(0));
      for (index_t k = 0; k < K_; ++k) add(from + k * vp_, w_.a[k], w_.erased);
    }
    for (index_t k = 0; k < K_; ++k) {
      T const keep = w_.factor[k], write = w_.w[k];
      if constexpr (State::spec.low_rank) {
        T const erase = w_.b[k];
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
                      recurrence_gradient<T> const& d, double* d_constant) {
    load_token(t);
    index_t const r = first_ + t;
    copy_rows(d_o_rhv.at(r, h_), V_, 1, V_, w_.dout, vp_);
    T const* const q = query(t);
    bool const add_q = !begins_group(s_.query_heads);
    T* const dq = d.q_rhk.at(r, head(s_.query_heads));
    for (index_t k = 0; k < K_; ++k) {
      dq[k] = T(s_.scale) * dot(after + k * vp_, w_.dout) + (add_q ? dq[k] : T(0));
      add(w_.dout, T(s_.scale) * q[k], w_.dS + k * vp_);
    }
    std::fill_n(w_.d_v, vp_, T(0));
    std::fill_n(w_.d_erased, vp_, T(0));
    if constexpr (State::spec.low_rank) {
      std::fill_n(w_.erased, vp_, T(0));
      for (index_t k = 0; k < K_; ++k) add(before + k * vp_, w_.a[k], w_.erased);
    }
    for (index_t k = 0; k < K_; ++k) {
      T* const dS = w_.dS + k * vp_;
      w_.dw[k] = dot(dS, w_.v);
      w_.d_factor[k] = dot(dS, before + k * vp_);
      add(dS, w_.w[k], w_.d_v);
      if constexpr (State::spec.low_rank) {
        w_.db[k] = dot(dS, w_.erased);
        add(dS, w_.b[k], w_.d_erased);
      }
    }
    for (index_t k = 0; k < K_; ++k) {
      T* const dS = w_.dS + k * vp_;
      T const keep = w_.factor[k];
      simd::map<Isa>(
          vp_, [=](auto const& x) { return keep * x; }, dS, dS);
      if constexpr (State::spec.low_rank) {
        w_.da[k] = dot(before + k * vp_, w_.d_erased);
        add(w_.d_erased, w_.a[k], dS);
      }
    }
    write_token(t, d, d_constant);
  }

  void write_token(index_t t, recurrence_gradient<T> const& d, double* d_constant) {
    index_t const r = first_ + t, hg = head(s_.gate_heads);
    std::fill_n(w_.d_key, K_, T(0));
    state_token_gradient<T> out{w_.d_key, w_.d_factor, T(0), T(0)};
    State::template pullback<T>(token(t), state_update<T const>{w_.da, w_.db, w_.dw}, out);
    write_rows(w_.d_key, K_, 1, K_, T(1), d.k_rhk.at(r, head(s_.key_heads)), K_, !begins_group(s_.key_heads));
    write_rows(w_.d_v, vp_, 1, V_, T(1), d.v_rhv.at(r, head(s_.value_heads)), V_, !begins_group(s_.value_heads));
    bool const add_gate = !begins_group(s_.gate_heads);
    if (d.write_rh) d.write_rh(r, hg) = out.write + (add_gate ? d.write_rh(r, hg) : T(0));
    if (d.beta_rh) d.beta_rh(r, hg) = out.beta + (add_gate ? d.beta_rh(r, hg) : T(0));
    if (!in_.g_rhk || !d.g_rhk) return;
    // d/dg e^g = e^g: nothing comes back where the factor has underflown.
    if (decay_keys() == 1) {
      T sum(0);
      for (index_t k = 0; k < K_; ++k) sum += w_.d_factor[k] * w_.factor[k];
      w_.d_factor[0] = sum;
    } else {
      for (index_t k = 0; k < K_; ++k) w_.d_factor[k] *= w_.factor[k];
    }
    for (index_t k = 0; k < decay_keys(); ++k) {
      if (in_.g_rhk.stride[0] == 0) {
        d_constant[k] += double(w_.d_factor[k]);
      } else {
        T& to = d.g_rhk(r, hg, k);
        to = w_.d_factor[k] + (add_gate ? to : T(0));
      }
    }
  }

  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  token_scratch<Isa, T> const& w_;
  index_t n_, h_, K_, V_, vp_, first_, rows_;
};

}  // namespace seqmix::inline v0::kernels::detail
