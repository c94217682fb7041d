#pragma once

#include <seqmix/gates/detail/softplus_rate.hpp>

namespace seqmix::inline v0::gates {

/// The bounded form of Kimi Delta Attention's gate: log-decay -5 sigmoid(e^A_log (W2 W1 x + dt_bias)), never below
/// -5. Here A_log is the steepness of the sigmoid, not a decay rate; above 40 it counts as 40 (a step function
/// either way), so that no product and no derivative overflows. Initialisation: A_log = 0, dt_bias as in `kda`.
/// Source: the code published with Kimi Team, "Kimi Linear" (arXiv 2510.26692): its lower_bound.
struct kda_bounded {
  static constexpr std::string_view name = "kda_bounded";
  static constexpr gate_spec spec{
      .raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::low_rank};
  enum : std::size_t { a_log, dt_bias };
  static constexpr std::array<gate_parameter, 2> parameters{
      {{.name = "A_log"}, {.name = "dt_bias", .on = axis::head_key}}};

  static double initial(std::size_t parameter, gate_element const& e) {
    return parameter == a_log ? 0.0 : detail::step_bias(e.uniform);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    T const steepness = exp(p[a_log] > T(40) ? T(40) : p[a_log]);
    return {T(-5) * sigmoid(steepness * (raw[0] + p[dt_bias])), T(1)};
  }
};
static_assert(gate<kda_bounded>);

}  // namespace seqmix::inline v0::gates
