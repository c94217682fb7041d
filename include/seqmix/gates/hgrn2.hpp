#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// HGRN2's forget gate per key channel and token: f = lb + (1 - lb) sigmoid(W x), log-decay log f. The lower bound
/// is that of `hgrn`, per key channel. What is written, the key 1 - f, is the layer's. Source: Qin et al., "HGRN2"
/// (arXiv 2404.07904).
struct hgrn2 {
  static constexpr std::string_view name = "hgrn2";
  static constexpr gate_spec spec{.raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::linear};
  static constexpr std::array<gate_parameter, 1> parameters{
      {{.name = "lower_bound", .on = axis::head_key, .source = parameter_source::cumulative_softmax}}};

  static double initial(std::size_t, gate_element const&) { return 0.0; }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {log_floored_sigmoid(raw[0], p[0]), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 1> const& p, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 1>& d_p) noexcept {
    auto const slope = slopes_of_log_floored_sigmoid(raw[0], p[0]);
    T const d = log_floored_sigmoid(raw[0], p[0]) < log_decay_bound<T> ? T(0) : d_log_decay;
    d_raw[0] = d * slope.x;
    d_p[0] = d * slope.floor;
  }
};
static_assert(gate<hgrn2>);

}  // namespace seqmix::inline v0::gates
