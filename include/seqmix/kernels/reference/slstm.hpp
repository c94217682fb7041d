#pragma once

#include <array>
#include <vector>

#include <seqmix/kernels/slstm_shape.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {
/// One channel's step; y becomes its output.
template <class T>
void slstm_step(std::array<T, 4> const& gate, bool fresh, T& y, T& c, T& n, T& m) {
  T const past = m + log_sigmoid(gate[slstm_forget_gate]), in = gate[slstm_input_gate];
  T const top = fresh || in > past ? in : past;
  T const keep = past > top ? T(1) : exp(past - top), write = exp(in - top);
  c = keep * c + write * tanh(gate[slstm_cell_input]);
  n = keep * n + write;
  m = top;
  y = sigmoid(gate[slstm_output_gate]) * c / n;
}
}  // namespace detail

/// sLSTM (kernels/slstm_shape.hpp) token by token: y [R,H,D] and the final state (empty: not wanted). The oracle of
/// the fast kernel and, on dual numbers, of its gradients.
template <class T>
void slstm_forward(device::reference, slstm_shape const& s, slstm_input<T> const& in, view3<same<T>> y_rhd,
                   slstm_state<same<T>> const& final) {
  validate(s, in);
  expect_shape("sLSTM output y", y_rhd, {s.seq.rows(), s.heads, s.head_dim});
  validate_state("sLSTM final state", s, final);
  index_t const D = s.head_dim;
  using numbers = std::vector<T>;
  for (index_t b = 0; b < s.seq.count(); ++b)
    for (index_t h = 0; h < s.heads; ++h) {
      numbers y(std::size_t(D), T(0)), c(y), n(y), m(y);
      for (index_t j = 0; in.initial && j < D; ++j) {
        auto const at = std::size_t(j);
        y[at] = in.initial.y_nhd(b, h, j), c[at] = in.initial.c_nhd(b, h, j);
        n[at] = in.initial.n_nhd(b, h, j), m[at] = in.initial.m_nhd(b, h, j);
      }
      bool fresh = detail::starts_fresh(in.initial, b);
      for (index_t r = s.seq.begin(b); r < s.seq.end(b); ++r, fresh = false) {
        numbers const before = y;
        for (index_t j = 0; j < D; ++j) {
          std::array<T, 4> gate;
          for (index_t g = 0; g < 4; ++g) {
            T& raw = gate[std::size_t(g)] = in.x_rghd(r, g, h, j);
            for (index_t e = 0; e < D; ++e) raw += in.R_hgoi(h, g, j, e) * before[std::size_t(e)];
          }
          auto const at = std::size_t(j);
          detail::slstm_step(gate, fresh, y[at], c[at], n[at], m[at]);
          y_rhd(r, h, j) = y[at];
        }
      }
      for (index_t j = 0; final && j < D; ++j) {
        auto const at = std::size_t(j);
        final.y_nhd(b, h, j) = y[at], final.c_nhd(b, h, j) = c[at];
        final.n_nhd(b, h, j) = n[at], final.m_nhd(b, h, j) = m[at];
      }
    }
}

}  // namespace seqmix::inline v0::kernels
