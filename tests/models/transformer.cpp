#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

auto const sizes = variants::attention_options(16, 4, 2, 3);
auto const slopes = variants::attention_options(16, 4);

}  // namespace

DOCTEST_TEST_CASE("a model of Transformer++ blocks has the gradients of both oracles") {
  check_model_gradients<variants::transformer_pp>(sizes);
  check_model_difference<variants::transformer_pp>(sizes);
}

DOCTEST_TEST_CASE("the laws hold for a model of Transformer++ blocks (P-C3, P-S2)") {
  check_model_laws<variants::transformer_pp, double>(sizes);
  check_model_laws<variants::transformer_pp, float>(sizes);
}

DOCTEST_TEST_CASE("a model of ALiBi blocks has the gradients of both oracles, and the laws hold") {
  check_model_gradients<variants::alibi>(slopes);
  check_model_difference<variants::alibi>(slopes);
  check_model_laws<variants::alibi, double>(slopes);
}
