#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

// Cells of the product that have no name: every gate with every kind of weights, and the extras in other
// combinations.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

using constant_recurrence = layer<recurrence<states::outer_product, gates::constant>,
                                  extras{.norm = norm_kind::layer, .skip = true, .output_gate = true}>;
using forgetting = layer<attention<selectors::softmax, gates::mamba2>, extras{.conv = true}>;
using linear_weights =
    layer<attention<selectors::linear, gates::mamba2>,
          extras{.norm = norm_kind::layer, .head_norm = output_norm::full_width, .output_gate = true}>;
using constant_weights =
    layer<attention<selectors::linear, gates::constant>, extras{.rope = true,
                                                                .conv = true,
                                                                .head_norm = output_norm::per_head,
                                                                .output_gate = true,
                                                                .gate_before_norm = true}>;

layer_options sizes() { return {.heads = 2, .key_dim = 6, .value_dim = 5, .conv_width = 3, .recurrence_chunk = 4}; }

}  // namespace

DOCTEST_TEST_CASE(
    "a model of a constant gate on a recurrence has the gradients of both oracles, and the laws hold") {
  check_model_gradients<constant_recurrence>(sizes());
  check_model_difference<constant_recurrence>(sizes());
  check_model_laws<constant_recurrence, double>(sizes());
}

DOCTEST_TEST_CASE("a model of softmax with a token gate behind a convolution has the gradients of both oracles") {
  check_model_gradients<forgetting>(sizes());
  check_model_difference<forgetting>(sizes());
  check_model_laws<forgetting, double>(sizes());
}

DOCTEST_TEST_CASE("a model of linear weights with a token gate has the gradients of both oracles") {
  check_model_gradients<linear_weights>(sizes());
  check_model_difference<linear_weights>(sizes());
}

DOCTEST_TEST_CASE("a model of linear weights with a constant gate has the gradients of both oracles") {
  check_model_gradients<constant_weights>(sizes());
  check_model_difference<constant_weights>(sizes());
}
