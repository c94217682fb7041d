#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// The Forgetting Transformer's forget gate per head and token, log-decay log sigmoid(w x + b). Bias starts at 0,
/// as in its authors' code by default; `spaced_log_sigmoid` has its other start. Source: Lin, Nikishin, He,
/// Courville, "Forgetting Transformer" (arXiv 2503.02130).
struct log_sigmoid {
  static constexpr std::string_view name = "log_sigmoid";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .bias = true};
  static constexpr std::array<gate_parameter, 0> parameters{};

  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {seqmix::log_sigmoid(raw[0]), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 0> const&, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 0>&) noexcept {
    bool const bounded = seqmix::log_sigmoid(raw[0]) < log_decay_bound<T>;
    d_raw[0] = bounded ? T(0) : d_log_decay * sigmoid(-raw[0]);
  }
};
static_assert(gate<log_sigmoid>);

}  // namespace seqmix::inline v0::gates
