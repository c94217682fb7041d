#include "../support/laws.hpp"
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/rwkv5.hpp>
#include <seqmix/mixers/attention.hpp>

// Linear weights under a gate per key channel, which decays each product of a score.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using linear_window = seqmix::select<selectors::window, selectors::linear>;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for linear weights with a gate per channel and token (P-C3, P-S2)") {
  check_laws<attention<selectors::linear, gates::gla>>();
}

DOCTEST_TEST_CASE("the laws hold for linear weights with a constant gate per channel (P-C3, P-S2)") {
  check_laws<attention<selectors::linear, gates::rwkv5>>();
}

DOCTEST_TEST_CASE("the laws hold for linear weights with a factored gate and its write scale (P-C3, P-S2)") {
  check_laws<attention<selectors::linear, gates::mamba1>>();
}

DOCTEST_TEST_CASE("the laws hold for linear weights of a window with a gate per channel (P-C3, P-S2)") {
  check_laws<attention<linear_window, gates::gla>>();
}
