#include "../support/law_triangular.hpp"
#include <seqmix/gates/none.hpp>

// A recurrence = the triangular system of its whole sequence (for additive states: the quadratic form), forward and
// backward, with decays per head and per channel and an initial state.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using states::delta_rule;
using states::diagonal_plus_low_rank;
using states::exclusive;
using states::outer_product;

template <class State, class Gate>
void check_system(bool extreme = true) {
  using M = recurrence_against_system<State, Gate>;
  std::array<index_t, 5> const offsets{0, 0, 1, 9, 30};
  auto const s = law_shape<M>(sequences::packed(offsets));
  auto x = random_mixer_numbers<M>(s, 51);
  check_gradients<M>(s, x, 2);
  if (!extreme) return;
  draw_extreme_decays<double>(x.g, 52);
  check_gradients<M>(s, x, 2);
}

}  // namespace

DOCTEST_TEST_CASE("additive recurrences equal the quadratic form with decays inside the products") {
  check_system<outer_product, decay_per_channel>();
  check_system<outer_product, factored_decays>();
  check_system<exclusive<outer_product>, decay_per_channel>();
  check_system<states::elementwise, given_decays<axis::head, true>>();
}

DOCTEST_TEST_CASE("the delta rule equals its triangular system") {
  check_system<delta_rule, gates::none>(false);
  check_system<delta_rule, decay_per_head>();
  check_system<delta_rule, decay_per_channel>();
}

DOCTEST_TEST_CASE("diagonal plus low rank equals its triangular system") {
  check_system<diagonal_plus_low_rank, given_decays<axis::head, true>>();
  check_system<diagonal_plus_low_rank, decay_per_channel>();
  check_system<exclusive<diagonal_plus_low_rank>, decay_per_channel>();
}

DOCTEST_TEST_CASE("a gate that scales what is written scales the value where a state shares erasing and writing") {
  check_system<delta_rule, given_decays<axis::head, true>>();
}
