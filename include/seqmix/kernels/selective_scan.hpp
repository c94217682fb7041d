#pragma once

#include <string>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>
#include <seqmix/tensor/storage.hpp>

namespace seqmix::inline v0 {

/// Mamba-1's selective scan with all that surrounds it in one pass; rows R, D channels, K states a channel:
///   Delta = softplus(delta + delta_bias),   S_k = e^(-Delta A_k) S_k + Delta B_k u,   A = e^A_log
///   y = (sum over k of C_k S_k + skip u) silu(z)
/// Source: Gu, Dao, "Mamba" (arXiv 2312.00752), algorithm 2 and its authors' kernel. B and C belong to `groups`
/// groups of channels, d / (D / groups).
struct selective_scan_shape {
  sequences seq{};
  index_t channels = 1, states = 1, groups = 1;
};

/// What it reads. `delta_bias`, `skip` and `z` may be empty: 0, 0 and no gate; `initial` [N,D,K] empty: zero.
template <class T>
struct selective_scan_input {
  using number = accumulator_t<T>;
  view2<T const> u_rd{}, delta_rd{}, z_rd{};
  view3<T const> b_rgk{}, c_rgk{};
  view2<number const> a_log_dk{};
  view1<number const> delta_bias_d{}, skip_d{};
  view3<number const> initial_ndk{};
};

/// Where the derivatives go: of activations and of the initial state written, of parameters added. Those of what
/// was given are wanted.
template <class T>
struct selective_scan_gradient {
  using number = accumulator_t<T>;
  view2<T> u_rd{}, delta_rd{}, z_rd{};
  view3<T> b_rgk{}, c_rgk{};
  view2<number> a_log_dk{};
  view1<number> delta_bias_d{}, skip_d{};
  view3<number> initial_ndk{};
};

/// What forward keeps for backward: the state before every chunk of tokens.
template <class T>
struct selective_scan_saved {
  T* states = nullptr;
};

/// Checks every view of a selective scan and names the one that does not fit: shape_error.
template <class T>
void validate(selective_scan_shape const& s, selective_scan_input<T> const& in) {
  index_t const R = s.seq.rows(), D = s.channels, K = s.states;
  if (s.groups < 1 || D % s.groups != 0)
    throw shape_error("seqmix: selective scan: groups must divide the " + std::to_string(D) + " channels, got " +
                      std::to_string(s.groups));
  expect_shape("selective scan u", in.u_rd, {R, D});
  expect_shape("selective scan delta", in.delta_rd, {R, D});
  if (in.z_rd) expect_shape("selective scan z", in.z_rd, {R, D});
  expect_shape("selective scan B", in.b_rgk, {R, s.groups, K});
  expect_shape("selective scan C", in.c_rgk, {R, s.groups, K});
  expect_shape("selective scan A_log", in.a_log_dk, {D, K});
  if (in.delta_bias_d) expect_shape("selective scan delta_bias", in.delta_bias_d, {D});
  if (in.skip_d) expect_shape("selective scan skip", in.skip_d, {D});
  if (in.initial_ndk) expect_shape("selective scan initial state", in.initial_ndk, {s.seq.count(), D, K});
  expect_contiguous("selective scan u", in.u_rd);
  expect_contiguous("selective scan delta", in.delta_rd);
  expect_contiguous("selective scan z", in.z_rd);
  expect_contiguous("selective scan B", in.b_rgk);
  expect_contiguous("selective scan C", in.c_rgk);
  expect_contiguous("selective scan delta_bias", in.delta_bias_d);
  expect_contiguous("selective scan skip", in.skip_d);
}

}  // namespace seqmix::inline v0
