#include <doctest/doctest.h>

#include "../support/routed_run.hpp"

// Some of the selectors that choose a chunk per query: every visibility, score, gradient and probability at least
// once. routed_attention_slow.cpp has all of them.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::exactly_one;
using selectors::own_plus_top1;
using selectors::window_plus_top1;
using enum chunk_score;
using enum chunk_gradient;

std::vector<routed_functions> some_selectors() {
  return {routed_functions_of<own_plus_top1<>>(),
          routed_functions_of<own_plus_top1<exact_mass, chunk_straight_through>>(),
          routed_functions_of<exactly_one<mean_key_prefix, chunk_straight_through, chunk_probability::score>>(),
          routed_functions_of<window_plus_top1<exact_max, gated>>()};
}

}  // namespace

DOCTEST_TEST_CASE("some routed selectors agree with the reference on ragged sizes, forward and backward") {
  index_t i = 0;
  for (auto const& f : some_selectors())
    for (index_t length : {1, 2, 3, 5, 8, 13, 16, 17, 31, 40, 64, 65, 130}) {
      auto c = ragged_case(length, i++);
      DOCTEST_INFO("selector ", (i - 1) / 13, ", length ", length, ", chunk ", c.shape.select.chunk);
      check_against_reference(f, c, 1);
    }
}

DOCTEST_TEST_CASE("some routed selectors after a past continue the sequence, and hand the past its gradient") {
  index_t i = 0;
  for (auto const& f : some_selectors())
    for (index_t held : {1, 7, 20}) {
      auto c = ragged_case(held + 5 + i % 7 * 11, i);
      DOCTEST_INFO("past ", held, ", case ", i);
      check_past(f, c, held);
      ++i;
    }
}

DOCTEST_TEST_CASE("routed attention refuses a chunk below one before it computes") {
  auto const f = some_selectors().front().of_double;
  auto c = random_attention_case(1);
  DOCTEST_CHECK_THROWS_AS(run_case<double>(f, c), value_error);
}
