#pragma once

#include <vector>

#include <seqmix/kernels/recurrence_shape.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

/// The generic step, token by token:  S_t = Diag(e^g) S + b (a' S) + w v',  o_t = scale S_t' q_t.
/// Source: the recurrence that covers the linear family (delta rule: Schlag et al., arXiv 2102.11174; the form with
/// a and b: RWKV-7, arXiv 2503.14456). The oracle of every fast recurrence and, on dual numbers, of its gradients.
template <class State, class T>
void recurrence_forward(device::reference, recurrence_shape const& s, recurrence_input<T> const& in,
                        view3<same<T>> o_rhv, view4<same<T>> final_nhkv) {
  index_t const K = s.key_dim, V = s.value_dim;
  std::vector<T> S(std::size_t(K * V)), a(std::size_t(K), T(0)), b(a), w(a), factor(a),
      erased(std::size_t(V), T(0));
  auto const cell = [&](index_t k, index_t v) -> T& { return S[std::size_t(k * V + v)]; };
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h) {
      auto const of = [&](index_t heads) { return h * heads / s.heads; };
      for (index_t k = 0; k < K; ++k)
        for (index_t v = 0; v < V; ++v) cell(k, v) = in.initial_nhkv ? in.initial_nhkv(n, h, k, v) : T(0);
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
        for (index_t k = 0; k < K; ++k)
          factor[std::size_t(k)] =
              in.g_rhk ? exp(in.g_rhk(r, of(s.gate_heads), in.g_rhk.extent[2] == 1 ? 0 : k)) : T(1);
        std::vector<T> key(std::size_t(K), T(0));
        for (index_t k = 0; k < K; ++k) key[std::size_t(k)] = in.k_rhk(r, of(s.key_heads), k);
        State::template coefficients<T>(state_token<T>{key.data(), factor.data(), K,
                                                       in.write_rh ? in.write_rh(r, of(s.gate_heads)) : T(1),
                                                       in.beta_rh ? in.beta_rh(r, of(s.gate_heads)) : T(1)},
                                        state_update<T>{a.data(), b.data(), w.data()});
        for (index_t v = 0; v < V; ++v) {
          erased[std::size_t(v)] = T(0);
          for (index_t k = 0; k < K; ++k) erased[std::size_t(v)] += a[std::size_t(k)] * cell(k, v);
        }
        for (index_t k = 0; k < K; ++k)
          for (index_t v = 0; v < V; ++v)
            cell(k, v) = factor[std::size_t(k)] * cell(k, v) + b[std::size_t(k)] * erased[std::size_t(v)] +
                         w[std::size_t(k)] * in.v_rhv(r, of(s.value_heads), v);
        for (index_t v = 0; v < V; ++v) {
          T sum(0);
          for (index_t k = 0; k < K; ++k) sum += in.q_rhk(r, of(s.query_heads), k) * cell(k, v);
          o_rhv(r, h, v) = T(s.scale) * sum;
        }
      }
      if (final_nhkv)
        for (index_t k = 0; k < K; ++k)
          for (index_t v = 0; v < V; ++v) final_nhkv(n, h, k, v) = cell(k, v);
    }
}

}  // namespace seqmix::inline v0::kernels
