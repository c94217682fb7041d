#include "../support/models.hpp"
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/rwkv5.hpp>
#include <seqmix/layers/layer.hpp>
#include <seqmix/mixers/attention.hpp>
#include <seqmix/mixers/recurrence.hpp>

// A history read with linear weights under a gate per key channel: no published architecture, and the same function
// as some that are.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Gate>
using remembered = attention<selectors::linear, Gate>;
using linear_window = seqmix::select<selectors::window, selectors::linear>;
constexpr extras gla_like{.head_norm = output_norm::per_head, .output_gate = true};
constexpr extras mamba_like{.conv = true, .keys_from = feed_source::convolved, .skip = true, .output_gate = true};

layer_options sizes() {
  return {.heads = 2, .key_dim = 6, .value_dim = 5, .conv_width = 3, .window = 4, .recurrence_chunk = 4};
}

}  // namespace

DOCTEST_TEST_CASE(
    "a model of linear weights under GLA's gate has the gradients of both oracles, and the laws hold") {
  using M = layer<remembered<gates::gla>, gla_like>;
  check_model_gradients<M>(sizes());
  check_model_difference<M>(sizes());
  check_model_laws<M, double>(sizes());
  check_model_pieces<M>(sizes(), {3, 1, 0, 5});
}

DOCTEST_TEST_CASE(
    "models of linear weights under a factored gate, a constant one, and in a window, have the gradients "
    "of the oracle") {
  check_model_gradients<layer<remembered<gates::mamba1>, mamba_like>>(sizes());
  check_model_gradients<layer<remembered<gates::rwkv5>, gla_like>>(sizes());
  check_model_gradients<layer<attention<linear_window, gates::gla>, gla_like>>(sizes());
}

DOCTEST_TEST_CASE_TEMPLATE("a model of a history with linear weights is the model of the matrix state, to rounding",
                           Gate, gates::gla, gates::mamba1) {
  constexpr extras around = Gate::spec.factored ? mamba_like : gla_like;
  small_model<layer<remembered<Gate>, around>> const history(sizes());
  small_model<layer<recurrence<states::outer_product, Gate>, around>> const bounded(sizes());
  auto const seq = sequences::packed(model_offsets());
  auto const a = gradient_of(history, seq), b = gradient_of(bounded, seq);
  DOCTEST_REQUIRE(a.d.size() == b.d.size());
  DOCTEST_CHECK(std::abs(a.loss - b.loss) <= 1e-13 * b.loss);
  double most = 0, apart = 0;
  for (index_t i = 0; i < a.d.size(); ++i) {
    most = std::max(most, std::abs(b.d[i]));
    apart = std::max(apart, std::abs(a.d[i] - b.d[i]));
  }
  DOCTEST_CHECK(apart <= 1e-12 * most);
}
