#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// ALiBi's fixed slope per head, log-decay -m_h a token: m_h = 2^(-8(h+1)/H) when H is a power of two, else the
/// slopes of the power of two below H followed by every second slope of twice that. Source: Press, Smith, Lewis,
/// "Train Short, Test Long" (arXiv 2108.12409), section 3; the rule for other H from its authors' code.
struct alibi {
  static constexpr std::string_view name = "alibi";
  static constexpr gate_spec spec{};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "log_decay", .trained = false}}};
  static double slope(index_t head, index_t heads) {
    index_t power = 1;
    while (2 * power <= heads) power *= 2;
    if (head < power) return std::exp2(-8.0 * double(head + 1) / double(power));
    return std::exp2(-8.0 * double(2 * (head - power) + 1) / double(2 * power));
  }
  static double initial(std::size_t, gate_element const& e) { return -slope(e.head, e.heads); }
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 1> const& p) noexcept {
    return {p[0], T(1)};
  }
};
static_assert(gate<alibi>);

}  // namespace seqmix::inline v0::gates
