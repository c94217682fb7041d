#include "../support/law_recurrence.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/none.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::outer_product;

template <class Gate>
using chunkwise = recurrence_in_form<recurrence_form::chunkwise, outer_product, Gate>;
template <class Gate>
using sequential = recurrence_in_form<recurrence_form::sequential, outer_product, Gate>;

constexpr std::array<index_t, 7> chunk_sizes{1, 2, 3, 4, 5, 8, 64};
constexpr std::array<index_t, 6> offsets{0, 0, 1, 6, 6, 29};

/// The same numbers in every chunk size, and token by token.
template <class Gate>
void check_chunks(bool extreme) {
  auto s = law_shape<chunkwise<Gate>>(sequences::packed(offsets));
  auto x = random_mixer_numbers<chunkwise<Gate>>(s, 31);
  if (extreme) draw_extreme_decays<double>(x.g, 32);
  auto const expected = outcome_of<sequential<Gate>, double>(s, x);
  for (index_t chunk : chunk_sizes) {
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    DOCTEST_CHECK(relative_difference(outcome_of<chunkwise<Gate>, double>(s, x), expected) <= 1e-12);
    DOCTEST_CHECK(relative_difference(outcome_of<sequential<Gate>, double>(s, x), expected) <= 1e-12);
  }
}

/// With decays from 1 to e^bound in one chunk, backward is still the derivative of forward.
template <class M>
void check_extreme_gradients(index_t chunk) {
  DOCTEST_CAPTURE(chunk);
  auto s = law_shape<M>(sequences::packed(offsets));
  s.chunk = chunk;
  auto x = random_mixer_numbers<M>(s, 33);
  draw_extreme_decays<double>(x.g, 34);
  check_gradients<M>(s, x);
}

}  // namespace

DOCTEST_TEST_CASE("a recurrence gives the same numbers in every chunk size and token by token") {
  for (bool extreme : {false, true}) {
    DOCTEST_CAPTURE(extreme);
    check_chunks<given_decays<axis::head, false>>(extreme);
    check_chunks<given_decays<axis::head, true>>(extreme);
    check_chunks<gates::constant>(extreme);
  }
  check_chunks<gates::none>(false);
}

DOCTEST_TEST_CASE("decays from 1 to the bound mixed in a chunk leave backward the derivative of forward") {
  for (index_t chunk : {1, 3, 8, 64}) {
    check_extreme_gradients<chunkwise<given_decays<axis::head, true>>>(chunk);
    check_extreme_gradients<sequential<given_decays<axis::head, true>>>(chunk);
    check_extreme_gradients<sequential<given_decays<axis::head_key, false>>>(chunk);
  }
}

DOCTEST_TEST_CASE(
    "decays from 1 to the bound stay finite in float and near the double result, forward and backward") {
  using M = chunkwise<given_decays<axis::head, true>>;
  auto s = law_shape<M>(sequences::packed(offsets));
  auto x = random_mixer_numbers<M>(s, 35);
  draw_extreme_decays<float>(x.g, 36);
  auto const expected = outcome_of<M, double>(s, x);
  for (index_t chunk : chunk_sizes) {
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    mixer_machine<M, float> machine(s);
    auto const x_float = x.as<float>();
    auto const found = outcome_of<M, float>(s, x_float);
    auto const rounded = [](std::vector<float> const& v) { return std::vector<double>(v.begin(), v.end()); };
    DOCTEST_CHECK(relative_difference(rounded(found.o), expected.o) <= 2e-5);
    DOCTEST_CHECK(relative_difference(rounded(found.state), expected.state) <= 2e-5);
    DOCTEST_CHECK(relative_difference(found.d.as<double>(), expected.d) <= 2e-5);
    DOCTEST_CHECK(relative_difference(rounded(found.d_state), expected.d_state) <= 2e-5);
  }
}

DOCTEST_TEST_CASE("the laws hold for the sequential form with a decay per head and per channel (P-C3, P-S2)") {
  check_laws<sequential<given_decays<axis::head, true>>>();
  check_laws<recurrence<outer_product, given_decays<axis::head_key, false>>>();
}
