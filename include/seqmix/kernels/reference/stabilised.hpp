#pragma once

#include <limits>
#include <vector>

#include <seqmix/kernels/stabilised_shape.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// One head of the reference: S, n, m and the two steps written out.
template <class State, class T>
struct stabilised_cell {
  index_t K, V;
  std::vector<T> S, n, q, k, v;
  T m;

  stabilised_cell(index_t keys, index_t values)
      : K(keys), V(values), S(std::size_t(keys * values), T(0)), n(std::size_t(keys), T(0)), q(n), k(n),
        v(std::size_t(values), T(0)), m(first_maximum<State, double>()) {}

  T& at(index_t key, index_t value) { return S[std::size_t(key * V + value)]; }
  static T larger(T const& a, T const& b) { return b > a ? b : a; }
  static bool nothing(T const& top) {
    using number = decltype(value_of(top));
    return value_of(top) == -std::numeric_limits<number>::infinity();
  }
  /// e^(x - top), 0 where nothing was seen.
  static T weight(T const& x, T const& top) { return nothing(top) ? T(0) : exp(x - top); }

  void write(T const& g, T const& log_weight) {
    T const top = larger(g + m, log_weight), keep = weight(g + m, top), write = weight(log_weight, top);
    for (index_t i = 0; i < K; ++i) {
      T const key = k[std::size_t(i)];
      for (index_t j = 0; j < V; ++j) at(i, j) = keep * at(i, j) + write * key * v[std::size_t(j)];
      n[std::size_t(i)] = keep * n[std::size_t(i)] + write * key;
    }
    m = top;
  }
  /// o from what was there, at log-weight `past`, and the own token at `own`.
  void read(T const& past, T const& own, T* o) {
    T const top = larger(past, own), keep = weight(past, top);
    T product(0), den(0);
    for (std::size_t i = 0; i < q.size(); ++i) product += q[i] * k[i], den += q[i] * n[i];
    T const write = weight(own, top) * product;
    den = keep * den + write;
    if constexpr (State::stabilised.floor) {
      T const size = den < T(0) ? -den : den, least = exp(-top);
      den = size > least ? size : least;
    }
    den += T(State::stabilised.eps);
    for (index_t j = 0; j < V; ++j) {
      T sum(0);
      for (index_t i = 0; i < K; ++i) sum += q[std::size_t(i)] * at(i, j);
      o[j] = nothing(top) ? T(0) : (keep * sum + write * v[std::size_t(j)]) / den;
    }
  }
};

}  // namespace detail

/// The stabilised recurrence of kernels/stabilised_shape.hpp token by token: o [R,H,V] and the final state (empty:
/// not wanted). Sources: Beck et al. (arXiv 2405.04517), section 2.3; Peng et al. (arXiv 2305.13048), the WKV
/// operator. The oracle of the fast kernels and, on dual numbers, of their gradients.
template <class State, class T>
void stabilised_forward(device::reference, recurrence_shape const& s, stabilised_input<T> const& in,
                        view3<same<T>> o_rhv, stabilised_state<same<T>> const& final) {
  validate<State>(s, in);
  expect_shape("stabilised output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("stabilised output o", o_rhv);
  validate_state("stabilised final state", s, final);
  index_t const K = s.key_dim, V = s.value_dim;
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h) {
      auto const of = [&](index_t heads) { return h * heads / s.heads; };
      detail::stabilised_cell<State, T> cell(K, V);
      if (in.initial) {
        cell.m = in.initial.m_nh(n, h);
        for (index_t i = 0; i < K; ++i) {
          cell.n[std::size_t(i)] = in.initial.n_nhk(n, h, i);
          for (index_t j = 0; j < V; ++j) cell.at(i, j) = in.initial.S_nhkv(n, h, i, j);
        }
      }
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
        for (index_t i = 0; i < K; ++i) {
          cell.q[std::size_t(i)] = in.q_rhk ? T(s.scale) * in.q_rhk(r, of(s.query_heads), i) : T(1);
          cell.k[std::size_t(i)] = in.k_rhk ? in.k_rhk(r, of(s.key_heads), i) : T(1);
        }
        for (index_t j = 0; j < V; ++j) cell.v[std::size_t(j)] = in.v_rhv(r, of(s.value_heads), j);
        T const g = in.g_rhk ? in.g_rhk(r, of(s.gate_heads), 0) : T(0);
        T const log_weight = in.write_rh ? in.write_rh(r, of(s.gate_heads)) : T(0);
        T* const o = o_rhv.at(r, h);
        if constexpr (State::spec.read == read_order::inclusive)
          cell.read(g + cell.m, log_weight, o);
        else
          cell.read(cell.m, in.bonus_hk ? in.bonus_hk(h, 0) + log_weight : log_weight, o);
        cell.write(g, log_weight);
      }
      if (!final) continue;
      final.m_nh(n, h) = cell.m;
      for (index_t i = 0; i < K; ++i) {
        final.n_nhk(n, h, i) = cell.n[std::size_t(i)];
        for (index_t j = 0; j < V; ++j) final.S_nhkv(n, h, i, j) = cell.at(i, j);
      }
    }
}

}  // namespace seqmix::inline v0::kernels
