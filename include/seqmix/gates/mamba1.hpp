#pragma once

#include <seqmix/gates/detail/softplus_rate.hpp>

namespace seqmix::inline v0::gates {

/// Mamba-1's gate: a step per channel d and token, Delta_d = softplus(W2 W1 u + dt_bias) of the convolved values u,
/// times a rate per channel and state, A_dn = e^A_log: log-decay -A_dn Delta_d, write scale Delta_d. A channel is a
/// head, a state a key; the decay is factored, so that no [rows, channels, states] array of decays is stored.
/// Initialisation: A_dn = n + 1, Delta log-uniform in [1e-3, 1e-1], at least 1e-4; no weight decay on either.
/// Source: Gu, Dao, "Mamba" (arXiv 2312.00752), algorithm 2, and its authors' code.
struct mamba1 {
  static constexpr std::string_view name = "mamba1";
  static constexpr gate_spec spec{.raws = 1,
                                  .decay = axis::head_key,
                                  .from = feed::low_rank,
                                  .writes = true,
                                  .source = feed_source::convolved,
                                  .factored = true};
  enum : std::size_t { a_log, dt_bias };
  static constexpr std::array<gate_parameter, 2> parameters{
      {{.name = "A_log", .on = axis::head_key, .log_rate = true}, {.name = "dt_bias"}}};

  static double initial(std::size_t parameter, gate_element const& e) {
    return parameter == a_log ? std::log(double(e.key + 1)) : detail::step_bias(e.uniform);
  }
  template <class T>
  static T log_rate(std::array<T, 2> const& p) noexcept {
    return p[a_log];
  }
  template <class T>
  static T log_step(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    return log_softplus(raw[0] + p[dt_bias]);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    T const z = raw[0] + p[dt_bias];
    return {detail::softplus_rate<T>(p[a_log], z), softplus(z)};
  }
};
static_assert(gate<mamba1>);

}  // namespace seqmix::inline v0::gates
