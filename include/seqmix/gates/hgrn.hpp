#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// HGRN's forget gate per channel (a head here) and token: f = lb + (1 - lb) sigmoid(W x), log-decay log f, write
/// scale 1 - f. The lower bound lb grows from layer to layer: a cumulative softmax over the layers of one tensor of
/// the model, which starts at 0; layer 0 has none (lb = 0). Source: Qin, Yang, Zhong, "Hierarchically Gated
/// Recurrent Neural Network" (arXiv 2311.04823).
struct hgrn {
  static constexpr std::string_view name = "hgrn";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .writes = true};
  static constexpr std::array<gate_parameter, 1> parameters{
      {{.name = "lower_bound", .source = parameter_source::cumulative_softmax}}};

  static double initial(std::size_t, gate_element const&) { return 0.0; }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {log_floored_sigmoid(raw[0], p[0]), (T(1) - p[0]) * sigmoid(-raw[0])};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 1> const& p, T d_log_decay, T d_write,
                       std::array<T, 1>& d_raw, std::array<T, 1>& d_p) noexcept {
    auto const slope = slopes_of_log_floored_sigmoid(raw[0], p[0]);
    T const miss = sigmoid(-raw[0]);
    T const d = log_floored_sigmoid(raw[0], p[0]) < log_decay_bound<T> ? T(0) : d_log_decay;
    d_raw[0] = d * slope.x - d_write * (T(1) - p[0]) * sigmoid(raw[0]) * miss;
    d_p[0] = d * slope.floor - d_write * miss;
  }
};
static_assert(gate<hgrn>);

}  // namespace seqmix::inline v0::gates
