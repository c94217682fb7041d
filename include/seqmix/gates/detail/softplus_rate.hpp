#pragma once

#include <algorithm>

#include <seqmix/concepts/gate.hpp>

/// What the gates with a step Delta = softplus(z) and a decay rate e^a_log share: Mamba-1 and -2, Gated DeltaNet,
/// Kimi Delta Attention.
namespace seqmix::inline v0::gates::detail {

/// -e^a_log softplus(z), formed as one exponential of a sum, so that a huge a_log and a tiny step never meet as
/// inf * 0.
template <class T>
T softplus_rate(T const& a_log, T const& z) noexcept {
  return -exp(a_log + log_softplus(z));
}

template <class T>
struct softplus_rate_slopes {
  T a_log, z;
};
/// Its derivatives, 0 where the log-decay is at its bound.
template <std::floating_point T>
softplus_rate_slopes<T> slopes_of_softplus_rate(T a_log, T z) noexcept {
  T const rate = softplus_rate(a_log, z);
  if (rate < log_decay_bound<T>) return {T(0), T(0)};
  return {rate, rate * log_softplus_slope(z)};
}

/// The bias z of a step that is log-uniform in [1e-3, 1e-1] and at least 1e-4: Mamba's, taken over by all.
inline double step_bias(double uniform) {
  return inverse_softplus((std::max)(1e-4, std::exp(std::log(1e-3) + uniform * std::log(1e2))));
}

}  // namespace seqmix::inline v0::gates::detail
