#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <string_view>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/data/windows.hpp>
#include <seqmix/models/arbitrary_selection.hpp>
#include <seqmix/models/variants.hpp>
#include <seqmix/train/evaluate.hpp>
#include <seqmix/train/loop.hpp>
#include <seqmix/train/trainer.hpp>

// The slices of docs/tutorial.md, in its order.

namespace {

using namespace seqmix;

// [doc:compose]
using remembering = layer<recurrence<states::outer_product, gates::mamba2>,
                          extras{.conv = true, .head_norm = output_norm::per_head, .output_gate = true}>;
using selecting = block<layer<attention<selectors::top1_element<>>, extras{.rope = true}>, swiglu<>>;
using hybrid = language_model<pattern<remembering, selecting>>;  // layer l has type l mod 2

hybrid make_hybrid() {
  layer_options const first{.heads = 4, .query_heads = 1, .key_heads = 1, .key_dim = 16, .value_dim = 16};
  auto const second = variants::attention_options(/*d_model*/ 32, /*heads*/ 4, /*key_heads*/ 2);
  return hybrid({.vocabulary = 256, .d_model = 32, .layers = 4, .layer = {first, second}});
}
// [/doc:compose]

// [doc:traits]
static_assert(!layer_selects_arbitrarily<remembering>);  // a bounded state keeps no single tokens
static_assert(layer_selects_arbitrarily<selecting>);
static_assert(mixer_on<attention<selectors::top1_element<>>, device::cpu>);
// [/doc:traits]

float greatest_difference(view2<float> a_rv, index_t a_row, view2<float> b_rv, index_t b_row) {
  float most = 0;
  for (index_t v = 0; v < a_rv.extent[1]; ++v) most = std::max(most, std::abs(a_rv(a_row, v) - b_rv(b_row, v)));
  return most;
}

std::vector<std::int32_t> some_tokens(index_t count) {
  auto const text = small::text(count);
  return {text.begin(), text.end()};
}

}  // namespace

DOCTEST_TEST_CASE(
    "tutorial: a composed model has a name, a list of tensors and start values that depend on the seed alone") {
  // [doc:parameters]
  hybrid const model = make_hybrid();
  buffer<float> parameters(model.parameters().size());
  model.parameters().initialise(/*seed*/ 1, parameters.data());
  // [/doc:parameters]
  DOCTEST_CHECK(model.parameters().at("layers.1.mixer.query").shape == std::vector<index_t>{32, 32});
  DOCTEST_CHECK(hybrid::name().find("gate=mamba2") != std::string::npos);
  DOCTEST_CHECK(hybrid::name().find("how=top1") != std::string::npos);
  buffer<float> again(model.parameters().size());
  model.parameters().initialise(1, again.data());
  DOCTEST_CHECK(std::equal(parameters.begin(), parameters.end(), again.begin()));
}

DOCTEST_TEST_CASE("tutorial: a trainer lowers the loss, and an evaluator measures it in bits per byte") {
  auto const text = small::text(3000), held_out = small::text(500);
  // [doc:train]
  data::window_sampler const source(text, /*block*/ 32, /*seed*/ 1);
  train::trainer run(make_hybrid(), {.steps = 40, .batch = 4, .block = 32, .learning_rate = 3e-3, .threads = 2});
  std::vector<double> losses;  // nats a byte
  while (!run.finished()) losses.push_back(run.step(source).loss);
  // [/doc:train]
  // [doc:evaluate]
  train::evaluator<hybrid> measure(run.model(), /*block*/ 32, /*batch*/ 4, run.device());
  auto const windows = data::sequential_windows(held_out, 32);
  double const bits_per_byte = measure(run.parameters().data(), windows).bits();
  // [/doc:evaluate]
  DOCTEST_CHECK_MESSAGE(losses.back() < losses.front() - 1.0, "losses ", losses.front(), " to ", losses.back());
  DOCTEST_CHECK_MESSAGE(bits_per_byte < 7.0, "bits per byte ", bits_per_byte);
}

DOCTEST_TEST_CASE("tutorial: forward, loss and backward by hand give the gradient of the mean loss") {
  hybrid const model = make_hybrid();
  buffer<float> parameters(model.parameters().size()), gradient(model.parameters().size());
  model.parameters().initialise(1, parameters.data());
  auto const tokens = some_tokens(60), labels = some_tokens(60);
  // [doc:backward]
  auto memory = model.make_memory<float>(device::cpu{2}, sequences::batch(3, 20), {.training = true});
  model.forward(memory, parameters.data(), tokens.data());
  auto const loss = model.loss(memory, labels.data(), /*scale*/ 1.0 / 60);    // logits become d_logits
  model.backward(memory, parameters.data(), tokens.data(), gradient.data());  // adds to gradient
  // [/doc:backward]
  DOCTEST_CHECK(loss.counted == 60);
  DOCTEST_CHECK(loss.loss / 60 == doctest::Approx(std::log(256.0)).epsilon(0.1));
  double norm = 0;
  for (float g : gradient) norm += double(g) * double(g);
  DOCTEST_CHECK((norm > 0 && std::isfinite(norm)));
}

