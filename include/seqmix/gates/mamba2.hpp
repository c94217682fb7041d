#pragma once

#include <algorithm>

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// Mamba-2's gate per head and token: step Delta = softplus(raw + dt_bias), log-decay -e^A_log Delta, write scale
/// Delta. Formed as one exponential of a sum, so that a huge A_log and a tiny Delta never meet as inf * 0. Source:
/// Dao, Gu, "Transformers are SSMs" (arXiv 2405.21060), section 7; initialisation of its code: A ~ U(1,16), Delta
/// log-uniform in [1e-3, 1e-1], at least 1e-4. No weight decay on either parameter.
struct mamba2 {
  static constexpr std::string_view name = "mamba2";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .writes = true};
  enum : std::size_t { a_log, dt_bias };
  static constexpr std::array<gate_parameter, 2> parameters{{{.name = "A_log"}, {.name = "dt_bias"}}};

  static double initial(std::size_t parameter, gate_element const& e) {
    if (parameter == a_log) return std::log(1.0 + 15.0 * e.uniform);
    double const step = (std::max)(1e-4, std::exp(std::log(1e-3) + e.uniform * std::log(1e2)));
    return step + std::log(-std::expm1(-step));  // the inverse of softplus
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 2> const& p) noexcept {
    T const z = raw[0] + p[dt_bias];
    return {-exp(p[a_log] + log_softplus(z)), softplus(z)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 2> const& p, T d_log_decay, T d_write,
                       std::array<T, 1>& d_raw, std::array<T, 2>& d_p) noexcept {
    T const z = raw[0] + p[dt_bias];
    T const rate = -exp(p[a_log] + log_softplus(z));
    T const slope = sigmoid(z);
    bool const bounded = rate < log_decay_bound<T>;
    d_p[a_log] = bounded ? T(0) : d_log_decay * rate;
    // rate * sigmoid / softplus, whose ratio tends to 1 where both underflow
    T const ratio = z < T(-30) ? T(1) : slope / softplus(z);
    d_raw[0] = (bounded ? T(0) : d_log_decay * rate * ratio) + d_write * slope;
    d_p[dt_bias] = d_raw[0];
  }
};
static_assert(gate<mamba2>);

}  // namespace seqmix::inline v0::gates
