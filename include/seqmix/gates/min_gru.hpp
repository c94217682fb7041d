#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// minGRU's update gate per channel (a head here) and token: z = sigmoid(W x), log-decay log(1 - z), write scale z.
/// Source: Feng et al., "Were RNNs All We Needed?" (arXiv 2410.01201), section 3.1.
struct min_gru {
  static constexpr std::string_view name = "min_gru";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .writes = true};
  static constexpr std::array<gate_parameter, 0> parameters{};

  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {seqmix::log_sigmoid(-raw[0]), sigmoid(raw[0])};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 0> const&, T d_log_decay, T d_write,
                       std::array<T, 1>& d_raw, std::array<T, 0>&) noexcept {
    T const z = sigmoid(raw[0]), d = seqmix::log_sigmoid(-raw[0]) < log_decay_bound<T> ? T(0) : d_log_decay;
    d_raw[0] = d_write * z * sigmoid(-raw[0]) - d * z;
  }
};
static_assert(gate<min_gru>);

}  // namespace seqmix::inline v0::gates
