#pragma once

#include <algorithm>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/sequences.hpp>

/// sLSTM's cell: four gates i, f, z, o per channel, each fed by the layer's input and, within a head, by the output
/// of the token before.
///   (i, f, z, o)_t = x_t + R_h y_{t-1}
///   m_t = max(m_{t-1} + log sigmoid(f), i), or i where every n of the sequence is 0: nothing was seen yet
///   c_t = F c_{t-1} + I tanh(z),  n_t = F n_{t-1} + I,  F = min(e^(m_{t-1} + log sigmoid(f) - m_t), 1),  I = e^(i
///   - m_t) y_t = sigmoid(o) c_t / n_t
/// After a token with finite gates no n is 0, so that the question is asked of the initial state alone.
/// Source: Beck et al. (arXiv 2405.04517), section 2.2, with the stabiliser state of its authors' code.
namespace seqmix::inline v0 {

/// Which gate an index 0 .. 3 is.
enum slstm_gate : index_t { slstm_input_gate, slstm_forget_gate, slstm_cell_input, slstm_output_gate };

struct slstm_shape {
  sequences seq{};
  index_t heads = 1, head_dim = 1;
};

/// Output, cell, normaliser and maximum of N sequences, [N,H,D] each, or their derivatives.
template <class T>
struct slstm_state {
  view3<T> y_nhd{}, c_nhd{}, n_nhd{}, m_nhd{};

  explicit operator bool() const noexcept { return y_nhd.data != nullptr; }
  operator slstm_state<T const>() const noexcept requires(!std::is_const_v<T>) {
    return {y_nhd, c_nhd, n_nhd, m_nhd};
  }
  static slstm_state carve(arena& a, slstm_shape const& s) {
    slstm_state x;
    for (auto* part : {&x.y_nhd, &x.c_nhd, &x.n_nhd, &x.m_nhd})
      *part = a.take_view<T, 3>({s.seq.count(), s.heads, s.head_dim});
    return x;
  }
  static index_t elements(slstm_shape const& s) { return 4 * s.seq.count() * s.heads * s.head_dim; }
  /// Before the first token.
  void clear() {
    for (auto* part : {&y_nhd, &c_nhd, &n_nhd, &m_nhd}) std::fill_n(part->data, part->size(), T(0));
  }
};

/// x [R,4,H,D], the gates' input with its bias; R [H,4,D,D] from a head's earlier output (last axis) to its gates.
/// Without an initial state everything is 0.
template <class T>
struct slstm_input {
  view4<T const> x_rghd{}, R_hgoi{};
  slstm_state<T const> initial{};
};

/// Where the derivatives go: those of x and of the initial state (may be empty) are written, that of R (may be
/// empty) accumulates.
template <class T>
struct slstm_gradient {
  view4<T> x_rghd{}, R_hgoi{};
  slstm_state<T> initial{};
};

/// Checks a state (empty: not there).
template <class T>
void validate_state(char const* what, slstm_shape const& s, slstm_state<T> const& x) {
  if (!x) return;
  for (auto const& part : {x.y_nhd, x.c_nhd, x.n_nhd, x.m_nhd}) {
    expect_shape(what, part, {s.seq.count(), s.heads, s.head_dim});
    expect_contiguous(what, part);
  }
}

/// Checks every view of an sLSTM; names the one that does not fit.
template <class T>
void validate(slstm_shape const& s, slstm_input<T> const& in) {
  expect_shape("sLSTM input x", in.x_rghd, {s.seq.rows(), 4, s.heads, s.head_dim});
  expect_contiguous("sLSTM input x", in.x_rghd);
  expect_shape("sLSTM recurrent weight R", in.R_hgoi, {s.heads, 4, s.head_dim, s.head_dim});
  expect_contiguous("sLSTM recurrent weight R", in.R_hgoi);
  validate_state("sLSTM initial state", s, in.initial);
}

/// Checks the views that a backward writes.
template <class T>
void validate_gradient(slstm_shape const& s, slstm_gradient<T> const& d) {
  expect_shape("sLSTM input derivative d_x", d.x_rghd, {s.seq.rows(), 4, s.heads, s.head_dim});
  expect_contiguous("sLSTM input derivative d_x", d.x_rghd);
  if (d.R_hgoi) {
    expect_shape("sLSTM recurrent weight derivative d_R", d.R_hgoi, {s.heads, 4, s.head_dim, s.head_dim});
    expect_contiguous("sLSTM recurrent weight derivative d_R", d.R_hgoi);
  }
  validate_state("sLSTM initial state derivative", s, d.initial);
}

namespace kernels::detail {
/// Whether a sequence starts with every n at 0.
template <class T>
bool starts_fresh(slstm_state<T const> const& initial, index_t n) {
  if (!initial) return true;
  for (index_t h = 0; h < initial.n_nhd.extent[1]; ++h)
    for (index_t d = 0; d < initial.n_nhd.extent[2]; ++d)
      if (!(initial.n_nhd(n, h, d) == T(0))) return false;
  return true;
}
}  // namespace kernels::detail

}  // namespace seqmix::inline v0
