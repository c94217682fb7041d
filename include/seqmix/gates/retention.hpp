#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// RetNet's fixed decay per head, 1 - 2^(-5-h). Source: Sun et al., "Retentive Network" (arXiv 2307.08621),
/// equation 8. With softmax weights it is a fixed slope per head on the distance.
struct retention {
  static constexpr std::string_view name = "retention";
  static constexpr gate_spec spec{};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "log_decay", .trained = false}}};
  static double initial(std::size_t, gate_element const& e) {
    return std::log1p(-std::exp2(-5.0 - double(e.head)));
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 1> const& p) noexcept {
    return {p[0], T(1)};
  }
};
static_assert(gate<retention>);

}  // namespace seqmix::inline v0::gates
