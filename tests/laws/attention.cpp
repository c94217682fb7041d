#include "../support/laws.hpp"
#include <seqmix/gates/alibi.hpp>
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/attention.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for softmax attention (P-C3, P-S2)") { check_laws<attention<>>(); }

DOCTEST_TEST_CASE("the laws hold for a sliding window, whose state keeps window - 1 tokens (P-C3, P-S2)") {
  check_laws<attention<selectors::window>>();
}

DOCTEST_TEST_CASE("the laws hold for ALiBi's fixed slopes (P-C3, P-S2)") {
  check_laws<attention<selectors::softmax, gates::alibi>>();
}

DOCTEST_TEST_CASE("the laws hold for softmax attention with a gate and a write scale per token (P-C3, P-S2)") {
  check_laws<attention<selectors::softmax, gates::mamba2>>();
}
