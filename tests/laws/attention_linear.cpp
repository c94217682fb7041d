#include "../support/laws.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/attention.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for linear weights over every key (P-C3, P-S2)") {
  check_laws<attention<selectors::linear>>();
}

DOCTEST_TEST_CASE("the laws hold for linear weights with a constant gate (P-C3, P-S2)") {
  check_laws<attention<selectors::linear, gates::constant>>();
}

DOCTEST_TEST_CASE("the laws hold for linear weights with a gate and a write scale per token (P-C3, P-S2)") {
  check_laws<attention<selectors::linear, gates::mamba2>>();
}
