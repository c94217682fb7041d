#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// mLSTM's gates per head and token: log-decay log sigmoid(raw_f); what is written is scaled by e^raw_i, whose
/// logarithm goes to a stabilised state. Start of the biases: of f spaced evenly from 3 to 6 over the heads, of i
/// N(0, 0.1). Source: Beck et al., "xLSTM" (arXiv 2405.04517), equations 19 to 27, and its authors' code.
struct mlstm {
  static constexpr std::string_view name = "mlstm";
  static constexpr gate_spec spec{.raws = 2, .from = feed::linear, .bias = true, .writes = true, .log_write = true};
  enum : std::size_t { forget_gate, input_gate };
  static constexpr std::array<gate_parameter, 0> parameters{};

  static double bias_initial(std::size_t raw, gate_element const& e) {
    if (raw == input_gate) return 0.1 * inverse_normal(e.uniform);
    return 3.0 + (e.heads > 1 ? 3.0 * double(e.head) / double(e.heads - 1) : 0.0);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 2> const& raw, std::array<T, 0> const&) noexcept {
    return {seqmix::log_sigmoid(raw[forget_gate]), raw[input_gate]};
  }

 private:
  /// The x below which a standard normal number lies with probability u: a rational start (Abramowitz, Stegun,
  /// 26.2.23) and Newton's rule.
  static double inverse_normal(double u) {
    if (u > 0.5) return -inverse_normal(1.0 - u);
    double const t = std::sqrt(-2.0 * std::log(u));
    double x =
        (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))) - t;
    for (int i = 0; i < 3; ++i)
      x += (u - 0.5 * std::erfc(-x * 0.7071067811865476)) * 2.5066282746310002 * std::exp(0.5 * x * x);
    return x;
  }
};
static_assert(gate<mlstm>);

}  // namespace seqmix::inline v0::gates
