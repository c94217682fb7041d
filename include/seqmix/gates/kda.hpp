#pragma once

#include <seqmix/gates/detail/softplus_rate.hpp>

namespace seqmix::inline v0::gates {

/// Kimi Delta Attention's gate per key channel and token: log-decay -e^A_log softplus(W2 W1 x + dt_bias), A_log per
/// head, dt_bias per channel, the low rank that of a value head, no biases. Initialisation: A ~ U(1,16),
/// softplus(dt_bias) log-uniform in [1e-3, 1e-1], at least 1e-4; no weight decay on either. Source: Kimi Team,
/// "Kimi Linear" (arXiv 2510.26692), and the code published with it.
struct kda {
  static constexpr std::string_view name = "kda";
  static constexpr gate_spec spec{
      .raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::low_rank};
  enum : std::size_t { a_log, dt_bias };
  static constexpr std::array<gate_parameter, 2> parameters{
      {{.name = "A_log", .log_rate = true}, {.name = "dt_bias", .on = axis::head_key}}};

  static double initial(std::size_t parameter, gate_element const& e) {
    return parameter == a_log ? std::log(1.0 + 15.0 * e.uniform) : detail::step_bias(e.uniform);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    return {detail::softplus_rate<T>(p[a_log], raw[0] + p[dt_bias]), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 2> const& p, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 2>& d_p) noexcept {
    auto const slope = detail::slopes_of_softplus_rate(p[a_log], raw[0] + p[dt_bias]);
    d_p[a_log] = d_log_decay * slope.a_log;
    d_p[dt_bias] = d_raw[0] = d_log_decay * slope.z;
  }
};
static_assert(gate<kda>);

}  // namespace seqmix::inline v0::gates
