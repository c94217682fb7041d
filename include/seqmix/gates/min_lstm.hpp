#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// minLSTM's gates per channel (a head here) and token, made to sum to 1: f' = f / (f + i), i' = i / (f + i) with
/// f = sigmoid(W_f x), i = sigmoid(W_i x); log-decay log f', write scale i'. With d = log f - log i they are
/// sigmoid(d) and sigmoid(-d), and d is formed without cancellation. Source: Feng et al., "Were RNNs All We
/// Needed?" (arXiv 2410.01201), section 3.2.
struct min_lstm {
  static constexpr std::string_view name = "min_lstm";
  static constexpr gate_spec spec{.raws = 2, .from = feed::linear, .writes = true};
  enum : std::size_t { forget_gate, input_gate };
  static constexpr std::array<gate_parameter, 0> parameters{};

  template <class T>
  static gate_value<T> forward(std::array<T, 2> const& raw, std::array<T, 0> const&) noexcept {
    T const d = softplus_difference(-raw[input_gate], -raw[forget_gate]);
    return {seqmix::log_sigmoid(d), sigmoid(-d)};
  }
};
static_assert(gate<min_lstm>);

}  // namespace seqmix::inline v0::gates
