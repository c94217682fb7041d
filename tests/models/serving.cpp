#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

// A state carried through prompts of different lengths, then stepped: what generation does.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Prompts packed in one call, then one token of every sequence at a time, against each sequence in one pass.
template <class Layer>
void check_ragged(typename Layer::options const& o, std::vector<index_t> const& prompts, index_t steps) {
  DOCTEST_CAPTURE(Layer::name());
  auto const N = index_t(prompts.size());
  std::vector<index_t> offsets{0}, totals{0};
  for (index_t p : prompts) offsets.push_back(offsets.back() + p), totals.push_back(totals.back() + p + steps);
  small_model<Layer> const m(o, totals.back());
  constexpr index_t V = small_model<Layer>::vocabulary;
  auto const whole = logits_of(m.model, sequences::packed(totals), m.parameters.data(), m.tokens.data());
  index_t const capacity = *std::max_element(prompts.begin(), prompts.end()) + steps;
  auto state = m.model.template make_state<double>(N, capacity);
  double worst = 0;
  auto const compare = [&](double const* found, index_t row) {
    for (index_t v = 0; v < V; ++v) {
      double const d = std::abs(found[v] - whole[std::size_t(row * V + v)]);
      if (!(d <= worst)) worst = d;
    }
  };
  std::vector<std::int32_t> tokens;
  for (std::size_t n = 0; n < prompts.size(); ++n)
    tokens.insert(tokens.end(), m.tokens.begin() + totals[n], m.tokens.begin() + totals[n] + prompts[n]);
  auto prefill =
      m.model.template make_memory<double>(device::cpu{2}, sequences::packed(offsets), {.capacity = capacity});
  m.model.forward(prefill, m.parameters.data(), tokens.data(), &state, &state);
  for (std::size_t n = 0; n < prompts.size(); ++n)
    for (index_t t = 0; t < prompts[n]; ++t) compare(prefill.logits_rv.at(offsets[n] + t), totals[n] + t);
  DOCTEST_CHECK(state.position == prompts);
  auto step = m.model.template make_memory<double>(device::cpu{2}, sequences::batch(N, 1), {.capacity = capacity});
  for (index_t t = 0; t < steps; ++t) {
    std::vector<std::int32_t> now;
    for (std::size_t n = 0; n < prompts.size(); ++n)
      now.push_back(m.tokens[std::size_t(totals[n] + prompts[n] + t)]);
    m.model.forward(step, m.parameters.data(), now.data(), &state, &state);
    for (std::size_t n = 0; n < prompts.size(); ++n)
      compare(step.logits_rv.at(index_t(n)), totals[n] + prompts[n] + t);
  }
  DOCTEST_CHECK(worst <= 1e-12);
}

template <class Layer>
void check_ragged(typename Layer::options const& o) {
  check_ragged<Layer>(o, {5, 0, 1, 9}, 4);
  check_ragged<Layer>(o, {300, 1}, 2);
}
layer_options recurrent_sizes() { return {.heads = 2, .key_dim = 8, .value_dim = 16, .recurrence_chunk = 5}; }

}  // namespace

DOCTEST_TEST_CASE(
    "prompts of different lengths, then steps, equal one pass: Transformer++ and a window (P-C4, P-C5)") {
  auto const sizes = variants::attention_options(16, 4, 2, 3);
  check_ragged<variants::transformer_pp>(sizes);
  check_ragged<variants::sliding_window>(sizes);
}

DOCTEST_TEST_CASE(
    "prompts of different lengths, then steps, equal one pass: RetNet and Mamba-2 (P-C1, P-C4, P-S1)") {
  check_ragged<variants::retnet>(recurrent_sizes());
  check_ragged<variants::retnet>(recurrent_sizes(), {4000, 1}, 2);
  check_ragged<variants::mamba2>({.heads = 4,
                                  .query_heads = 1,
                                  .key_heads = 1,
                                  .key_dim = 6,
                                  .value_dim = 8,
                                  .scale = 1.0,
                                  .recurrence_chunk = 4});
}

