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

DOCTEST_TEST_CASE(
    "a model of RetNet layers with its authors' angles has the gradients of both oracles, and the laws hold") {
  auto o = variants::retnet_options(16, 2);
  o.recurrence_chunk = 5;
  check_model_gradients<variants::retnet>(o);
  check_model_difference<variants::retnet>(o);
  check_model_laws<variants::retnet, double>(o);
}

DOCTEST_TEST_CASE("every way to turn pairs of channels gives another model") {
  auto const logits = [](bool interleaved, bool closed) {
    auto o = sizes();
    o.rope_interleaved = interleaved, o.rope_closed = closed;
    small_model<variants::retnet> m(o);
    return logits_of(m.model, sequences::batch(1, 13), m.parameters.data(), m.tokens.data());
  };
  std::vector<std::vector<double>> const found{logits(false, false), logits(true, false), logits(false, true),
                                               logits(true, true)};
  for (std::size_t i = 0; i < found.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) DOCTEST_CHECK(found[i] != found[j]);
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
