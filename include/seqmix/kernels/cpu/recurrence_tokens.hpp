#pragma once

#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/kernels/recurrence_shape.hpp>
#include <seqmix/tensor/arena.hpp>

namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: the state before every chunk, [chunks, H, K, Vp], and of states that erase what
/// every token writes, [R, H, Vp]. Bytes: H K Vp sizeof(T) a chunk, H Vp sizeof(T) a token.
template <class T>
struct recurrence_saved {
  T *states = nullptr, *written = nullptr;

  template <class Isa>
  static recurrence_saved carve(arena& a, recurrence_shape const& s, state_spec const& state) {
    index_t const row = s.heads * simd::padded<Isa, T>(s.value_dim);
    return {a.take<T>(s.chunks_before(s.seq.count()) * s.key_dim * row),
            a.take<T>(state.low_rank ? s.seq.rows() * row : 0)};
  }
};

namespace detail {

/// Sums over the tokens of one sequence and head: derivatives of a constant log-decay [1|K] and of the rates [K].
struct decay_sums {
  double *constant = nullptr, *rate = nullptr;
};

/// One head's derivatives of one token's update and factors; `key` is room for [K] numbers.
template <class T>
struct token_gradient {
  T const *a, *b, *w;
  T *factor, *key;
  T write = T(0);  ///< what has reached the write scale elsewhere
};

/// What the tokens of one sequence offer to one head, and where their derivatives go. Tokens are counted from the
/// sequence's start.
template <class State, class Isa, class T>
class head_tokens {
 public:
  static constexpr state_spec spec = State::spec;

  head_tokens(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h)
      : s_(s), in_(in), n_(n), h_(h), K_(s.key_dim), V_(s.value_dim), vp_(simd::padded<Isa, T>(s.value_dim)),
        first_(s.seq.begin(n)), rows_(s.seq.length(n)), of_query_(s, h, s.query_heads), of_key_(s, h, s.key_heads),
        of_value_(s, h, s.value_heads), of_gate_(s, h, s.gate_heads) {}

 protected:
  /// The head of queries, keys, values or gates that head h reads, and whether an earlier one has read it already.
  struct shared_head {
    index_t head;
    bool added;
    shared_head(recurrence_shape const& s, index_t h, index_t heads)
        : head(h * heads / s.heads), added(h % (s.heads / heads) != 0) {}
  };
  bool gated() const noexcept { return in_.g_rhk.data != nullptr; }
  index_t decay_keys() const noexcept { return gated() ? in_.g_rhk.extent[2] : 0; }
  /// What is not there is 1.
  static T const* or_one(T const* p) noexcept {
    static constexpr T one = T(1);
    return p ? p : &one;
  }
  T const* query(index_t t) const noexcept {
    return or_one(in_.q_rhk ? in_.q_rhk.at(first_ + t, of_query_.head) : nullptr);
  }
  T const* key(index_t t) const noexcept {
    return or_one(in_.k_rhk ? in_.k_rhk.at(first_ + t, of_key_.head) : nullptr);
  }
  T const* value(index_t t) const noexcept { return in_.v_rhv.at(first_ + t, of_value_.head); }
  T number(view2<T const> x_rh, index_t t) const noexcept { return x_rh ? x_rh(first_ + t, of_gate_.head) : T(1); }
  /// A state with b = w shares its coefficients between erasing and writing: there the write scale is the value's.
  T value_scale(index_t t) const noexcept { return spec.shares_write ? number(in_.write_rh, t) : T(1); }

  T* saved_state(recurrence_saved<T> const& saved, index_t chunk) const noexcept {
    return saved.states + (chunk * s_.heads + h_) * K_ * vp_;
  }
  void load_state(view4<T const> from, T* to) const {
    if (from)
      copy_rows(from.at(n_, h_), from.stride[2], K_, V_, to, vp_);
    else
      std::fill_n(to, K_ * vp_, T(0));
  }
  void store_state(T const* from, view4<T> to) const {
    if (to) write_rows(from, vp_, K_, V_, T(1), to.at(n_, h_), to.stride[2], false);
  }

