#include "../support/law_recurrence.hpp"
#include <seqmix/gates/none.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::delta_rule;
using states::diagonal_plus_low_rank;

template <class State, class Gate>
using chunkwise = recurrence_in_form<recurrence_form::chunkwise, State, Gate>;

}  // namespace

DOCTEST_TEST_CASE(
    "the laws hold for the delta rule without a gate, with one per head, and one per channel (P-C3)") {
  check_laws<recurrence<delta_rule, gates::none>>();
  check_laws<recurrence<delta_rule, decay_per_head>>();
  check_laws<recurrence<delta_rule, given_decays<axis::head, true>>>();  // a write scale beside beta
  check_laws<recurrence<delta_rule, decay_per_channel>>();
}

DOCTEST_TEST_CASE("the laws hold for diagonal plus low rank with a gate per head and per channel (P-C3)") {
  check_laws<recurrence<diagonal_plus_low_rank, given_decays<axis::head, true>>>();
  check_laws<recurrence<diagonal_plus_low_rank, decay_per_channel>>();
}

DOCTEST_TEST_CASE("recurrences that erase give the same numbers in every chunk size and token by token") {
  for (bool extreme : {false, true}) {
    check_chunks<delta_rule, decay_per_head>(extreme);
    check_chunks<delta_rule, decay_per_channel>(extreme);
    check_chunks<diagonal_plus_low_rank, given_decays<axis::head, true>>(extreme);
    check_chunks<diagonal_plus_low_rank, decay_per_channel>(extreme);
  }
  check_chunks<delta_rule, gates::none>(false);
}

DOCTEST_TEST_CASE(
    "decays from 1 to the bound mixed in a chunk leave backward the derivative of forward where states erase") {
  for (index_t chunk : {1, 2, 3, 5, 64}) {
    check_extreme_gradients<chunkwise<delta_rule, decay_per_head>>(chunk);
    check_extreme_gradients<chunkwise<delta_rule, decay_per_channel>>(chunk);
    check_extreme_gradients<chunkwise<diagonal_plus_low_rank, decay_per_channel>>(chunk);
  }
}

DOCTEST_TEST_CASE("decays from 1 to the bound stay near the double result in float where states erase") {
  check_extremes_in_float<chunkwise<delta_rule, decay_per_head>>(5e-5);
  check_extremes_in_float<chunkwise<delta_rule, decay_per_channel>>(5e-5);
  check_extremes_in_float<chunkwise<diagonal_plus_low_rank, decay_per_channel>>(5e-5);
}
