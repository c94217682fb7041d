#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Keys that say nothing of the token, and a sink: the ablations of content.
template <key_source Keys, bool Sink = false>
using ablated = layer<attention<>, extras{.rope = true, .keys = Keys, .sink = Sink}>;
layer_options ablated_sizes() {
  layer_options o{.heads = 2, .key_dim = 8, .value_dim = 8};
  o.key_positions = 26;
  return o;
}

}  // namespace

DOCTEST_TEST_CASE("a model of Forgetting Transformer blocks has the gradients of both oracles, and the laws hold") {
  auto const o = variants::fox_options(16, 2);
  check_model_gradients<variants::fox>(o);
  check_model_difference<variants::fox>(o);
  check_model_laws<variants::fox, double>(o);
}

DOCTEST_TEST_CASE("a model of GPT-NeoX blocks has the gradients of both oracles, and the laws hold") {
  auto const o = variants::gpt_neox_options(16, 2, 0.5);
  check_model_gradients<variants::gpt_neox>(o);
  check_model_difference<variants::gpt_neox>(o);
  check_model_laws<variants::gpt_neox, double>(o);
}

DOCTEST_TEST_CASE("a model of MoBA blocks has the gradient of its surrogate, and the laws hold") {
  auto const o = variants::moba_options(16, 2, 3, 2);
  check_model_gradients<variants::moba>(o);
  check_model_laws<variants::moba, double>(o);
}

DOCTEST_TEST_CASE("ablated keys and a sink have the gradients of both oracles, and the laws hold") {
  using trained = ablated<key_source::trained_positions, true>;
  check_model_gradients<trained>(ablated_sizes());
  check_model_difference<trained>(ablated_sizes());
  check_model_laws<trained, double>(ablated_sizes());
  using fixed = ablated<key_source::random_positions>;
  check_model_gradients<fixed>(ablated_sizes());
}

DOCTEST_TEST_CASE("keys by position end where their table ends") {
  auto o = ablated_sizes();
  o.key_positions = 5;
  small_model<ablated<key_source::random_positions>> const m(o);
  DOCTEST_CHECK_THROWS_WITH_AS(logits_of(m.model, sequences::batch(1, 6), m.parameters.data(), m.tokens.data()),
                               "seqmix: layer: sequence 0 reaches position 6, the table of keys has 5",
                               shape_error);
}