  /// factor = e^g for every key channel.
  void load_factors(index_t t, T* factor) const {
    index_t const r = first_ + t, hg = of_gate_.head;
    auto const exponential = [](auto const& x) { return simd::exp_of_weight<Isa, T>(x); };
    if (!gated()) {
      std::fill_n(factor, K_, T(1));
    } else if (in_.rate_hk) {
      T const g = in_.g_rhk(r, hg, 0), bound = log_decay_bound<T>;
      simd::map<Isa>(
          K_,
          [=](auto const& rate) {
            auto const log_decay = rate * g;
            return simd::exp_of_weight<Isa, T>(log_decay < bound ? simd::broadcast<Isa, T>(bound) : log_decay);
          },
          factor, in_.rate_hk.at(hg));
    } else if (decay_keys() == 1) {
      std::fill_n(factor, K_, std::exp(in_.g_rhk(r, hg, 0)));
    } else {
      simd::map<Isa>(K_, exponential, factor, in_.g_rhk.at(r, hg));
    }
  }
  state_token<T> token(index_t t, T const* factor) const noexcept {
    index_t const r = first_ + t, hk = of_key_.head;
    return {key(t),
            factor,
            K_,
            spec.shares_write ? T(1) : number(in_.write_rh, t),
            number(in_.beta_rh, t),
            spec.reads_low_rank ? in_.a_rhk.at(r, hk) : nullptr,
            spec.reads_low_rank ? in_.b_rhk.at(r, hk) : nullptr};
  }

  /// Hands the derivatives of token t's coefficients, factors and write scale to the inputs they came from.
  void write_token(index_t t, T const* factor, token_gradient<T> const& from, recurrence_gradient<T> const& d,
                   decay_sums const& sums) const {
    index_t const r = first_ + t, hk = of_key_.head;
    bool const add_key = of_key_.added;
    std::fill_n(from.key, K_, T(0));
    state_token_gradient<T> out{from.key, from.factor, from.write, T(0)};
    if constexpr (spec.reads_low_rank) {
      out.a = d.a_rhk.at(r, hk), out.b = d.b_rhk.at(r, hk);
      if (!add_key) std::fill_n(out.a, K_, T(0)), std::fill_n(out.b, K_, T(0));
    }
    State::template pullback<T>(token(t, factor), state_update<T const>{from.a, from.b, from.w}, out);
    if (d.k_rhk) write_rows(from.key, K_, 1, K_, T(1), d.k_rhk.at(r, hk), K_, add_key);
    write_number(d.write_rh, r, out.write);
    write_number(d.beta_rh, r, out.beta);
    if (gated() && (d.g_rhk || sums.rate)) write_decay(r, factor, from.factor, d, sums);
  }

 private:
  void write_number(view2<T> to_rh, index_t r, T x) const {
    if (!to_rh) return;
    T& to = to_rh(r, of_gate_.head);
    to = x + (of_gate_.added ? to : T(0));
  }
  /// d/dg e^g = e^g: nothing comes back where the factor has underflown.
  void write_decay(index_t r, T const* factor, T* d_factor, recurrence_gradient<T> const& d,
                   decay_sums const& sums) const {
    index_t const hg = of_gate_.head, count = decay_keys();
    simd::map<Isa>(
        K_, [](auto const& x, auto const& f) { return x * f; }, d_factor, d_factor, factor);
    if (in_.rate_hk) through_rates(in_.g_rhk(r, hg, 0), in_.rate_hk.at(hg), d_factor, sums);
    if (!d.g_rhk) return;
    if (count == 1)
      d_factor[0] = simd::map_sum<Isa, T>(
          K_, [](auto const& x) { return x; }, d_factor);
    bool const constant = in_.g_rhk.stride[0] == 0, add = of_gate_.added;
    for (index_t k = 0; k < count && constant; ++k) sums.constant[k] += double(d_factor[k]);
    if (!constant) write_rows(d_factor, count, 1, count, T(1), d.g_rhk.at(r, hg), count, add);
  }
  /// log-decay = g rate. Where it is bounded the factor is 0, and so is what comes back.
  void through_rates(T g, T const* rate, T* d_log, decay_sums const& sums) const {
    for (index_t k = 0; k < K_; ++k) {
      if (sums.rate) sums.rate[k] += double(d_log[k]) * double(g);
      d_log[k] *= rate[k];
    }
  }

 protected:
  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  index_t n_, h_, K_, V_, vp_, first_, rows_;
  shared_head of_query_, of_key_, of_value_, of_gate_;
};

}  // namespace detail
}  // namespace seqmix::inline v0::kernels
