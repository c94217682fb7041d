#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/train/evaluate.hpp>

using namespace seqmix;
using doctest::Approx;

namespace {

struct scene {
  small::transformer model = small::model<small::transformer>();
  buffer<float> parameters{model.parameters().size()};
  std::vector<std::uint8_t> text = small::text(1000);
  std::vector<data::window> windows = data::evaluation_windows(text, small::block, 7 * small::block);
  scene() { model.parameters().initialise(3, parameters.data()); }
  train::evaluation run(index_t batch, int threads = 1) {
    train::evaluator evaluate(model, small::block, batch, device::cpu{.threads = threads});
    return evaluate(parameters.data(), windows);
  }
};

}  // namespace

DOCTEST_TEST_CASE("evaluator: the mean of all windows' losses, in nats and bits") {
  scene s;
  double sum = 0.0;
  auto memory = s.model.make_memory<float>(device::cpu{}, sequences::batch(1, small::block), {});
  for (auto const& w : s.windows) {
    std::vector<std::int32_t> const x(w.x.begin(), w.x.end()), y(w.y.begin(), w.y.end());
    s.model.forward(memory, s.parameters.data(), x.data());
    sum += s.model.loss(memory, y.data(), 1.0).loss;
  }
  auto const got = s.run(1);
  DOCTEST_REQUIRE(s.windows.size() == 7);
  DOCTEST_CHECK(got.counted == 7 * small::block);
  DOCTEST_CHECK(got.nats == sum / double(7 * small::block));
  DOCTEST_CHECK(got.bits() == Approx(got.nats / std::log(2.0)).epsilon(1e-15));
  DOCTEST_CHECK(got.bits() == Approx(8.0).epsilon(0.05));
}

DOCTEST_TEST_CASE("evaluator: the batch may be larger than, or not divide, the number of windows: the same bits") {
  scene s;
  auto const one = s.run(1);
  for (index_t batch : {2, 3, 7, 10}) {
    auto const got = s.run(batch);
    DOCTEST_CHECK(got.counted == one.counted);
    DOCTEST_CHECK(got.nats == one.nats);
  }
}

DOCTEST_TEST_CASE("evaluator: the same bits for any number of threads and when used again") {
  scene s;
  double const nats = s.run(3).nats;
  DOCTEST_CHECK(nats == s.run(3, 2).nats);
  DOCTEST_CHECK(nats == s.run(3, 3).nats);
  train::evaluator evaluate(s.model, small::block, 3);
  evaluate(s.parameters.data(), std::span(s.windows).first(2));
  DOCTEST_CHECK(nats == evaluate(s.parameters.data(), s.windows).nats);
}

DOCTEST_TEST_CASE("evaluator: no windows give a loss of 0 over 0 tokens, a wrong length an error") {
  scene s;
  train::evaluator evaluate(s.model, small::block, 2);
  auto const none = evaluate(s.parameters.data(), {});
  DOCTEST_CHECK(none.counted == 0);
  DOCTEST_CHECK(none.nats == 0.0);
  auto const shorter = data::evaluation_windows(s.text, 10, 100);
  DOCTEST_CHECK_THROWS_WITH_AS(evaluate(s.parameters.data(), shorter),
                               "seqmix: evaluator: expected windows of 24 tokens, got 10 and 10", shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS(train::evaluator(s.model, 0, 2),
                               "seqmix: evaluator: block and batch must be at least 1, got 0 and 2", option_error);
}
