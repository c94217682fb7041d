#pragma once

#include <algorithm>

#include <seqmix/concepts/state.hpp>
#include <seqmix/states/detail/dot.hpp>

namespace seqmix::inline v0::states {

/// S = Diag(e^g) S + b (a' S) + (write k) v' with a and b handed in for every token; a meets the undecayed S.
/// Source: RWKV-7 (arXiv 2503.14456), where a = -k^ and b is k^ times its in-context learning rate.
struct diagonal_plus_low_rank {
  static constexpr std::string_view name = "diagonal_plus_low_rank";
  static constexpr state_spec spec{.low_rank = true, .reads_low_rank = true};

  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    std::copy_n(token.a, token.keys, out.a);
    std::copy_n(token.b, token.keys, out.b);
    for (index_t i = 0; i < token.keys; ++i) out.w[i] = token.write * token.key[i];
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.a[i] += d.a[i];
    for (index_t i = 0; i < token.keys; ++i) out.b[i] += d.b[i];
    for (index_t i = 0; i < token.keys; ++i) out.key[i] += token.write * d.w[i];
    out.write += detail::dot(token.keys, token.key, d.w);
  }
};
static_assert(state<diagonal_plus_low_rank>);

}  // namespace seqmix::inline v0::states
