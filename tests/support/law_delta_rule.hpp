#pragma once

#include <seqmix/concepts/state.hpp>

namespace seqmix::testing {

/// The gated delta rule as a user would write it: S = e^g S + beta k (v - e^g S'k)', in the coefficients of the
/// generic step a = -e^g k (it meets the undecayed S), b = w = beta k.
struct delta_rule {
  static constexpr std::string_view name = "delta_rule";
  static constexpr state_spec spec{.low_rank = true, .reads_beta = true};

  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) {
      out.a[i] = -token.factor[i] * token.key[i];
      out.b[i] = out.w[i] = token.beta * token.key[i];
    }
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) {
      out.factor[i] -= token.key[i] * d.a[i];
      out.key[i] += token.beta * (d.b[i] + d.w[i]) - token.factor[i] * d.a[i];
      out.beta += token.key[i] * (d.b[i] + d.w[i]);
    }
  }
};
static_assert(state<delta_rule>);

}  // namespace seqmix::testing
