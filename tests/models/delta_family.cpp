#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
void check(typename Layer::options o) {
  o.recurrence_chunk = 4;
  check_model_gradients<Layer>(o);
  check_model_difference<Layer>(o);
  check_model_laws<Layer, double>(o);
}

}  // namespace

DOCTEST_TEST_CASE("a model of DeltaNet layers has the gradients of both oracles, and the laws hold") {
  check<variants::deltanet>(variants::deltanet_options(16, 2));
}

DOCTEST_TEST_CASE("a model of Gated DeltaNet layers has the gradients of both oracles, and the laws hold") {
  auto o = variants::gated_deltanet_options(4, 4);
  o.query_heads = o.key_heads = 2;  // grouped values
  o.beta_scale = 2.0;               // negative eigenvalues
  check<variants::gated_deltanet>(o);
  check_model_laws<variants::gated_deltanet, float>(o);
}

DOCTEST_TEST_CASE("a model of Kimi Delta Attention has the gradients of both oracles, and the laws hold") {
  check<variants::kda>(variants::kda_options(2, 4));
}

DOCTEST_TEST_CASE("a model of Kimi Delta Attention with bounded decays has the gradients of both oracles") {
  check_model_gradients<variants::kda_bounded>(variants::kda_options(2, 4));
  check_model_difference<variants::kda_bounded>(variants::kda_options(2, 4));
}
