#pragma once

#include <seqmix/gates/detail/softplus_rate.hpp>

namespace seqmix::inline v0::gates {

/// Mamba-3's gate per head and token: step Delta = softplus(raw_step + dt_bias) and a rate that depends on the
/// token too, A = max(f(raw_rate), 1e-4) with f(x) = 1 + x for x >= 0 and 1 / (1 - x) below: log-decay -A Delta,
/// write scale Delta. How much of Delta belongs to the previous token (the trapezoid's lambda) is no part of the
/// gate. dt_bias starts as Mamba-2's; no weight decay on it. Source: Lahoti et al., "Mamba-3" (arXiv 2603.15569),
/// and the rate of its authors' code.
struct mamba3 {
  static constexpr std::string_view name = "mamba3";
  static constexpr gate_spec spec{.raws = 2, .from = feed::linear, .writes = true};
  enum : std::size_t { raw_step, raw_rate };
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "dt_bias"}}};

  static double initial(std::size_t, gate_element const& e) { return detail::step_bias(e.uniform); }
  template <class T>
  static gate_value<T> forward(std::array<T, 2> const& raw, std::array<T, 1> const& p) noexcept {
    T const x = raw[raw_rate], step = softplus(raw[raw_step] + p[0]);
    T const f = x < T(0) ? T(1) / (T(1) - x) : T(1) + x;
    T const rate = f < T(1e-4) ? T(1e-4) : f;
    return {-(rate * step), step};
  }
};
static_assert(gate<mamba3>);

}  // namespace seqmix::inline v0::gates
