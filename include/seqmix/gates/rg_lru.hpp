#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// Griffin's RG-LRU per channel (a head here) and token: recurrence gate r and input gate i are sigmoids of
/// block-diagonal maps of the convolved values; log a = -8 r softplus(Lambda) is the log-decay, sqrt(1 - a^2) i the
/// write scale. The root's derivative is at most 1000. At a sequence's first token nothing is there to decay and
/// the root is 1. Start: a^(1/8) at r = 1 is sqrt(u), u ~ U(0.9^2, 0.999^2); no weight decay on Lambda. Source: De
/// et al., "Griffin" (arXiv 2402.19427), equations 1 to 4 and appendix A, and its authors' code.
struct rg_lru {
  static constexpr std::string_view name = "rg_lru";
  static constexpr gate_spec spec{
      .raws = 2, .from = feed::block_diagonal, .bias = true, .writes = true, .source = feed_source::convolved};
  enum : std::size_t { recurrence_gate, input_gate };
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "Lambda"}}};

  static double initial(std::size_t, gate_element const& e) {
    double const u = 0.9 * 0.9 + e.uniform * (0.999 * 0.999 - 0.9 * 0.9);
    return inverse_softplus(-0.5 * std::log(u));
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 2> const& raw, std::array<T, 1> const& p) noexcept {
    T const log_a = log_decay(raw, p);
    return {log_a, bounded_sqrt(one_minus_exp(log_a + log_a)) * sigmoid(raw[input_gate])};
  }
  template <class T>
  static gate_value<T> first(std::array<T, 2> const& raw, std::array<T, 1> const& p) noexcept {
    return {log_decay(raw, p), sigmoid(raw[input_gate])};
  }

 private:
  template <class T>
  static T log_decay(std::array<T, 2> const& raw, std::array<T, 1> const& p) noexcept {
    return T(-8) * sigmoid(raw[recurrence_gate]) * softplus(p[0]);
  }
};
static_assert(gate<rg_lru>);

}  // namespace seqmix::inline v0::gates
