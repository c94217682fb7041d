#include <set>
#include <string>

#include <doctest/doctest.h>

#include <seqmix/selectors/select.hpp>

// What each `which` shows, key by key against its sentence, and that a selector's name tells it from all others.

namespace {

using namespace seqmix;
using namespace seqmix::selectors;
using enum chunk_score;
using enum chunk_gradient;

/// The visible keys of Which are those of expected(key, choice), each in one range only, for queries 0 .. 39.
template <class Which, class Expected>
void check_visible(selection const& s, Expected const& expected) {
  for (index_t query = 0; query < 40; ++query)
    for (index_t choice = -1; choice < query / s.chunk; ++choice) {
      auto const seen = Which::blocks(query, choice, s);
      index_t count = 0;
      bool good = true;
      for (index_t key = 0; key < 45; ++key) {
        bool const visible = key <= query && expected(query, key, choice);
        good = good && seen.contains(key) == visible;
        count += visible;
      }
      DOCTEST_CHECK_MESSAGE(good, std::string(Which::name), ", query ", query, ", choice ", choice);
      DOCTEST_CHECK(seen.size() == count);
      for (int i = 1; i < seen.count; ++i)
        DOCTEST_CHECK(seen.range[std::size_t(i - 1)].end <= seen.range[std::size_t(i)].begin);
    }
}

template <class Which>
std::string named() {
  return std::string(Which::name) + "," + Which::details();
}

}  // namespace

DOCTEST_TEST_CASE("routed selectors show the chosen chunk beside what they always show, never a later key") {
  selection const s{.window = 7, .chunk = 5, .top_k = 2};
  auto const own = [&](index_t query, index_t key, index_t choice) {
    return key / s.chunk == query / s.chunk || (choice >= 0 && key / s.chunk == choice);
  };
  auto const near = [&](index_t query, index_t key, index_t choice) {
    return query - key < s.window || (choice >= 0 && key / s.chunk == choice);
  };
  check_visible<own_plus_top1<>>(s, own);
  check_visible<own_plus_top_k<>>(s, own);
  check_visible<top_k_by_compression<>>(s, own);
  check_visible<window_plus_top1<>>(s, near);
  check_visible<window_plus_top_k<>>(s, near);
  check_visible<exactly_one<>>(
      s, [&](index_t, index_t key, index_t choice) { return choice >= 0 && key / s.chunk == choice; });
  // Of compressed keys, the index counts chunks that end at or before the query.
  check_visible<compressed>(s,
                            [&](index_t query, index_t key, index_t) { return (key + 1) * s.chunk <= query + 1; });
}

DOCTEST_TEST_CASE("a selector's name says which score chose and which surrogate learns") {
  std::set<std::string> const names{
      named<own_plus_top1<>>(),
      named<own_plus_top1<mean_key, gated>>(),
      named<own_plus_top1<exact_mass, gated>>(),
      named<own_plus_top_k<>>(),
      named<own_plus_top_k<mean_key, chunk_straight_through>>(),
      named<own_plus_top_k<mean_key, chunk_straight_through, chunk_probability::score>>(),
      named<window_plus_top1<>>(),
      named<window_plus_top_k<>>(),
      named<exactly_one<>>(),
      named<top_k_by_compression<>>(),
      named<top_k_by_compression<forced_chunks::none>>(),
      named<top1<>>(),
      named<top1<top1_output::weighted>>(),
      named<top1<top1_output::weighted, top1_gradient::selected_weight>>(),
      named<top1<top1_output::hard, top1_gradient::none>>()};
  DOCTEST_CHECK(names.size() == 15);
  DOCTEST_CHECK(named<own_plus_top_k<exact_max, gated>>() == "own_plus_top_k,score=exact_max,gradient=gated");
}
