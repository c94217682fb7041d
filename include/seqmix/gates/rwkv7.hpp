#pragma once

#include <seqmix/gates/detail/rwkv_start.hpp>

namespace seqmix::inline v0::gates {

/// RWKV-7's gate per key channel and token: log-decay -e^(-1/2) sigmoid(w0 + tanh(x W1) W2), so that a decay lies
/// between 0.545 and 1. Start of w0 for channel n of C, N to a head, in layer l of L: -5.5 + 6 (n / (C-1))^(1 + r)
/// + 2.5 z |z|, r = (l / (L-1))^0.3, z from -1 to 1 over the head; no weight decay on it. Source: Peng et al.,
/// "RWKV-7 Goose" (arXiv 2503.14456), its appendix on initialisation, and its authors' code.
struct rwkv7 {
  static constexpr std::string_view name = "rwkv7";
  static constexpr gate_spec spec{
      .raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::low_rank, .inside = hidden::tanh};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "w0", .on = axis::head_key}}};
  static constexpr double most = 0.6065306597126334;  ///< e^(-1/2)

  static double initial(std::size_t, gate_element const& e) {
    double const place = std::pow(detail::channel_place(e), 1.0 + std::pow(detail::depth(e), 0.3));
    double const z = e.keys > 1 ? 2.0 * detail::channel_place(e.key, e.keys) - 1.0 : 0.0;
    return -6.0 + 6.0 * place + 0.5 + 2.5 * z * std::abs(z);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {T(-most) * sigmoid(p[0] + raw[0]), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 1> const& p, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 1>& d_p) noexcept {
    T const w = p[0] + raw[0];
    d_p[0] = d_raw[0] = d_log_decay * T(-most) * sigmoid(w) * sigmoid(-w);
  }
};
static_assert(gate<rwkv7>);

}  // namespace seqmix::inline v0::gates
