#include "../support/laws.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/mixers/recurrence.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

using linear_attention = recurrence<states::outer_product, gates::none>;
using constant_gate = recurrence<states::outer_product, gates::constant>;
using token_gate = recurrence<states::outer_product, gates::mamba2>;

}  // namespace

DOCTEST_TEST_CASE("the laws hold for linear attention as a recurrence (P-C3, P-S2)") {
  check_laws<linear_attention>();
}

DOCTEST_TEST_CASE("the laws hold for a recurrence with a constant gate (P-C3, P-S2)") {
  check_laws<constant_gate>();
}

DOCTEST_TEST_CASE("the laws hold for a recurrence with a gate and a write scale per token (P-C3, P-S2)") {
  check_laws<token_gate>();
}
