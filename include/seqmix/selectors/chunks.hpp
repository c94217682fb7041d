#pragma once

#include <string>

#include <seqmix/concepts/selector.hpp>

/// The routed selectors: each query chooses one chunk C_c = [c B, (c+1) B), B = selection::chunk, or the best
/// selection::top_k of them, by a score of the whole chunk; the lowest indices win ties; choice -1 stands for "no
/// candidate". The chunk that is forming counts as the query's own and is never among the chosen ones, except where
/// it competes. Source: chunk selection of Lu et al. (arXiv 2505.18522), in the readings that docs/concepts.md
/// lists.
namespace seqmix::inline v0::selectors {

namespace detail {
/// Chunk c as far as the query may see it.
constexpr key_range chunk_range(index_t c, index_t query, selection const& s) noexcept {
  index_t const end = (c + 1) * s.chunk;
  return {c * s.chunk, end < query + 1 ? end : query + 1};
}
inline std::string routing_details(which_spec const& spec) {
  constexpr char const* scores[] = {"mean_key", "mean_key_prefix", "exact_mass", "exact_max"};
  constexpr char const* gradients[] = {"index_constant", "chunk_straight_through", "gated"};
  std::string text = std::string("score=") + scores[int(spec.score)] + ",gradient=" + gradients[int(spec.gradient)];
  return spec.probability == chunk_probability::score ? text + ",probability=score" : text;
}
/// The query's own chunk, and the chosen one.
constexpr key_ranges own_and_chosen(index_t query, index_t choice, selection const& s) noexcept {
  key_ranges seen;
  if (choice >= 0) seen.add(chunk_range(choice, query, s));
  seen.add(chunk_range(query / s.chunk, query, s));
  return seen;
}
/// The last `selection::window` keys, and the chosen chunk as far as it lies behind them.
constexpr key_ranges window_and_chosen(index_t query, index_t choice, selection const& s) noexcept {
  index_t const near = query - s.window + 1 > 0 ? query - s.window + 1 : 0;
  key_ranges seen;
  if (choice >= 0) {
    auto far = chunk_range(choice, query, s);
    far.end = far.end < near ? far.end : near;
    seen.add(far);
  }
  seen.add({near, query + 1});
  return seen;
}
}  // namespace detail

/// The query's own chunk always, and the best earlier one, under one softmax.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant,
          chunk_probability Probability = chunk_probability::mass>
struct own_plus_top1 {
  static constexpr std::string_view name = "own_plus_top1";
  static constexpr which_spec spec{
      .routed = true, .own_chunk = true, .score = Score, .gradient = Gradient, .probability = Probability};
  static std::string details() { return detail::routing_details(spec); }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    return detail::own_and_chosen(query, choice, s);
  }
};

/// The query's own chunk always, and the best selection::top_k earlier ones, under one softmax. With mean_key and
/// top_k = topk - 1 this is MoBA (arXiv 2502.13189), whose topk counts the own chunk.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant,
          chunk_probability Probability = chunk_probability::mass>
struct own_plus_top_k {
  static constexpr std::string_view name = "own_plus_top_k";
  static constexpr which_spec spec{.routed = true,
                                   .own_chunk = true,
                                   .score = Score,
                                   .gradient = Gradient,
                                   .probability = Probability,
                                   .several = true};
  static std::string details() { return detail::routing_details(spec); }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    return detail::own_and_chosen(query, choice, s);
  }
};

/// The best chunk alone, the query's own partial one among the candidates.
template <chunk_score Score = chunk_score::mean_key_prefix,
          chunk_gradient Gradient = chunk_gradient::index_constant,
          chunk_probability Probability = chunk_probability::mass>
struct exactly_one {
  static_assert(
      Score != chunk_score::mean_key,
      "seqmix selector: exactly_one with mean_key would average keys of the future in the query's own chunk; "
      "take mean_key_prefix");
  static constexpr std::string_view name = "exactly_one";
  static constexpr which_spec spec{
      .routed = true, .own_competes = true, .score = Score, .gradient = Gradient, .probability = Probability};
  static std::string details() { return detail::routing_details(spec); }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    key_ranges seen;
    if (choice >= 0) seen.add(detail::chunk_range(choice, query, s));
    return seen;
  }
};

/// The last `selection::window` keys, and the best chunk before the query's own; a key in both counts once.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant,
          chunk_probability Probability = chunk_probability::mass>
struct window_plus_top1 {
  static constexpr std::string_view name = "window_plus_top1";
  static constexpr which_spec spec{
      .routed = true, .windowed = true, .score = Score, .gradient = Gradient, .probability = Probability};
  static std::string details() { return detail::routing_details(spec); }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    return detail::window_and_chosen(query, choice, s);
  }
};

/// The last `selection::window` keys, and the best selection::top_k chunks before the query's own.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant,
          chunk_probability Probability = chunk_probability::mass>
struct window_plus_top_k {
  static constexpr std::string_view name = "window_plus_top_k";
  static constexpr which_spec spec{.routed = true,
                                   .windowed = true,
                                   .score = Score,
                                   .gradient = Gradient,
                                   .probability = Probability,
                                   .several = true};
  static std::string details() { return detail::routing_details(spec); }
  static constexpr key_ranges blocks(index_t query, index_t choice, selection const& s) noexcept {
    return detail::window_and_chosen(query, choice, s);
  }
};

static_assert(which<own_plus_top1<>> && which<exactly_one<>> && which<window_plus_top1<>>);
static_assert(which<own_plus_top_k<>> && which<window_plus_top_k<>>);

}  // namespace seqmix::inline v0::selectors
