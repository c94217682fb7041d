#pragma once

#include <seqmix/concepts/selector.hpp>

namespace seqmix::inline v0::selectors {

/// The last `selection::window` keys, the query's own among them (window 1 sees itself alone).
struct window {
  static constexpr std::string_view name = "window";
  static constexpr which_spec spec{.full_sequence = false, .windowed = true};
  static constexpr key_ranges blocks(index_t query, index_t, selection const& s) noexcept {
    key_ranges seen;
    seen.add({query - s.window + 1 > 0 ? query - s.window + 1 : 0, query + 1});
    return seen;
  }
};
static_assert(which<window>);

}  // namespace seqmix::inline v0::selectors
