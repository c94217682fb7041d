#pragma once

#include <string>

#include <seqmix/selectors/chunks.hpp>

/// The two selectors that read chunks through their means, B = selection::chunk. Source: the compression and the
/// selection branch of native sparse attention (arXiv 2502.11089, equations 7 to 12, with mean pooling).
namespace seqmix::inline v0::selectors {

/// One key and one value per chunk, the means of its tokens; a query sees the chunks that end at or before it.
/// Before the first complete chunk the output is zero. Ranges count chunks.
struct compressed {
  static constexpr std::string_view name = "compressed";
  static constexpr which_spec spec{.full_sequence = false, .compressed = true};
  static constexpr key_ranges blocks(index_t query, index_t, selection const& s) noexcept {
    key_ranges seen;
    seen.add({0, (query + 1) / s.chunk});
    return seen;
  }
};

/// The own chunk always, and selection::top_k earlier ones, under one softmax: first the forced ones, then the best
/// by the weights that `compressed` gives them, added up over the query heads that share a key head. The choice is
/// constant to the gradient. The published block count n counts the own chunk: top_k = n - 1. With
/// first_and_previous, chunk 0 and the chunk before the own one take a place each; none leaves all to the scores.
template <forced_chunks Forced = forced_chunks::first_and_previous>
struct top_k_by_compression {
  static constexpr std::string_view name = "top_k_by_compression";
  static constexpr which_spec spec{
      .routed = true, .own_chunk = true, .several = true, .forced = Forced, .by_compression = true};
  static std::string details() {
    return Forced == forced_chunks::none ? "forced=none" : "forced=first_and_previous";
  }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    return detail::own_and_chosen(query, choice, s);
  }
};

static_assert(which<compressed> && which<top_k_by_compression<>>);

}  // namespace seqmix::inline v0::selectors
