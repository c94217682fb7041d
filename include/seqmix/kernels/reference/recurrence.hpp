#pragma once

#include <vector>

#include <seqmix/kernels/recurrence_shape.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

/// The generic step, token by token:  S_t = Diag(e^g) S + b (a' S) + w v',  read o_t = scale S_t' q_t or,
/// exclusive, scale S_{t-1}' q_t. Source: the recurrence that covers the linear family (delta rule: Schlag et al.,
/// arXiv 2102.11174; the form with a and b: RWKV-7, arXiv 2503.14456; exclusive read: RWKV-6, arXiv 2404.05892).
/// The oracle of every fast recurrence and, on dual numbers, of its gradients.
template <class State, class T>
void recurrence_forward(device::reference, recurrence_shape const& s, recurrence_input<T> const& in,
                        view3<same<T>> o_rhv, view4<same<T>> final_nhkv) {
  constexpr state_spec spec = State::spec;
  index_t const K = s.key_dim, V = s.value_dim;
  std::vector<T> S(std::size_t(K * V)), a(std::size_t(K), T(0)), b(a), w(a), factor(a), key(std::size_t(K), T(1)),
      erased(std::size_t(V), T(0));
  auto const cell = [&](index_t k, index_t v) -> T& { return S[std::size_t(k * V + v)]; };
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h) {
      auto const of = [&](index_t heads) { return h * heads / s.heads; };
      auto const read = [&](index_t r) {
        for (index_t v = 0; v < V; ++v) {
          T sum(0);
          for (index_t k = 0; k < K; ++k) sum += (in.q_rhk ? in.q_rhk(r, of(s.query_heads), k) : T(1)) * cell(k, v);
          o_rhv(r, h, v) = T(s.scale) * sum;
        }
      };
      for (index_t k = 0; k < K; ++k)
        for (index_t v = 0; v < V; ++v) cell(k, v) = in.initial_nhkv ? in.initial_nhkv(n, h, k, v) : T(0);
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
        index_t const hg = of(s.gate_heads), hk = of(s.key_heads);
        if (spec.read == read_order::exclusive) read(r);
        for (index_t k = 0; k < K; ++k) factor[std::size_t(k)] = exp(recurrence_log_decay(in, r, hg, k));
        for (index_t k = 0; k < K && in.k_rhk; ++k) key[std::size_t(k)] = in.k_rhk(r, hk, k);
        T const write = in.write_rh ? in.write_rh(r, hg) : T(1);  // with b = w it is the value's
        State::template coefficients<T>(
            state_token<T>{key.data(), factor.data(), K, spec.shares_write ? T(1) : write,
                           in.beta_rh ? in.beta_rh(r, hg) : T(1), in.a_rhk ? in.a_rhk.at(r, hk) : nullptr,
                           in.b_rhk ? in.b_rhk.at(r, hk) : nullptr},
            state_update<T>{a.data(), b.data(), w.data()});
        for (index_t v = 0; v < V; ++v) {
          erased[std::size_t(v)] = T(0);
          for (index_t k = 0; k < K; ++k) erased[std::size_t(v)] += a[std::size_t(k)] * cell(k, v);
        }
        auto const& erasing = spec.shares_write ? w : b;
        T const value_scale = spec.shares_write ? write : T(1);
        for (index_t k = 0; k < K; ++k)
          for (index_t v = 0; v < V; ++v)
            cell(k, v) = factor[std::size_t(k)] * cell(k, v) + erasing[std::size_t(k)] * erased[std::size_t(v)] +
                         w[std::size_t(k)] * (value_scale * in.v_rhv(r, of(s.value_heads), v));
        if (spec.read == read_order::inclusive) read(r);
      }
      if (final_nhkv)
        for (index_t k = 0; k < K; ++k)
          for (index_t v = 0; v < V; ++v) final_nhkv(n, h, k, v) = cell(k, v);
    }
}

}  // namespace seqmix::inline v0::kernels
