#include "../support/law_selectors.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/native_sparse.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::own_plus_top_k;
using selectors::window_plus_top_k;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for MoBA's choice of three chunks beside the own one, and a sink (P-C3, P-S2)") {
  check_laws<choosing<attention<own_plus_top_k<>>, 3>>();
}

DOCTEST_TEST_CASE(
    "the laws hold for a window and two gated chunks under a gate per token, and a sink (P-C3, P-S2)") {
  check_laws<
      choosing<attention<window_plus_top_k<chunk_score::exact_mass, chunk_gradient::gated>, gates::mamba2>, 2>>();
}

DOCTEST_TEST_CASE(
    "the laws hold for native sparse attention: compression, selection, window and a sink (P-C3, P-S2)") {
  check_laws<choosing<native_sparse<>, 3>>();
}

DOCTEST_TEST_CASE("the laws hold for a sliding window with a sink, step by step as well (P-C3, P-S2)") {
  check_laws<choosing<attention<selectors::window>>>();
}
