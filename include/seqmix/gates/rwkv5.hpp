#pragma once

#include <seqmix/gates/detail/rwkv_start.hpp>

namespace seqmix::inline v0::gates {

/// RWKV-5's trained decay per key channel, the same at every token: log-decay -e^time_decay. Start: time_decay =
/// -6 + 5 (n / (C - 1))^(0.7 + 1.3 l / (L - 1)) for channel n of C (all heads) in layer l of L; no weight decay on
/// it. Source: Peng et al., "Eagle and Finch" (arXiv 2404.05892), and its authors' code.
struct rwkv5 {
  static constexpr std::string_view name = "rwkv5";
  static constexpr gate_spec spec{.decay = axis::head_key};
  static constexpr std::array<gate_parameter, 1> parameters{
      {{.name = "time_decay", .on = axis::head_key, .log_rate = true}}};

  static double initial(std::size_t, gate_element const& e) { return detail::time_decay(e); }
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]), T(1)};
  }
};
static_assert(gate<rwkv5>);

}  // namespace seqmix::inline v0::gates
