#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/train/trainer.hpp>

using namespace seqmix;
using doctest::Approx;

namespace {

// One weight w and loss w * token for each counted token, so that a token is its own gradient.
struct toy {
  struct memory_options {
    bool training = false;
  };
  struct memory {
    struct {
      run_knobs knobs;
    } run;
    std::vector<std::int32_t> x, y;
    double scale = 0.0;
    sequences seq;
  };
  struct loss_sum {
    double loss = 0.0;
    index_t counted = 0;
  };
  parameter_list list;
  toy() { parameter_room(list, "toy", {0, 1}).matrix("w", 1, 1, init::constant(2.0)); }
  static std::string name() { return "toy"; }
  parameter_list const& parameters() const { return list; }
  template <class T, class Device>
  memory make_memory(Device, sequences seq, memory_options) const {
    memory m;
    m.seq = seq;
    return m;
  }
  template <class T>
  void forward(memory& m, T const* w, std::int32_t const* x) const {
    m.x.assign(x, x + m.seq.rows());
    m.scale = double(*w);
  }
  loss_sum loss(memory& m, std::int32_t const* y, double scale) const {
    m.y.assign(y, y + m.seq.rows());
    loss_sum sum;
    for (std::size_t r = 0; r < m.x.size(); ++r)
      if (m.y[r] >= 0) sum.loss += m.scale * m.x[r], ++sum.counted;
    m.scale = scale;
    return sum;
  }
  template <class T>
  void backward(memory& m, T const*, std::int32_t const*, T* d) const {
    for (std::size_t r = 0; r < m.x.size(); ++r)
      if (m.y[r] >= 0) *d += T(m.scale * m.x[r]);
  }
};

struct infinite_gradient : toy {
  template <class T>
  void backward(memory&, T const*, std::int32_t const*, T* d) const {
    *d = std::numeric_limits<T>::infinity();
  }
};

// The same tokens at every step.
struct fixed {
  std::vector<std::int32_t> x, y;
  void fill(std::uint64_t, std::uint64_t, std::span<std::int32_t> to_x, std::span<std::int32_t> to_y) const {
    DOCTEST_REQUIRE(to_x.size() == x.size());
    std::copy(x.begin(), x.end(), to_x.begin());
    std::copy(y.begin(), y.end(), to_y.begin());
  }
};

train::trainer<toy, double> toy_trainer(index_t block, index_t accumulation, double clip = 0.0) {
  return {
      toy(),
      {.steps = 10, .batch = 1, .block = block, .accumulation = accumulation, .learning_rate = 0.5, .clip = clip}};
}

auto sampler(std::vector<std::uint8_t> const& text) { return data::window_sampler(text, small::block, 11); }

}  // namespace

DOCTEST_TEST_CASE("P-T2: accumulation divides by the counted labels of the whole step") {
  auto t = toy_trainer(3, 2);
  // Micro-batch 1: one counted token of gradient 4; micro-batch 2: three of mean gradient 0.
  auto const m = t.step(fixed{{4, 9, 9, 3, -1, -2}, {1, -100, -1, 0, 0, 0}});
  DOCTEST_CHECK(m.counted == 4);
  DOCTEST_CHECK(t.gradients()[0] == 1.0);
  DOCTEST_CHECK(m.gradient_norm == 1.0);
  DOCTEST_CHECK(m.loss == 2.0);
  DOCTEST_CHECK(m.tokens == 6);

  auto one_batch = toy_trainer(4, 1);
  one_batch.step(fixed{{4, 3, -1, -2}, {1, 0, 0, 0}});
  DOCTEST_CHECK(one_batch.gradients()[0] == 1.0);
  DOCTEST_CHECK(one_batch.parameters()[0] == t.parameters()[0]);
}

