#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Both oracles and the laws, in double.
template <class Layer>
void check(typename Layer::options const& o) {
  check_model_gradients<Layer>(o);
  check_model_difference<Layer>(o);
  check_model_laws<Layer, double>(o);
}

/// Feature maps that change the width of queries and keys.
using taylor_attention = layer<recurrence<states::outer_product, gates::none>,
                               extras{.features = feature_map::taylor, .head_norm = output_norm::per_head}>;

}  // namespace

DOCTEST_TEST_CASE("a model of linear attention has the gradients of both oracles, and the laws hold") {
  check<variants::linear_attention>(variants::linear_attention_options(16, 2));
}

DOCTEST_TEST_CASE("a model of normalised linear attention has the gradients of both oracles, and the laws hold") {
  check<variants::normalised_linear_attention>(variants::linear_attention_options(16, 2));
}

DOCTEST_TEST_CASE("a model of linear attention with Taylor features has the gradients of both oracles") {
  auto const o = variants::linear_attention_options(16, 4);
  check_model_gradients<taylor_attention>(o);
  check_model_difference<taylor_attention>(o);
}

DOCTEST_TEST_CASE("a model of gated linear attention has the gradients of both oracles, and the laws hold") {
  auto o = variants::gla_options(16, 2);
  o.gate_rank = 3;
  o.recurrence_chunk = 5;
  check<variants::gla>(o);
  check_model_laws<variants::gla, float>(o);
}

DOCTEST_TEST_CASE("a model of HGRN2 layers has the gradients of both oracles, and the laws hold") {
  check<variants::hgrn2>(variants::hgrn2_options(16, 8));
}
