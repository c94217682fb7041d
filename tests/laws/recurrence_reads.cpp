#include "../support/law_recurrence.hpp"
#include <seqmix/gates/none.hpp>

// States that no key addresses, states that are read before they are written, and decays given by steps and rates.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::delta_rule;
using states::elementwise;
using states::exclusive;
using states::outer_product;
using decay_and_write = given_decays<axis::head, true>;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for an elementwise state (P-C3)") {
  check_laws<recurrence<elementwise, gates::none>>();
  check_laws<recurrence<elementwise, decay_and_write>>();
  check_laws<recurrence<exclusive<elementwise>, decay_and_write>>();
}

DOCTEST_TEST_CASE("the laws hold for states read before they are written (P-C3)") {
  check_laws<recurrence<exclusive<outer_product>, decay_and_write>>();
  check_laws<recurrence<exclusive<outer_product>, decay_per_channel>>();
}

DOCTEST_TEST_CASE("the laws hold for decays that are steps times rates (P-C3)") {
  check_laws<recurrence<outer_product, factored_decays>>();
  check_laws<recurrence<delta_rule, factored_decays>>();
}

DOCTEST_TEST_CASE(
    "exclusive reads and factored decays give the same numbers in every chunk size and token by token") {
  for (bool extreme : {false, true}) {
    check_chunks<exclusive<outer_product>, decay_and_write>(extreme);
    check_chunks<exclusive<outer_product>, decay_per_channel>(extreme);
    check_chunks<exclusive<delta_rule>, decay_per_channel>(extreme);
    check_chunks<delta_rule, factored_decays>(extreme);
    check_chunks<exclusive<outer_product>, gates::none>(extreme);
  }
  for (index_t chunk : {1, 3, 64}) {
    check_extreme_gradients<
        recurrence_in_form<recurrence_form::chunkwise, exclusive<delta_rule>, decay_per_channel>>(chunk);
    check_extreme_gradients<recurrence_in_form<recurrence_form::chunkwise, delta_rule, factored_decays>>(chunk);
  }
}

DOCTEST_TEST_CASE("the channels' form gives the numbers of the sequential form") {
  auto const check = []<class State, class Gate>(bool extreme) {
    using channels = recurrence_in_form<recurrence_form::channels, State, Gate>;
    using sequential = recurrence_in_form<recurrence_form::sequential, State, Gate>;
    auto s = law_shape<channels>(sequences::packed(form_offsets));
    auto x = random_mixer_numbers<channels>(s, 37);
    if (extreme) draw_extreme_decays<double>(x.g, 38);
    auto const expected = outcome_of<sequential, double>(s, x);
    for (index_t chunk : {1, 4, 64}) {
      s.chunk = chunk;
      DOCTEST_CHECK(relative_difference(outcome_of<channels, double>(s, x), expected) <= 1e-12);
    }
  };
  for (bool extreme : {false, true}) {
    check.operator()<elementwise, decay_and_write>(extreme);
    check.operator()<outer_product, factored_decays>(extreme);
  }
}
