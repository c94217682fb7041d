#pragma once

#include <seqmix/concepts/state.hpp>
#include <seqmix/states/detail/dot.hpp>

namespace seqmix::inline v0::states {

/// A sum of decayed outer products, S = Diag(e^g) S + (write k) v': linear attention, RetNet, GLA, Mamba-2.
struct outer_product {
  static constexpr std::string_view name = "outer_product";
  static constexpr state_spec spec{};

  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.w[i] = token.write * token.key[i];
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.key[i] += token.write * d.w[i];
    out.write += detail::dot(token.keys, token.key, d.w);
  }
};
static_assert(state<outer_product>);

}  // namespace seqmix::inline v0::states