DOCTEST_TEST_CASE("tutorial: a prompt in one call and then one token at a time give what one pass gives") {
  hybrid const model = make_hybrid();
  buffer<float> numbers(model.parameters().size());
  model.parameters().initialise(1, numbers.data());
  float const* const parameters = numbers.data();
  auto const prompt = some_tokens(12);
  // [doc:decode]
  index_t const capacity = 64;  // tokens a history can hold; bounded states do not grow
  auto state = model.make_state<float>(/*sequences*/ 1, capacity);

  auto reading = model.make_memory<float>(device::cpu{}, sequences::batch(1, 12), {.capacity = capacity});
  model.forward(reading, parameters, prompt.data(), &state, &state);  // from `state`, and back into it
  auto next = [](view2<float> logits_rv) {                            // the likeliest token after the last row
    float const* const last = logits_rv.at(logits_rv.extent[0] - 1);
    return std::int32_t(std::max_element(last, last + logits_rv.extent[1]) - last);
  };

  std::vector<std::int32_t> written{next(reading.logits_rv)};
  auto step = model.make_memory<float>(device::cpu{}, sequences::batch(1, 1), {.capacity = capacity});
  while (written.size() < 20) {
    model.forward(step, parameters, &written.back(), &state, &state);
    written.push_back(next(step.logits_rv));
  }
  // [/doc:decode]
  DOCTEST_CHECK(state.position == std::vector<index_t>{12 + 19});
  auto all = prompt;
  all.insert(all.end(), written.begin(), written.end() - 1);
  auto whole = model.make_memory<float>(device::cpu{}, sequences::batch(1, 31), {});
  model.forward(whole, parameters, all.data());
  DOCTEST_CHECK(greatest_difference(reading.logits_rv, 11, whole.logits_rv, 11) <= 1e-5f);
  DOCTEST_CHECK(greatest_difference(step.logits_rv, 0, whole.logits_rv, 30) <= 1e-5f);
}

DOCTEST_TEST_CASE("tutorial: packed sequences give what each gives alone") {
  hybrid const model = make_hybrid();
  buffer<float> numbers(model.parameters().size());
  model.parameters().initialise(1, numbers.data());
  float const* const parameters = numbers.data();
  auto const tokens = some_tokens(12);
  // [doc:packed]
  std::vector<index_t> const offsets{0, 5, 5, 12};  // three sequences: 5 tokens, none, 7
  auto memory = model.make_memory<float>(device::cpu{}, sequences::packed(offsets), {});
  model.forward(memory, parameters, tokens.data());  // memory.logits_rv has 12 rows
  // [/doc:packed]
  DOCTEST_CHECK(memory.logits_rv.extent[0] == 12);
  auto last = model.make_memory<float>(device::cpu{}, sequences::batch(1, 7), {});
  model.forward(last, parameters, tokens.data() + 5);
  for (index_t r = 0; r < 7; ++r)
    DOCTEST_CHECK(greatest_difference(memory.logits_rv, 5 + r, last.logits_rv, r) <= 1e-6f);
}

DOCTEST_TEST_CASE("tutorial: a run that was stopped and resumed ends with the bits of a run that was not") {
  auto const text = small::text(3000);
  small::folder const place;
  auto const folder = place.path;
  std::atomic<bool> stop{false};
  auto const train_until = [&](index_t stop_after, std::filesystem::path const& checkpoint) {
    stop = false;
    data::window_sampler const source(text, 32, 1);
    // [doc:resume]
    train::trainer run(make_hybrid(), {.steps = 12, .batch = 2, .block = 32});
    io::json_lines_log log(folder / "log.jsonl");
    train::loop_options const options{
        .checkpoint = checkpoint, .checkpoint_every = 5, .log = &log, .stop = &stop, .facts = {{"text", "words"}}};
    train::resume(run, options);  // continues from the checkpoint if there is one
    bool const done = train::train_loop(run, source, options, [&](train::metrics const& m) {
      if (m.step == stop_after) stop = true;  // what a signal handler would do
    });
    // [/doc:resume]
    return std::pair(done, small::bits_of(run));
  };
  auto const [whole_done, whole] = train_until(-1, folder / "whole.safetensors");
  auto const [first_done, first] = train_until(7, folder / "parts.safetensors");
  auto const [second_done, second] = train_until(-1, folder / "parts.safetensors");
  DOCTEST_CHECK((whole_done && !first_done && second_done));
  DOCTEST_CHECK(first != whole);
  DOCTEST_CHECK(second == whole);
}
