#pragma once

#include <seqmix/concepts/state.hpp>
#include <seqmix/states/detail/dot.hpp>

namespace seqmix::inline v0::states {

/// What a key finds is replaced by the value, with a strength beta:  S = Diag(e^g) S, then S = S + beta k (v - S'
/// k)'. The decay comes first, so a = -e^g k in the generic step (a meets the undecayed S) and b = w = beta k.
/// Source: DeltaNet (Schlag et al., arXiv 2102.11174; Yang et al., arXiv 2406.06484); with a gate per head Gated
/// DeltaNet (arXiv 2412.06464), with one per key channel Kimi Delta Attention (arXiv 2510.26692).
struct delta_rule {
  static constexpr std::string_view name = "delta_rule";
  static constexpr state_spec spec{.low_rank = true, .reads_beta = true, .shares_write = true};

  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.a[i] = -token.factor[i] * token.key[i];
    for (index_t i = 0; i < token.keys; ++i) out.w[i] = token.beta * token.key[i];
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.factor[i] -= token.key[i] * d.a[i];
    for (index_t i = 0; i < token.keys; ++i) out.key[i] += token.beta * d.w[i] - token.factor[i] * d.a[i];
    out.beta += detail::dot(token.keys, token.key, d.w);
  }
};
static_assert(state<delta_rule>);

}  // namespace seqmix::inline v0::states
