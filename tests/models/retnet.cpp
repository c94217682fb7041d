#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

layer_options sizes() { return {.heads = 2, .key_dim = 8, .value_dim = 16, .recurrence_chunk = 5}; }

using linear_attention =
    layer<recurrence<states::outer_product, gates::none>, extras{.head_norm = output_norm::per_head}>;

}  // namespace

DOCTEST_TEST_CASE("a model of RetNet layers has the gradients of both oracles") {
  check_model_gradients<variants::retnet>(sizes());
  check_model_difference<variants::retnet>(sizes());
}

DOCTEST_TEST_CASE("the laws hold for a model of RetNet layers (P-C3, P-C6, P-S2)") {
  check_model_laws<variants::retnet, double>(sizes());
  check_model_laws<variants::retnet, float>(sizes());
}

DOCTEST_TEST_CASE("a model of linear attention layers has the gradients of both oracles, and the laws hold") {
  check_model_gradients<linear_attention>(sizes());
  check_model_difference<linear_attention>(sizes());
  check_model_laws<linear_attention, double>(sizes());
}
