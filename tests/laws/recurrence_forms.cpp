#include "../support/law_recurrence.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/none.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::outer_product;
using decay_and_write = given_decays<axis::head, true>;

template <class Gate>
using chunkwise = recurrence_in_form<recurrence_form::chunkwise, outer_product, Gate>;
template <class Gate>
using sequential = recurrence_in_form<recurrence_form::sequential, outer_product, Gate>;

}  // namespace

DOCTEST_TEST_CASE("an additive recurrence gives the same numbers in every chunk size and token by token") {
  for (bool extreme : {false, true}) {
    check_chunks<outer_product, decay_and_write>(extreme);
    check_chunks<outer_product, decay_per_channel>(extreme);
    check_chunks<outer_product, gates::constant>(extreme);
  }
  check_chunks<outer_product, gates::none>(false);
}

DOCTEST_TEST_CASE("decays from 1 to the bound mixed in a chunk leave backward the derivative of forward") {
  for (index_t chunk : {1, 2, 3, 5, 64}) {
    check_extreme_gradients<chunkwise<decay_and_write>>(chunk);
    check_extreme_gradients<chunkwise<decay_per_channel>>(chunk);
    check_extreme_gradients<sequential<decay_and_write>>(chunk);
    check_extreme_gradients<sequential<decay_per_channel>>(chunk);
  }
}

DOCTEST_TEST_CASE(
    "decays from 1 to the bound stay finite in float and near the double result, forward and backward") {
  check_extremes_in_float<chunkwise<decay_and_write>>(2e-5);
  check_extremes_in_float<chunkwise<decay_per_channel>>(2e-5);
}

DOCTEST_TEST_CASE("the laws hold for the sequential form, and for a decay per channel (P-C3, P-S2)") {
  check_laws<sequential<decay_and_write>>();
  check_laws<recurrence<outer_product, decay_per_channel>>();
}
