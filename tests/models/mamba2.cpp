#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

layer_options sizes() {
  return {.heads = 4,
          .query_heads = 1,
          .key_heads = 1,
          .key_dim = 6,
          .value_dim = 8,
          .scale = 1.0,
          .recurrence_chunk = 4};
}

}  // namespace

DOCTEST_TEST_CASE("a model of Mamba-2 layers has the gradients of both oracles") {
  check_model_gradients<variants::mamba2>(sizes());
  check_model_difference<variants::mamba2>(sizes());
}

DOCTEST_TEST_CASE("a model of Mamba-2 layers of two groups has the gradients of both oracles, and the laws hold") {
  auto o = variants::mamba2_options({.heads = 4, .state = 6, .head_dim = 8, .groups = 2});
  o.recurrence_chunk = 4;
  check_model_gradients<variants::mamba2>(o);
  check_model_difference<variants::mamba2>(o);
  check_model_laws<variants::mamba2, double>(o);
}

DOCTEST_TEST_CASE("the laws hold for a model of Mamba-2 layers (P-C1, P-C3, P-S1, P-S2)") {
  check_model_laws<variants::mamba2, double>(sizes());
  check_model_laws<variants::mamba2, float>(sizes());
}
