#pragma once

#include <seqmix/concepts/gate.hpp>

namespace seqmix::inline v0::gates {

/// Gated linear attention's gate per key channel and token: log-decay log sigmoid(W2 W1 x + b) / 16, rank 16. The
/// bias starts at 0, as in the language model of its authors' code. Source: Yang et al., "Gated Linear Attention
/// Transformers" (arXiv 2312.06635), with gate_logit_normalizer 16.
struct gla {
  static constexpr std::string_view name = "gla";
  static constexpr gate_spec spec{
      .raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::low_rank, .bias = true};
  static constexpr std::array<gate_parameter, 0> parameters{};

  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {seqmix::log_sigmoid(raw[0]) * T(0.0625), T(1)};
  }
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 0> const&, T d_log_decay, T,
                       std::array<T, 1>& d_raw, std::array<T, 0>&) noexcept {
    bool const bounded = seqmix::log_sigmoid(raw[0]) * T(0.0625) < log_decay_bound<T>;
    d_raw[0] = bounded ? T(0) : d_log_decay * sigmoid(-raw[0]) * T(0.0625);
  }
};
static_assert(gate<gla>);

}  // namespace seqmix::inline v0::gates
