#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

}  // namespace

DOCTEST_TEST_CASE("a hybrid of attention and Gated DeltaNet has the gradients of both oracles, and the laws hold") {
  auto const delta = variants::gated_deltanet_options(2, 4);
  tested_options<variants::hybrid> const o{delta, delta, delta, variants::attention_options(16, 2)};
  check_model_gradients<variants::hybrid>(o);
  check_model_difference<variants::hybrid>(o);
  check_model_laws<variants::hybrid, double>(o);
}

DOCTEST_TEST_CASE("a model of NSA blocks has the gradient of its surrogate, and the laws hold") {
  auto const o = variants::nsa_options(16, {.heads = 4, .key_heads = 2, .block = 3, .blocks = 2, .window = 4});
  check_model_gradients<variants::nsa>(o);
  check_model_laws<variants::nsa, double>(o);
}
