#include "../support/models.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/layers/gated_mlp.hpp>
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

mamba3_layer_options mamba3_sizes() {
  return {.heads = 4, .key_heads = 2, .key_dim = 6, .value_dim = 5, .rotated = 0.7, .recurrence_chunk = 4};
}
mlstm_layer_options mlstm_sizes() {
  mlstm_layer_options o{.heads = 2, .width = 24, .conv_width = 3, .recurrence_chunk = 4};
  o.gate = init::normal(0.3);
  return o;
}
slstm_layer_options slstm_sizes(index_t conv_width) {
  slstm_layer_options o{.heads = 2, .conv_width = conv_width};
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

DOCTEST_TEST_CASE("a model of sLSTM blocks has the gradients of both oracles, and the laws hold") {
  using slstm_block = block<slstm_layer<>, gated_mlp<>>;
  gated_mlp_options mlp;
  mlp.width = 12;
  check_all<slstm_block>({slstm_sizes(3), mlp});
  check_model_gradients<slstm_block>({slstm_sizes(0), mlp});
  check_model_laws<slstm_block, double>({slstm_sizes(0), mlp});
}

DOCTEST_TEST_CASE("Mamba-3's trapezoid takes other gates with a write scale") {
  check_model_gradients<mamba3_layer<gates::mamba2>>(mamba3_sizes());
}
