#include "../support/laws.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/attention.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::top1_element;
using selectors::top1_gradient;
using selectors::top1_output;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for Top-1 element selection (P-C3, P-S2)") {
  check_laws<attention<top1_element<>>>();
}

DOCTEST_TEST_CASE("the laws hold for weighted Top-1 element selection (P-C3, P-S2)") {
  check_laws<attention<top1_element<top1_output::weighted, top1_gradient::selected_weight>>>();
}

DOCTEST_TEST_CASE("the laws hold for Top-1 element selection with a gate per token (P-C3, P-S2)") {
  check_laws<attention<top1_element<>, gates::mamba2>>();
}
