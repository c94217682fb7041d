#include "../support/models.hpp"
#include <seqmix/layers/mamba3_layer.hpp>
#include <seqmix/layers/mlstm_layer.hpp>
#include <seqmix/layers/slstm_layer.hpp>

// Layers that are no product of state, gate and selector alone: Mamba-3, mLSTM's and sLSTM's blocks.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
void check_all(typename Layer::options const& o) {
  check_model_gradients<Layer>(o);
  check_model_difference<Layer>(o);
  check_model_laws<Layer, double>(o);
  check_model_laws<Layer, float>(o);
  check_model_pieces<Layer>(o, {3, 0, 1, 9});
}

mamba3_options mamba3_sizes() {
  return {.heads = 4, .key_heads = 2, .key_dim = 6, .value_dim = 5, .rotated = 0.7, .recurrence_chunk = 4};
}
mlstm_options mlstm_sizes() {
  mlstm_options o{.heads = 2, .width = 24, .conv_width = 3, .recurrence_chunk = 4};
  o.gate = init::normal(0.3);
  return o;
}
slstm_options slstm_sizes(index_t conv_width) {
  slstm_options o{.heads = 2, .conv_width = conv_width};
  o.recurrent = init::normal(0.1);
  return o;
}

}  // namespace

DOCTEST_TEST_CASE("a model of Mamba-3 layers has the gradients of both oracles, and the laws hold") {
  check_all<mamba3_layer<>>(mamba3_sizes());
}

DOCTEST_TEST_CASE("a model of mLSTM layers has the gradients of both oracles, and the laws hold") {
  check_all<mlstm_layer<>>(mlstm_sizes());
}

DOCTEST_TEST_CASE("a model of sLSTM layers has the gradients of both oracles, and the laws hold") {
  check_all<slstm_layer<>>(slstm_sizes(3));
}

DOCTEST_TEST_CASE(
    "a model of sLSTM layers without a convolution has the gradients of both oracles, and the laws hold") {
  check_all<slstm_layer<>>(slstm_sizes(0));
}
