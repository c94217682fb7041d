#pragma once

#include <seqmix/gates/detail/rwkv_start.hpp>

namespace seqmix::inline v0::gates {

/// RWKV-6's gate per key channel and token: log-decay -e^w, w = time_decay + tanh(x D1) D2, rank 64. time_decay
/// starts as RWKV-5's; no weight decay on it. Source: Peng et al., "Eagle and Finch" (arXiv 2404.05892), and its
/// authors' code.
struct rwkv6 {
  static constexpr std::string_view name = "rwkv6";
  static constexpr gate_spec spec{
      .raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::low_rank, .inside = hidden::tanh};
  static constexpr std::array<gate_parameter, 1> parameters{
      {{.name = "time_decay", .on = axis::head_key, .log_rate = true}}};

  static double initial(std::size_t, gate_element const& e) { return detail::time_decay(e); }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0] + raw[0]), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 1> const& p, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 1>& d_p) noexcept {
    T const g = -exp(p[0] + raw[0]);
    d_p[0] = d_raw[0] = g < log_decay_bound<T> ? T(0) : d_log_decay * g;
  }
};
static_assert(gate<rwkv6>);

}  // namespace seqmix::inline v0::gates
