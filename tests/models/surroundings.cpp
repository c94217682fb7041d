#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

// Extras that no named architecture has: each through a model, so that none is an option nobody can rely on.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <extras E, class Mixer = recurrence<states::outer_product, gates::none>>
void check(layer_options o = {.heads = 2, .key_dim = 4, .value_dim = 8}) {
  o.recurrence_chunk = 4;
  check_model_gradients<layer<Mixer, E>>(o);
  check_model_difference<layer<Mixer, E>>(o);
}

}  // namespace

DOCTEST_TEST_CASE("a read without its own token has the gradients of both oracles") {
  check<extras{.own = own_token::minus_one, .head_norm = output_norm::per_head},
        recurrence<states::outer_product, gates::mamba2>>();
}

DOCTEST_TEST_CASE("without its own token the first one reads nothing") {
  using blind = layer<recurrence<states::outer_product, gates::mamba2>, extras{.own = own_token::minus_one}>;
  small_model<blind> m({.heads = 2, .key_dim = 4, .value_dim = 8}, 2);
  auto const seq = sequences::batch(1, 2);
  auto const before = logits_of(m.model, seq, m.parameters.data(), m.tokens.data());
  auto const& value = m.model.parameters().at("layers.0.mixer.value");
  for (index_t i = 0; i < value.size(); ++i) m.parameters[value.offset + i] += 1.0;
  auto const after = logits_of(m.model, seq, m.parameters.data(), m.tokens.data());
  for (std::size_t c = 0; c < 11; ++c) DOCTEST_CHECK(std::abs(after[c] - before[c]) <= 1e-10);
  DOCTEST_CHECK(std::abs(after[11] - before[11]) > 1e-3);
}

DOCTEST_TEST_CASE("feature maps of two linear images, summed to 1, have the gradients of both oracles") {
  check<extras{.features = feature_map::hadamard, .qk_norm = key_norm::l2, .head_norm = output_norm::per_head}>();
  check<extras{.features = feature_map::hedgehog, .qk_norm = key_norm::l1, .normalise = true}>();
}

DOCTEST_TEST_CASE("feature maps of trained images of each head have the gradients of both oracles") {
  check<extras{.features = feature_map::hedgehog, .feature_weights = true, .normalise = true}>();
  check<extras{.conv = true,
               .query_map = activation::silu,
               .key_map = activation::silu,
               .features = feature_map::hadamard,
               .feature_weights = true,
               .qk_norm = key_norm::l2}>();
}

DOCTEST_TEST_CASE(
    "parameter-free projections of every order have the gradients of both oracles, and the laws hold") {
  using projected = layer<recurrence<states::delta_rule, gates::none>,
                          extras{.features = feature_map::dpfp, .qk_norm = key_norm::l2}>;
  layer_options o{.heads = 2, .key_dim = 4, .value_dim = 8, .recurrence_chunk = 4};
  for (index_t nu : {1, 2}) {
    o.feature_order = nu;
    check_model_gradients<projected>(o);
  }
  check_model_laws<projected, double>(o);
}

DOCTEST_TEST_CASE("a norm of groups of channels has the gradients of both oracles with gates that are not fused") {
  layer_options o{.heads = 2, .key_dim = 4, .value_dim = 6};
  o.norm_groups = 3;
  check<extras{.head_norm = output_norm::full_width, .output_gate = true, .gate_map = activation::sigmoid},
        recurrence<states::outer_product, gates::log_sigmoid>>(o);
}

DOCTEST_TEST_CASE("one fixed key a head has the gradients of both oracles, and the laws hold") {
  using ablated = layer<attention<>, extras{.keys = key_source::random_head}>;
  layer_options const o{.heads = 2, .key_dim = 4, .value_dim = 8};
  check_model_gradients<ablated>(o);
  check_model_laws<ablated, double>(o);
}

DOCTEST_TEST_CASE("a router that sees the gate's bias has the gradient of its surrogate, and the laws hold") {
  using routed =
      layer<attention<selectors::top1_chunk<chunk_score::mean_key, chunk_gradient::gated>, gates::log_sigmoid>,
            extras{}>;
  layer_options o{.heads = 2, .key_dim = 4, .value_dim = 8, .chunk = 3};
  o.router_bias = true;
  check_model_gradients<routed>(o);
  check_model_laws<routed, double>(o);
}
