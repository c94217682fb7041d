#pragma once

#include <seqmix/concepts/state.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>
#include <seqmix/tensor/storage.hpp>

namespace seqmix::inline v0 {

/// Sizes and numbers of one recurrence over packed or batched rows. H = `heads` is the number of states; state h
/// reads query head h / (heads / query_heads), and so on for keys, values and gates.
struct recurrence_shape {
  sequences seq{};
  index_t heads = 1, query_heads = 1, key_heads = 1, value_heads = 1, gate_heads = 1;
  index_t key_dim = 1, value_dim = 1;
  double scale = 1.0;  ///< multiplies q in the read
  index_t chunk = 32;  ///< tokens computed together; changes the order of rounding, nothing else

  /// Chunks before sequence n, all of them for n = seq.count().
  index_t chunks_before(index_t n) const noexcept {
    index_t sum = 0;
    for (index_t m = 0; m < n; ++m) sum += (seq.length(m) + chunk - 1) / chunk;
    return sum;
  }
};

/// What one recurrence reads. Log-decays g <= 0 are [R,Hg,1] per head or [R,Hg,K] per channel (row stride 0 when
/// constant), empty for no gate; `write` [R,Hg] scales what is written, `beta` [R,Hg] is the delta rule's strength;
/// `initial` [N,H,K,V] is the state before the first token, empty for zero. `a` and `b` [R,Hk,K] are for states
/// that read them. With `rate` [Hg,K] >= 0 the log-decay of channel k is the bounded g rate_k. States that no key
/// addresses have K = 1 and take q and k empty: both are 1.
template <class T>
struct recurrence_input {
  using number = accumulator_t<T>;
  view3<T const> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number const> g_rhk{};
  view2<number const> write_rh{}, beta_rh{};
  view4<number const> initial_nhkv{};
  view3<T const> a_rhk{}, b_rhk{};
  view2<number const> rate_hk{};