DOCTEST_TEST_CASE("P-C1: the same steps from the same state give the same bits, and a cleared state starts again") {
  small_model<variants::mamba2> const m(
      {.heads = 4, .query_heads = 1, .key_heads = 1, .key_dim = 6, .value_dim = 8, .scale = 1.0});
  auto state = m.model.make_state<double>(1, 10);
  auto step = m.model.make_memory<double>(device::cpu{1}, sequences::batch(1, 1), {.capacity = 10});
  std::vector<double> first;
  for (int round = 0; round < 3; ++round) {
    state.clear();
    std::vector<double> now;
    for (std::size_t t = 0; t < 10; ++t) {
      m.model.forward(step, m.parameters.data(), m.tokens.data() + t, &state, &state);
      now.insert(now.end(), step.logits_rv.data, step.logits_rv.data + step.logits_rv.size());
    }
    if (round > 0) DOCTEST_CHECK(now == first);
    first = now;
  }
}

DOCTEST_TEST_CASE("P-S5: a model's state is counted in numbers, whatever the length") {
  small_model<variants::mamba2> const m(
      {.heads = 4, .query_heads = 1, .key_heads = 1, .key_dim = 6, .value_dim = 8, .scale = 1.0});
  index_t const layer = 4 * 6 * 8 + (32 + 6 + 6) * 3;  // matrices, and the convolution's window
  DOCTEST_CHECK(m.model.state_elements(3, 0) == 2 * 3 * layer);
  DOCTEST_CHECK(m.model.state_elements(3, 1000) == 2 * 3 * layer);
  small_model<variants::transformer_pp> const a(variants::attention_options(16, 4, 2));
  DOCTEST_CHECK(a.model.state_elements(3, 100) == 2 * 3 * 100 * (2 * 4 + 2 * 4));
}

DOCTEST_TEST_CASE("P-U2: a model names what it cannot use: tokens, labels, states, sizes of a layer") {
  using doctest::Contains;
  small_model<variants::retnet> m(recurrent_sizes());
  auto mem = m.model.make_memory<double>(device::cpu{1}, sequences::batch(1, 4), {.training = true, .capacity = 8});
  std::vector<std::int32_t> const tokens{1, 2, 11, 3}, labels{1, 2, 3, 12};
  DOCTEST_CHECK_THROWS_WITH_AS(m.model.forward(mem, m.parameters.data(), tokens.data()),
                               Contains("token 11 in row 2 is outside the vocabulary of 11"), value_error);
  m.model.forward(mem, m.parameters.data(), m.tokens.data());
  DOCTEST_CHECK_THROWS_WITH_AS(m.model.loss(mem, labels.data(), 1.0),
                               Contains("label 12 in row 3 is outside the vocabulary of 11"), value_error);
  auto two = m.model.make_state<double>(2, 8), short_one = m.model.make_state<double>(1, 5);
  DOCTEST_CHECK_THROWS_WITH_AS(m.model.forward(mem, m.parameters.data(), m.tokens.data(), &two, &two),
                               Contains("the state holds 2 sequences, the tokens are 1"), shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS(m.model.forward(mem, m.parameters.data(), m.tokens.data(), &short_one, &short_one),
                               Contains("the state was made for 5 tokens, the memory for 8"), shape_error);
  auto sizes = recurrent_sizes();
  sizes.key_heads = 3;
  DOCTEST_CHECK_THROWS_WITH_AS(small_model<variants::retnet>{sizes},
                               Contains("key_heads must divide heads = 2, got 3"), option_error);
  sizes = recurrent_sizes();
  sizes.key_dim = 7;
  DOCTEST_CHECK_THROWS_WITH_AS(small_model<variants::retnet>{sizes}, Contains("rope needs an even key_dim, got 7"),
                               option_error);
  auto window = variants::attention_options(16, 4, 2, 0);
  DOCTEST_CHECK_THROWS_WITH_AS(small_model<variants::sliding_window>{window}, Contains("must be at least 1, got 0"),
                               option_error);
}
