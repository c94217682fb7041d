#pragma once

#include <seqmix/gates/detail/rwkv_start.hpp>

namespace seqmix::inline v0::gates {

/// RWKV-4's gate: a trained decay per channel (a head here), the same at every token, log-decay -e^time_decay; and
/// the key k = W x as the logarithm of what is written, for a stabilised state. Start: time_decay =
/// -5 + 8 (n / (C - 1))^(0.7 + 1.3 l / (L - 1)) for channel n of C in layer l of L; no weight decay on it. Source:
/// Peng et al., "RWKV" (arXiv 2305.13048), its appendix on initialisation, and its authors' code.
struct rwkv4 {
  static constexpr std::string_view name = "rwkv4";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .writes = true, .log_write = true};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "time_decay", .log_rate = true}}};

  static double initial(std::size_t, gate_element const& e) {
    return -5.0 + 8.0 * std::pow(detail::channel_place(e.head, e.heads), 0.7 + 1.3 * detail::depth(e));
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]), raw[0]};
  }
};
static_assert(gate<rwkv4>);

}  // namespace seqmix::inline v0::gates
