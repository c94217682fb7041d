#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::top1_gradient;
using selectors::top1_output;

auto const sizes = variants::attention_options(16, 4, 2, 3);
using weighted =
    variants::attention_block<selectors::top1_element<top1_output::weighted, top1_gradient::selected_weight>>;

}  // namespace

DOCTEST_TEST_CASE("a model of sliding-window blocks has the gradients of both oracles, and the laws hold (P-C5)") {
  check_model_gradients<variants::sliding_window>(sizes);
  check_model_difference<variants::sliding_window>(sizes);
  check_model_laws<variants::sliding_window, double>(sizes);
}

DOCTEST_TEST_CASE("a model of Top-1 element blocks has the gradient of its surrogate, and the laws hold") {
  check_model_gradients<variants::top1_element>(sizes);
  check_model_laws<variants::top1_element, double>(sizes);
}

DOCTEST_TEST_CASE("a model of weighted Top-1 element blocks has the gradients of both oracles") {
  check_model_gradients<weighted>(sizes);
  check_model_difference<weighted>(sizes);
}

DOCTEST_TEST_CASE("a model of Top-1 chunk blocks has the gradient of its surrogate, and the laws hold") {
  auto const chunks = variants::attention_options(16, 4, 2, 0, 3);
  check_model_gradients<variants::top1_chunk>(chunks);
  check_model_laws<variants::top1_chunk, double>(chunks);
}
