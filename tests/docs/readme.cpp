#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

// [doc:readme]
#include <seqmix/data/windows.hpp>
#include <seqmix/models/arbitrary_selection.hpp>
#include <seqmix/models/variants.hpp>
#include <seqmix/train/trainer.hpp>
// [/doc:readme]

// The example of README.md: a gate of one's own, on a selector that was not made for it.

namespace {

using namespace seqmix;

// [doc:readme]
struct patience {  // how fast a head forgets: one formula; the library differentiates it
  static constexpr std::string_view name = "patience";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "rate"}}};
  static double initial(std::size_t, gate_element const& e) { return -double(e.head); }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]) * sigmoid(raw[0])};
  }
};
using novel = block<layer<attention<selectors::top1_chunk<>, patience>, extras{.rope = true}>, swiglu<>>;
static_assert(layer_selects_arbitrarily<novel>);

train::trainer<language_model<pattern<novel>>> trained(std::span<std::uint8_t const> text) {
  language_model<pattern<novel>> const model(
      {.d_model = 32, .layers = 2, .layer = variants::attention_options(32, 4, 0, 0, 8)});
  train::trainer run(model, {.steps = 20, .batch = 4, .block = 64, .learning_rate = 1e-2});
  data::window_sampler const source(text, 64, /*seed*/ 1);
  while (!run.finished()) run.step(source);
  return run;
}
// [/doc:readme]

std::vector<std::uint8_t> some_text() {
  std::string_view constexpr words = "the quick brown fox jumps over a lazy dog, ";
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < 2000; ++i) bytes.push_back(std::uint8_t(words[i % words.size()]));
  return bytes;
}

}  // namespace

DOCTEST_TEST_CASE(
    "the example of README.md learns, and a token at a time it says what it says of the whole sequence") {
  auto const text = some_text();
  auto run = trained(text);
  auto const& model = run.model();
  auto const* const parameters = run.parameters().data();
  index_t const length = 40;
  std::vector<std::int32_t> const tokens(text.begin() + 7, text.begin() + 7 + length),
      labels(text.begin() + 8, text.begin() + 8 + length);

  auto whole = model.make_memory<float>(device::cpu{}, sequences::batch(1, length), {});
  model.forward(whole, parameters, tokens.data());

  auto state = model.make_state<float>(1, length);
  auto step = model.make_memory<float>(device::cpu{}, sequences::batch(1, 1), {.capacity = length});
  float worst = 0, size = 0;
  for (index_t t = 0; t < length; ++t) {
    model.forward(step, parameters, &tokens[std::size_t(t)], &state, &state);
    for (index_t v = 0; v < 256; ++v) {
      worst = std::max(worst, std::abs(step.logits_rv(0, v) - whole.logits_rv(t, v)));
      size = std::max(size, std::abs(whole.logits_rv(t, v)));
    }
  }
  DOCTEST_CHECK_MESSAGE(worst <= 2e-5f * size, "steps differ by ", worst, " of ", size);

  auto const learned = model.loss(whole, labels.data(), 1.0);
  DOCTEST_CHECK_MESSAGE(learned.loss / double(learned.counted) < 0.8 * std::log(256.0), "loss ",
                        learned.loss / double(learned.counted));
}
