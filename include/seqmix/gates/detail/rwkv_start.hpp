#pragma once

#include <seqmix/concepts/gate.hpp>

/// Where an element stands in RWKV's rules for start values.
namespace seqmix::inline v0::gates::detail {

/// n / (C - 1) of channel n of C, 0 for a single channel.
inline double channel_place(index_t n, index_t channels) {
  return channels > 1 ? double(n) / double(channels - 1) : 0.0;
}
/// The same where channels are heads times keys.
inline double channel_place(gate_element const& e) {
  return channel_place(e.head * e.keys + e.key, e.heads * e.keys);
}
/// layer / (layers - 1), 0 for a single layer.
inline double depth(gate_element const& e) { return channel_place(e.layer, e.layers); }

/// -6 + 5 (n / (C - 1))^(0.7 + 1.3 depth): time_decay of RWKV-5 and -6.
inline double time_decay(gate_element const& e) {
  return -6.0 + 5.0 * std::pow(channel_place(e), 0.7 + 1.3 * depth(e));
}

}  // namespace seqmix::inline v0::gates::detail
