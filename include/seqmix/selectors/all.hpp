#pragma once

#include <seqmix/concepts/selector.hpp>

namespace seqmix::inline v0::selectors {

/// Every key up to the query itself.
struct all {
  static constexpr std::string_view name = "all";
  static constexpr which_spec spec{};
  static constexpr key_ranges blocks(index_t query, index_t, selection const&) noexcept {
    key_ranges seen;
    seen.add({0, query + 1});
    return seen;
  }
};
static_assert(which<all>);

}  // namespace seqmix::inline v0::selectors