DOCTEST_TEST_CASE_TEMPLATE("P-T2: three micro-batches of one row are one batch of three rows", Model,
                           small::transformer, small::mamba) {
  auto const text = small::text(2000);
  auto const all = sampler(text);
  small::ignoring<data::window_sampler> const source{all, 5};
  auto options = small::run_options(10);
  train::trainer<Model> whole(small::model<Model>(), options);
  options.batch = 1;
  options.accumulation = 3;
  train::trainer<Model> parts(small::model<Model>(), options);
  auto const a = whole.step(source), b = parts.step(source);
  DOCTEST_CHECK(a.counted == b.counted);
  DOCTEST_CHECK(a.counted < 3 * small::block);
  DOCTEST_CHECK(a.loss == Approx(b.loss).epsilon(1e-6));
  DOCTEST_CHECK(a.gradient_norm == Approx(b.gradient_norm).epsilon(1e-5));
  double worst = 0.0;
  for (index_t i = 0; i < whole.gradients().size(); ++i)
    worst = std::max(worst, std::abs(double(whole.gradients()[i]) - double(parts.gradients()[i])));
  DOCTEST_CHECK(worst < 1e-6);
}

DOCTEST_TEST_CASE("P-T3: ignored labels give no loss and rows of exactly 0") {
  float const logits[] = {1, 2, 0, 0, 1, 3, 2, 2, 2};
  float d[9];
  auto ws = arena::growing();
  double loss = -1.0;
  auto const run = [&](std::vector<std::int32_t> const& labels, double scale) {
    std::fill_n(d, 9, 7.0f);
    return kernels::cross_entropy(device::cpu{}, view2<float const>(logits, {3, 3}), labels.data(), scale,
                                  view2<float>(d, {3, 3}), &loss, ws);
  };
  DOCTEST_CHECK(run({-100, 1, -100}, 1.0) == 1);
  DOCTEST_CHECK(loss == Approx(2.1698460196).epsilon(1e-7));
  double const expected[] = {0.0420100661, -0.8858048006, 0.8437947345};
  for (int i = 0; i < 3; ++i) {
    DOCTEST_CHECK(d[i] == 0.0f);
    DOCTEST_CHECK(d[3 + i] == Approx(expected[i]).epsilon(1e-6));
    DOCTEST_CHECK(d[6 + i] == 0.0f);
  }
  DOCTEST_CHECK(run({-100, -100, -100}, 1.0) == 0);
  DOCTEST_CHECK(loss == 0.0);
  for (float x : d) DOCTEST_CHECK(x == 0.0f);
  DOCTEST_CHECK(run({0, 1, 2}, 1.0 / 3) == 3);
  DOCTEST_CHECK(loss / 3 == Approx(1.5586880909).epsilon(1e-7));
}

DOCTEST_TEST_CASE("P-T3: a step whose labels are all ignored changes nothing but the number of steps") {
  auto const text = small::text(2000);
  auto const all = sampler(text);
  train::trainer<small::transformer> t(small::model<small::transformer>(), small::run_options(10));
  t.step(all);
  auto const before = small::bits_of(t);
  auto const m = t.step(small::ignoring<data::window_sampler>{all, 0});
  DOCTEST_CHECK(m.step == 2);
  DOCTEST_CHECK(m.loss == 0.0);
  DOCTEST_CHECK(m.counted == 0);
  DOCTEST_CHECK(m.gradient_norm == 0.0);
  DOCTEST_CHECK(before == small::bits_of(t));
  DOCTEST_CHECK(t.optimiser().updates() == 1);
  DOCTEST_CHECK(t.step() == 2);
}

DOCTEST_TEST_CASE_TEMPLATE("trainer: five steps have the same bits with 1, 2 and 3 threads", Model,
                           small::transformer, small::mamba) {
  auto const text = small::text(2000);
  auto const run = [&](int threads) {
    // More rows than a block of every kernel, so that there is work to share.
    auto options = small::run_options(5, threads);
    options.batch = 13;
    train::trainer<Model> t(small::model<Model>(), options);
    std::string losses;
    for (int i = 0; i < 5; ++i) {
      auto const m = t.step(sampler(text));
      losses += train::detail::number_text(m.loss) + " " + train::detail::number_text(m.gradient_norm) + "\n";
    }
    return losses + small::bits_of(t);
  };
  auto const one = run(1);
  DOCTEST_CHECK(one == run(2));
  DOCTEST_CHECK(one == run(3));
}

