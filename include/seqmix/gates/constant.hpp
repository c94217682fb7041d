#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// A trained decay per head, the same at every token: g = -e^lambda, effective context length tau = e^-lambda.
/// Starts with tau spaced from 4 to 256 over the heads by factors, so that a layer sees near and far.
/// Source: the constant gate of Tong et al. (arXiv 2609.16540), section on theory.
struct constant {
  static constexpr std::string_view name = "constant";
  static constexpr gate_spec spec{};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "log_rate", .log_rate = true}}};
  static double initial(std::size_t, gate_element const& e) {
    double const place = e.heads > 1 ? double(e.head) / double(e.heads - 1) : 0.5;
    return -(std::log(4.0) + place * std::log(64.0));
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]), T(1)};
  }
};
static_assert(gate<constant>);

}  // namespace seqmix::inline v0::gates
