#pragma once

#include <seqmix/concepts/state.hpp>

namespace seqmix::inline v0::states {

/// Every key and value of the sequence (the last `window` ones when a window bounds what is read): attention's
/// cache.
struct history {
  static constexpr std::string_view name = "history";
  static constexpr state_spec spec{.kind = state_kind::history};
};
static_assert(state<history>);

}  // namespace seqmix::inline v0::states
