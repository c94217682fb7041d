#pragma once

#include <seqmix/concepts/state.hpp>

namespace seqmix::inline v0::states {

/// One number per head and value channel, which no key addresses:  S = e^g S + write v'  with K = 1, read as it is.
/// Source: HGRN (arXiv 2311.04823), RG-LRU (arXiv 2402.19427), minGRU and minLSTM (arXiv 2410.01201), which are all
/// this with gates of their own.
struct elementwise {
  static constexpr std::string_view name = "elementwise";
  static constexpr state_spec spec{.kind = state_kind::elementwise};

  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.w[i] = token.write * token.key[i];
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) {
      out.key[i] += token.write * d.w[i];
      out.write += token.key[i] * d.w[i];
    }
  }
};
static_assert(state<elementwise>);

}  // namespace seqmix::inline v0::states
