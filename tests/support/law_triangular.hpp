#pragma once

#include <vector>

#include "law_recurrence.hpp"

/// The generic step as one triangular system over a whole sequence: no state is carried, decays are e^(G_i - G_j).
namespace seqmix::testing {

/// One head of one sequence, for any scalar.
template <class State, class T>
class triangular_system {
 public:
  triangular_system(mixer_shape const& s, mixer_input<T> const& in, index_t n, index_t h)
      : s_(s), in_(in), first_(s.seq.begin(n)), rows_(s.seq.length(n)), h_(h) {
    std::vector<T> sum(std::size_t(s.key_dim), T(0)), factor(sum), key(std::size_t(s.key_dim), T(1));
    for (index_t t = 0; t < rows_; ++t) {
      index_t const r = first_ + t, hg = of(s.gate_heads), hk = of(s.key_heads);
      before_.push_back(sum);
      for (index_t k = 0; k < s.key_dim; ++k) {
        T const g = log_decay(r, hg, k);
        factor[std::size_t(k)] = exp(g);
        sum[std::size_t(k)] += g;
        if (in.k_rhk) key[std::size_t(k)] = in.k_rhk(r, hk, k);
      }
      behind_.push_back(sum);
      std::vector<T> a(key.size(), T(0)), b(a), w(a);
      T const write = in.write_rh ? in.write_rh(r, hg) : T(1);
      State::template coefficients<T>(
          state_token<T>{key.data(), factor.data(), s.key_dim, State::spec.shares_write ? T(1) : write,
                         in.beta_rh ? in.beta_rh(r, hg) : T(1), in.a_rhk ? in.a_rhk.at(r, hk) : nullptr,
                         in.b_rhk ? in.b_rhk.at(r, hk) : nullptr},
          state_update<T>{a.data(), b.data(), w.data()});
      a_.push_back(a), w_.push_back(w), b_.push_back(State::spec.shares_write ? w : b);
      value_scale_.push_back(State::spec.shares_write ? write : T(1));
    }
  }
  /// Outputs, and the final state when wanted, from an initial state [K,V].
  void solve(view3<T> o_rhv, std::vector<T> const& S, std::vector<T>* final) {
    constexpr bool inclusive = State::spec.read == read_order::inclusive;
    for (index_t v = 0; v < s_.value_dim; ++v) {
      std::vector<T> u;
      for (index_t i = 0; i < rows_; ++i)
        u.push_back(found(a_[std::size_t(i)], before_[std::size_t(i)], i, v, S, u));
      for (index_t i = 0; i < rows_; ++i) {
        std::vector<T> q;
        for (index_t k = 0; k < s_.key_dim; ++k)
          q.push_back(in_.q_rhk ? in_.q_rhk(first_ + i, of(s_.query_heads), k) : T(1));
        auto const& G = inclusive ? behind_[std::size_t(i)] : before_[std::size_t(i)];
        o_rhv(first_ + i, h_, v) = T(s_.scale) * found(q, G, inclusive ? i + 1 : i, v, S, u);
      }
      for (index_t k = 0; final && k < s_.key_dim; ++k) {
        std::vector<T> unit(std::size_t(s_.key_dim), T(0));
        unit[std::size_t(k)] = T(1);
        (*final)[std::size_t(k * s_.value_dim + v)] =
            rows_ > 0 ? found(unit, behind_.back(), rows_, v, S, u) : S[std::size_t(k * s_.value_dim + v)];
      }
    }
  }

 private:
  index_t of(index_t heads) const { return h_ * heads / s_.heads; }
  T log_decay(index_t r, index_t hg, index_t k) const {
    if (!in_.g_rhk) return T(0);
    T const g = in_.g_rhk(r, hg, in_.g_rhk.extent[2] == 1 ? 0 : k);
    return in_.rate_hk ? bounded_log_decay(g * in_.rate_hk(hg, k)) : g;
  }
  /// What x finds of channel v in the state after `tokens` tokens, decayed to where the sums of log-decays are G.
  T found(std::vector<T> const& x, std::vector<T> const& G, index_t tokens, index_t v, std::vector<T> const& S,
          std::vector<T> const& u) const {
    T sum(0);
    for (index_t k = 0; k < s_.key_dim; ++k) {
      auto const key = std::size_t(k);
      sum += x[key] * exp(G[key]) * S[std::size_t(k * s_.value_dim + v)];
      for (index_t j = 0; j < tokens; ++j) {
        auto const token = std::size_t(j);
        T const written = w_[token][key] * value_scale_[token] * in_.v_rhv(first_ + j, of(s_.value_heads), v) +
                          b_[token][key] * u[token];
        sum += x[key] * exp(G[key] - behind_[token][key]) * written;
      }
    }
    return sum;
  }

  mixer_shape const& s_;
  mixer_input<T> const& in_;
  index_t first_, rows_, h_;
  std::vector<std::vector<T>> before_, behind_, a_, b_, w_;
  std::vector<T> value_scale_;
};

/// recurrence<State, Gate> whose reference is the triangular system: an oracle that shares nothing with the steps.
template <class State, class Gate>
struct recurrence_against_system : recurrence<State, Gate> {
  using base = recurrence<State, Gate>;
  using base::forward;
  template <class T>
  using state = typename base::template state<T>;

  template <class T>
  static void forward(device::reference, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after,
                      typename base::template saved<same<T>> const*, arena&) {
    auto const cells = std::size_t(s.key_dim * s.value_dim);
    for (index_t n = 0; n < s.seq.count(); ++n)
      for (index_t h = 0; h < s.heads; ++h) {
        std::vector<T> S(cells, T(0)), final(cells, T(0));
        if (before) S.assign(before->S_nhkv.at(n, h), before->S_nhkv.at(n, h) + cells);
        triangular_system<State, T>(s, in, n, h).solve(o_rhv, S, &final);
        if (after) std::copy(final.begin(), final.end(), after->S_nhkv.at(n, h));
      }
  }
};

}  // namespace seqmix::testing