DOCTEST_TEST_CASE_TEMPLATE("trainer: the loss falls on a text that repeats itself", Model, small::transformer,
                           small::mamba) {
  auto const text = small::text(2000);
  train::trainer<Model> t(small::model<Model>(), small::run_options(60));
  auto const first = t.step(sampler(text));
  DOCTEST_CHECK(first.loss == Approx(std::log(256.0)).epsilon(0.05));
  DOCTEST_CHECK(first.learning_rate == t.schedule().at(0));
  train::metrics m;
  while (!t.finished()) m = t.step(sampler(text));
  DOCTEST_CHECK(m.step == 60);
  DOCTEST_CHECK(m.tokens == 60 * 3 * small::block);
  DOCTEST_CHECK(m.learning_rate == t.schedule().at(59));
  DOCTEST_CHECK(m.loss < first.loss - 3.0);
}

DOCTEST_TEST_CASE_TEMPLATE("trainer: a NaN parameter stops the step before anything changes", Model,
                           small::transformer, small::mamba) {
  auto const text = small::text(2000);
  train::trainer<Model> t(small::model<Model>(), small::run_options(10));
  t.step(sampler(text));
  t.parameters()[t.model().parameters().at("layers.1.mixer.out").offset] = std::numeric_limits<float>::quiet_NaN();
  auto const before = small::bits_of(t);
  DOCTEST_CHECK_THROWS_WITH_AS(
      t.step(sampler(text)),
      "seqmix: trainer: step 2: the loss is nan (loss nan); the parameters are as they were after "
      "step 1",
      value_error);
  DOCTEST_CHECK(before == small::bits_of(t));
  DOCTEST_CHECK(t.step() == 1);
  DOCTEST_CHECK(t.optimiser().updates() == 1);
}

DOCTEST_TEST_CASE("trainer: an infinite gradient under a finite loss stops the step too") {
  train::trainer<infinite_gradient, float> bad(infinite_gradient(), {.steps = 10, .batch = 1, .block = 2});
  DOCTEST_CHECK_THROWS_WITH_AS(
      bad.step(fixed{{1, 2}, {0, 0}}),
      "seqmix: trainer: step 1: the gradient norm is inf (loss 3); the parameters are as they were "
      "after step 0",
      value_error);
  DOCTEST_CHECK(bad.parameters()[0] == 2.0f);
  DOCTEST_CHECK(bad.optimiser().updates() == 0);
}

DOCTEST_TEST_CASE("trainer: clips the gradient it steps with and reports the norm before") {
  auto t = toy_trainer(2, 1, 0.25);
  auto const m = t.step(fixed{{3, 5}, {0, 0}});
  DOCTEST_CHECK(m.gradient_norm == 4.0);
  DOCTEST_CHECK(t.gradients()[0] == 0.25);
}

DOCTEST_TEST_CASE_TEMPLATE("trainer: a step allocates nothing", Model, small::transformer, small::mamba) {
  auto const text = small::text(2000);
  auto const source = sampler(text);
  auto options = small::run_options(10);
  options.accumulation = 2;
  train::trainer<Model> t(small::model<Model>(), options);
  for (int i = 0; i < 3; ++i) {
    long const before = small::allocations();
    t.step(source);
    DOCTEST_CHECK(small::allocations() == before);
  }
}

DOCTEST_TEST_CASE("trainer: options outside their range are refused") {
  auto const refuse = [](train::trainer_options o, std::string_view complaint) {
    try {
      train::trainer<toy, double> const t(toy(), o);
      DOCTEST_FAIL("accepted");
    } catch (option_error const& e) {
      DOCTEST_CHECK(std::string_view(e.what()) == complaint);
    }
  };
  refuse({.steps = 0}, "seqmix: trainer: steps must be at least 1, got 0");
  refuse({.batch = -1}, "seqmix: trainer: batch must be at least 1, got -1");
  refuse({.block = 0}, "seqmix: trainer: block must be at least 1, got 0");
  refuse({.accumulation = 0}, "seqmix: trainer: accumulation must be at least 1, got 0");
  refuse({.learning_rate = std::numeric_limits<double>::infinity()},
         "seqmix: trainer: learning_rate must be finite and not negative, got inf");
  refuse({.warmup_fraction = 1.5}, "seqmix: trainer: warmup_fraction must be in [0, 1], got 1.5");
  refuse({.floor = -0.25}, "seqmix: trainer: floor must be in [0, 1], got -0.25");
  refuse({.clip = -1.0}, "seqmix: trainer: clip must not be negative, got -1");
  refuse({.threads = 0}, "seqmix: trainer: threads must be at least 1, got 0");
}