  /// Whether every key channel has a decay of its own.
  bool decays_per_channel() const noexcept { return rate_hk.data != nullptr || (g_rhk && g_rhk.extent[2] > 1); }
};

/// Where the derivatives go; layouts as in recurrence_input. Written, not added. Those of q, k and v are always
/// wanted (q and k where they are read), the others may be empty.
template <class T>
struct recurrence_gradient {
  using number = accumulator_t<T>;
  view3<T> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number> g_rhk{};
  view2<number> write_rh{}, beta_rh{};
  view4<number> initial_nhkv{};
  view3<T> a_rhk{}, b_rhk{};
  view2<number> rate_hk{};
};

/// The log-decay of key channel k in row r for gate head hg, for any scalar.
template <class T>
T recurrence_log_decay(recurrence_input<T> const& in, index_t r, index_t hg, index_t k) noexcept {
  if (!in.g_rhk) return T(0);
  T const g = in.g_rhk(r, hg, in.g_rhk.extent[2] == 1 ? 0 : k);
  return in.rate_hk ? bounded_log_decay(g * in.rate_hk(hg, k)) : g;
}

/// Checks head counts, chunk and every view of a recurrence over a kind of state; names the one that does not fit.
template <class T>
void validate(recurrence_shape const& s, recurrence_input<T> const& in, state_spec const& state = {}) {
  struct count {
    char const* what;
    index_t heads;
  };
  for (auto const& c : {count{"query_heads", s.query_heads}, count{"key_heads", s.key_heads},
                        count{"value_heads", s.value_heads}, count{"gate_heads", s.gate_heads}})
    if (c.heads < 1 || s.heads % c.heads != 0)
      throw shape_error(std::string("seqmix: recurrence: ") + c.what +
                        " must divide heads = " + std::to_string(s.heads) + ", got " + std::to_string(c.heads));
  if (s.chunk < 1)
    throw value_error("seqmix: recurrence: chunk must be at least 1, got " + std::to_string(s.chunk));
  index_t const R = s.seq.rows();
  bool const elementwise = state.kind == state_kind::elementwise;
  if (elementwise && s.key_dim != 1)
    throw shape_error("seqmix: recurrence: an elementwise state has key_dim 1, got " + std::to_string(s.key_dim));
  if (in.q_rhk || !elementwise) expect_shape("recurrence query q", in.q_rhk, {R, s.query_heads, s.key_dim});
  if (in.k_rhk || !elementwise) expect_shape("recurrence key k", in.k_rhk, {R, s.key_heads, s.key_dim});
  expect_shape("recurrence value v", in.v_rhv, {R, s.value_heads, s.value_dim});
  expect_contiguous("recurrence query q", in.q_rhk);
  expect_contiguous("recurrence key k", in.k_rhk);
  expect_contiguous("recurrence value v", in.v_rhv);
  if (in.g_rhk)
    expect_shape("recurrence log-decay g", in.g_rhk, {-1, s.gate_heads, in.g_rhk.extent[2] == 1 ? 1 : s.key_dim});
  expect_contiguous("recurrence log-decay g", in.g_rhk);
  if (in.rate_hk) {
    expect_shape("recurrence log-decay g, to be multiplied by rates,", in.g_rhk, {-1, s.gate_heads, 1});
    expect_shape("recurrence decay rate", in.rate_hk, {s.gate_heads, s.key_dim});
    expect_contiguous("recurrence decay rate", in.rate_hk);
  }
  if (in.write_rh) expect_shape("recurrence write scale", in.write_rh, {-1, s.gate_heads});
  if (in.beta_rh) expect_shape("recurrence beta", in.beta_rh, {-1, s.gate_heads});
  if (state.reads_low_rank) {
    expect_shape("recurrence erasing vector a", in.a_rhk, {R, s.key_heads, s.key_dim});
    expect_shape("recurrence erasing vector b", in.b_rhk, {R, s.key_heads, s.key_dim});
    expect_contiguous("recurrence erasing vector a", in.a_rhk);
    expect_contiguous("recurrence erasing vector b", in.b_rhk);
  }
  if (in.initial_nhkv)
    expect_shape("recurrence initial state", in.initial_nhkv, {s.seq.count(), s.heads, s.key_dim, s.value_dim});
}

/// Checks a final state (empty: not wanted) and where it lies.
template <class T>
void validate_state(char const* what, recurrence_shape const& s, view4<T> state_nhkv) {
  if (!state_nhkv) return;
  expect_shape(what, state_nhkv, {s.seq.count(), s.heads, s.key_dim, s.value_dim});
  expect_contiguous(what, state_nhkv);
}

/// Checks the views that a backward writes.
template <class T>
void validate_gradient(recurrence_shape const& s, recurrence_gradient<T> const& d, state_spec const& state = {}) {
  index_t const R = s.seq.rows();
  bool const elementwise = state.kind == state_kind::elementwise;
  if (d.q_rhk || !elementwise)
    expect_shape("recurrence query derivative d_q", d.q_rhk, {R, s.query_heads, s.key_dim});
  if (d.k_rhk || !elementwise) expect_shape("recurrence key derivative d_k", d.k_rhk, {R, s.key_heads, s.key_dim});
  expect_shape("recurrence value derivative d_v", d.v_rhv, {R, s.value_heads, s.value_dim});
  expect_contiguous("recurrence query derivative d_q", d.q_rhk);
  expect_contiguous("recurrence key derivative d_k", d.k_rhk);
  expect_contiguous("recurrence value derivative d_v", d.v_rhv);
  if (d.a_rhk) expect_shape("recurrence derivative d_a", d.a_rhk, {R, s.key_heads, s.key_dim});
  if (d.b_rhk) expect_shape("recurrence derivative d_b", d.b_rhk, {R, s.key_heads, s.key_dim});
  if (d.rate_hk) expect_shape("recurrence derivative d_rate", d.rate_hk, {s.gate_heads, s.key_dim});
  expect_contiguous("recurrence derivative d_a", d.a_rhk);
  expect_contiguous("recurrence derivative d_b", d.b_rhk);
  validate_state("recurrence initial state derivative", s, d.initial_nhkv);
}

}  // namespace seqmix::inline v0
