#include "../support/laws.hpp"
#include <seqmix/gates/alibi.hpp>
#include <seqmix/mixers/attention.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::exactly_one;
using selectors::softmax;
using selectors::window_plus_top1;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for Top-1 chunk selection beside the own chunk (P-C3, P-S2)") {
  check_laws<attention<selectors::top1_chunk<>>>();
}

DOCTEST_TEST_CASE("the laws hold for exactly one chunk with a straight-through surrogate (P-C3, P-S2)") {
  check_laws<attention<exactly_one<chunk_score::mean_key_prefix, chunk_gradient::chunk_straight_through>>>();
}

DOCTEST_TEST_CASE("the laws hold for exactly one chunk by mass, gated, under ALiBi's slopes (P-C3, P-S2)") {
  check_laws<attention<exactly_one<chunk_score::exact_mass, chunk_gradient::gated>, gates::alibi>>();
}

DOCTEST_TEST_CASE("the laws hold for a window and the best chunk behind it (P-C3, P-S2)") {
  check_laws<attention<window_plus_top1<>>>();
}
