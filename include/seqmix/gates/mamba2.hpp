#pragma once

#include <seqmix/gates/detail/softplus_rate.hpp>

namespace seqmix::inline v0::gates {

/// Mamba-2's gate per head and token: step Delta = softplus(raw + dt_bias), log-decay -e^A_log Delta, write scale
/// Delta. Source: Dao, Gu, "Transformers are SSMs" (arXiv 2405.21060), section 7; initialisation of its code:
/// A ~ U(1,16), Delta log-uniform in [1e-3, 1e-1], at least 1e-4. No weight decay on either parameter.
struct mamba2 {
  static constexpr std::string_view name = "mamba2";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .writes = true};
  enum : std::size_t { a_log, dt_bias };
  static constexpr std::array<gate_parameter, 2> parameters{
      {{.name = "A_log", .log_rate = true}, {.name = "dt_bias"}}};

  static double initial(std::size_t parameter, gate_element const& e) {
    return parameter == a_log ? std::log(1.0 + 15.0 * e.uniform) : detail::step_bias(e.uniform);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    T const z = raw[0] + p[dt_bias];
    return {detail::softplus_rate<T>(p[a_log], z), softplus(z)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 2> const& p, T d_log_decay, T d_write,
                       std::array<T, 1>& d_raw, std::array<T, 2>& d_p) noexcept {
    T const z = raw[0] + p[dt_bias];
    auto const slope = detail::slopes_of_softplus_rate(p[a_log], z);
    d_p[a_log] = d_log_decay * slope.a_log;
    d_p[dt_bias] = d_raw[0] = d_log_decay * slope.z + d_write * sigmoid(z);
  }
};
static_assert(gate<mamba2>);

}  // namespace seqmix::inline v0::gates
