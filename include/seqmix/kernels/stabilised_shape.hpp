#pragma once

#include <limits>

#include <seqmix/kernels/recurrence_shape.hpp>

/// Recurrences whose write weights are exponentials of any size: a matrix S [K,V] and a normaliser n [K], kept
/// relative to the running maximum m of their log-weights. With log-decay g, log-weight i and bonus u of a token:
///   m_t = max(g + m_{t-1}, i),   S_t = e^(g + m_{t-1} - m_t) S_{t-1} + e^(i - m_t) k v',   n_t likewise without v'
///   o_t = num / (den + eps)  with  num = e^(d - r) S_{t-1}' q + e^(w - r) (k.q) v,  den likewise without v,
///                                  r = max(d, w)
///   d = g + m_{t-1}, w = i (inclusive), or d = m_{t-1}, w = u + i (exclusive);  with a floor den is max(|den|,
///   e^-r).
/// q is scaled; without keys q = k = 1. A token that has seen nothing (r = -inf) reads 0.
///
/// Derivatives. In S~ = e^m S and n~ = e^m n the maximum drops out of everything but eps and the states handed in
/// and out; backward works in these, with derivatives scaled by e^m. What reaches m follows the branch that was the
/// greater one, to the log-decay and the earlier m or to the log-weight, so that the result is that of
/// differentiating every maximum. Nothing reaches a maximum that starts at -inf.
namespace seqmix::inline v0 {

/// S [N,H,K,V], n [N,H,K] and m [N,H] of N sequences, or their derivatives.
template <class T>
struct stabilised_state {
  view4<T> S_nhkv{};
  view3<T> n_nhk{};
  view2<T> m_nh{};

  explicit operator bool() const noexcept { return S_nhkv.data != nullptr; }
  operator stabilised_state<T const>() const noexcept requires(!std::is_const_v<T>) {
    return {S_nhkv, n_nhk, m_nh};
  }
};

/// What one stabilised recurrence reads. Log-decays g [R,Hg,1] (row stride 0 when constant; empty: 0), log-weights
/// [R,Hg] (empty: 0), bonus [H,1] of an exclusive read (empty: 0). Without keys q and k are empty. Without an
/// initial state S and n are 0 and m is where the state's spec lets it start.
template <class T>
struct stabilised_input {
  view3<T const> q_rhk{}, k_rhk{}, v_rhv{}, g_rhk{};
  view2<T const> write_rh{}, bonus_hk{};
  stabilised_state<T const> initial{};
};

/// Where the derivatives go; layouts as in stabilised_input. Written, not added. Those of v, and of q and k where
/// they are read, are always wanted, the others may be empty.
template <class T>
struct stabilised_gradient {
  view3<T> q_rhk{}, k_rhk{}, v_rhv{}, g_rhk{};
  view2<T> write_rh{}, bonus_hk{};
  stabilised_state<T> initial{};
};

/// Checks a state (empty: not there) and where it lies.
template <class T>
void validate_state(char const* what, recurrence_shape const& s, stabilised_state<T> const& x) {
  if (!x) return;
  index_t const N = s.seq.count();
  expect_shape(what, x.S_nhkv, {N, s.heads, s.key_dim, s.value_dim});
  expect_shape(what, x.n_nhk, {N, s.heads, s.key_dim});
  expect_shape(what, x.m_nh, {N, s.heads});
  expect_contiguous(what, x.S_nhkv);
  expect_contiguous(what, x.n_nhk);
}

/// Checks head counts, chunk and every view of a stabilised recurrence; names the one that does not fit.
template <class State, class T>
void validate(recurrence_shape const& s, stabilised_input<T> const& in) {
  constexpr bool keyed = State::stabilised.keyed;
  auto const divides = [&](char const* what, index_t heads) {
    if (heads < 1 || s.heads % heads != 0)
      throw shape_error(std::string("seqmix: stabilised recurrence: ") + what +
                        " must divide heads = " + std::to_string(s.heads) + ", got " + std::to_string(heads));
  };
  divides("value_heads", s.value_heads);
  divides("gate_heads", s.gate_heads);
  if (s.chunk < 1)
    throw value_error("seqmix: stabilised recurrence: chunk must be at least 1, got " + std::to_string(s.chunk));
  index_t const R = s.seq.rows();
  if (keyed) {
    divides("query_heads", s.query_heads);
    divides("key_heads", s.key_heads);
    expect_shape("stabilised query q", in.q_rhk, {R, s.query_heads, s.key_dim});
    expect_shape("stabilised key k", in.k_rhk, {R, s.key_heads, s.key_dim});
    expect_contiguous("stabilised query q", in.q_rhk);
    expect_contiguous("stabilised key k", in.k_rhk);
  } else if (s.key_dim != 1) {
    throw shape_error("seqmix: stabilised recurrence: a state without keys has key_dim 1, got " +
                      std::to_string(s.key_dim));
  }
  expect_shape("stabilised value v", in.v_rhv, {R, s.value_heads, s.value_dim});
  expect_contiguous("stabilised value v", in.v_rhv);
  if (in.g_rhk) expect_shape("stabilised log-decay g", in.g_rhk, {-1, s.gate_heads, 1});
  if (in.write_rh) expect_shape("stabilised log-weight", in.write_rh, {R, s.gate_heads});
  if (in.bonus_hk) expect_shape("stabilised bonus", in.bonus_hk, {s.heads, 1});
  validate_state("stabilised initial state", s, in.initial);
}

/// Checks the views that a backward writes.
template <class State, class T>
void validate_gradient(recurrence_shape const& s, stabilised_gradient<T> const& d) {
  index_t const R = s.seq.rows();
  if (State::stabilised.keyed) {
    expect_shape("stabilised query derivative d_q", d.q_rhk, {R, s.query_heads, s.key_dim});
    expect_shape("stabilised key derivative d_k", d.k_rhk, {R, s.key_heads, s.key_dim});
    expect_contiguous("stabilised query derivative d_q", d.q_rhk);
    expect_contiguous("stabilised key derivative d_k", d.k_rhk);
  }
  expect_shape("stabilised value derivative d_v", d.v_rhv, {R, s.value_heads, s.value_dim});
  expect_contiguous("stabilised value derivative d_v", d.v_rhv);
  if (d.g_rhk) expect_shape("stabilised log-decay derivative d_g", d.g_rhk, {-1, s.gate_heads, 1});
  if (d.write_rh) expect_shape("stabilised log-weight derivative", d.write_rh, {R, s.gate_heads});
  if (d.bonus_hk) expect_shape("stabilised bonus derivative", d.bonus_hk, {s.heads, 1});
  validate_state("stabilised initial state derivative", s, d.initial);
}

namespace kernels::detail {
/// m before the first token where no state is handed in.
template <class State, class T>
constexpr T first_maximum() noexcept {
  return State::stabilised.start == stabiliser_start::none ? -std::numeric_limits<T>::infinity() : T(0);
}
}  // namespace kernels::detail

}  // namespace seqmix::inline v0
