#pragma once

#include <seqmix/concepts/state.hpp>

namespace seqmix::inline v0::states {

/// RWKV-4's weighted mean: N = e^g N + e^write v and M = e^g M + e^write, both relative to their running maximum,
/// read before the write as (N + e^(bonus + write) v) / (M + e^(bonus + write)). No keys, no queries: a head is a
/// channel. Source: Peng et al. (arXiv 2305.13048), the WKV operator.
struct wkv {
  static constexpr std::string_view name = "wkv";
  static constexpr state_spec spec{.kind = state_kind::stabilised, .read = read_order::exclusive};
  static constexpr stabilised_spec stabilised{.keyed = false};
};
static_assert(state<wkv>);

}  // namespace seqmix::inline v0::states
