#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/train/adamw.hpp>

using namespace seqmix;

namespace {

// Sizes below, at and above a vector and a block; the last one is not trained.
parameter_list some_tensors() {
  parameter_list list;
  parameter_room room(list, "room", {0, 1});
  room.matrix("one", 1, 1, init::normal(1.0));
  room.vector("scale", 15, init::normal(1.0));
  room.matrix("wide", 3, 4097, init::normal(1.0));
  room.vector("long", 9000, init::normal(1.0));
  room.vector("fixed", 33, init::normal(1.0), true, false);
  return list;
}

// The text of the algorithm, one number at a time, in double.
struct plain_adamw {
  train::adamw_options o;
  double m = 0.0, v = 0.0;
  int t = 0;
  double operator()(double w, double g, double rate, bool decay) {
    ++t;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    double const m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    return w - rate * (m_hat / (std::sqrt(v_hat) + o.eps) + (decay ? o.weight_decay * w : 0.0));
  }
};

template <class T>
void fill_gradients(parameter_list const& list, int step, buffer<T>& g) {
  random_stream const random(3, "gradients");
  for (auto const& p : list.all())
    for (index_t i = p.offset; i < p.offset + p.size(); ++i)
      g[i] = T(random.normal(std::uint64_t(step) << 32 | std::uint64_t(i)) * (i % 3 == 0 ? 1e-6 : 10.0));
}

template <class T>
buffer<T> trained(int steps, int threads) {
  auto const list = some_tensors();
  buffer<T> w(list.size()), g(list.size());
  list.initialise(1, w.data());
  train::adamw<T> optimiser(list, {});
  for (int step = 0; step < steps; ++step) {
    fill_gradients(list, step, g);
    optimiser.step(device::cpu{.threads = threads}, w.data(), g.data(), 0.01 * (step + 1));
  }
  return w;
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("adamw: agrees with the plain algorithm in double over 20 steps", T, float, double) {
  auto const list = some_tensors();
  buffer<T> start(list.size()), g(list.size());
  list.initialise(1, start.data());
  std::vector<double> expected(start.begin(), start.end());
  std::vector<plain_adamw> plain(expected.size());
  for (int step = 0; step < 20; ++step) {
    fill_gradients(list, step, g);
    for (auto const& p : list.all())
      for (index_t i = p.offset; p.trained && i < p.offset + p.size(); ++i) {
        auto& w = expected[std::size_t(i)];
        w = plain[std::size_t(i)](w, double(g[i]), 0.01 * (step + 1), p.weight_decay);
      }
  }
  auto const w = trained<T>(20, 1);
  double worst = 0.0, moved = 0.0;
  for (index_t i = 0; i < w.size(); ++i) {
    worst = std::max(worst, std::abs(double(w[i]) - expected[std::size_t(i)]));
    moved = std::max(moved, std::abs(double(w[i]) - double(start[i])));
  }
  DOCTEST_CHECK(moved > 0.5);
  DOCTEST_CHECK(worst < (sizeof(T) == 4 ? 1e-5 : 1e-13));
}

DOCTEST_TEST_CASE("adamw: the same bits for any number of threads") {
  auto const one = small::bits(trained<float>(5, 1));
  DOCTEST_CHECK(one == small::bits(trained<float>(5, 2)));
  DOCTEST_CHECK(one == small::bits(trained<float>(5, 3)));
}

DOCTEST_TEST_CASE("P-T1: weight decay reaches the matrices and leaves the exempt tensors' bits") {
  auto const model = small::model<small::mamba>();
  auto const& list = model.parameters();
  buffer<float> w(list.size());
  buffer<float> const g(list.size());
  for (auto const& p : list.all()) std::fill_n(w.data() + p.offset, p.size(), 2.0f);
  train::adamw<float> optimiser(list, {.weight_decay = 0.5});
  optimiser.step(device::cpu{}, w.data(), g.data(), 0.1);
  for (auto const& p : list.all()) {
    DOCTEST_CAPTURE(p.name);
    float const expected = p.weight_decay ? 1.9f : 2.0f;
    bool all = true;
    for (index_t i = p.offset; i < p.offset + p.size(); ++i) all = all && w[i] == expected;
    DOCTEST_CHECK(all);
  }
}

DOCTEST_TEST_CASE("P-T1: the list of exempt names holds A_log, dt_bias, skip, norms and biases, and no matrix") {
  auto const model = small::model<small::mamba>();
  auto const exempt = model.parameters().without_weight_decay();
  auto const holds = [&](std::string const& name) {
    return std::find(exempt.begin(), exempt.end(), name) != exempt.end();
  };
  for (char const* layer : {"layers.0.mixer.", "layers.1.mixer."})
    for (char const* name : {"gate.A_log", "gate.dt_bias", "skip", "norm.weight", "head_norm.weight", "conv.bias"})
      DOCTEST_CHECK_MESSAGE(holds(std::string(layer) + name), layer, name);
  DOCTEST_CHECK(holds("model.norm.weight"));
  DOCTEST_CHECK(exempt.size() == 13);
  for (auto const& p : model.parameters().all()) DOCTEST_CHECK_MESSAGE(p.weight_decay == !holds(p.name), p.name);
}

DOCTEST_TEST_CASE("adamw: a tensor that is not trained keeps its bits whatever its gradient and decay") {
  auto const list = some_tensors();
  buffer<float> start(list.size());
  list.initialise(1, start.data());
  auto const w = trained<float>(3, 1);
  auto const& fixed = list.at("room.fixed");
  DOCTEST_CHECK(std::memcmp(w.data() + fixed.offset, start.data() + fixed.offset, std::size_t(fixed.size()) * 4) ==
                0);
  auto const& scale = list.at("room.scale");
  DOCTEST_CHECK(w[scale.offset] != start[scale.offset]);
}

DOCTEST_TEST_CASE_TEMPLATE("adamw: the vectorised root is right from 0 to infinity", T, float, double) {
  using isa = device::cpu::isa;
  constexpr auto lanes = std::size_t(isa::lanes<T>);
  T in[lanes], out[lanes];
  auto const check = [&](T x) {
    std::fill_n(in, lanes, x);
    simd::store<isa>(out, train::detail::root<isa, T>(simd::load<isa>(in)));
    return out[lanes - 1];
  };
  T worst = 0;
  for (T x = std::numeric_limits<T>::min(); x < std::numeric_limits<T>::max() / 4; x *= T(1.37))
    worst = std::max(worst, std::abs(check(x) / std::sqrt(x) - 1));
  DOCTEST_CHECK(worst <= 2 * std::numeric_limits<T>::epsilon());
  T const infinity = std::numeric_limits<T>::infinity();
  DOCTEST_CHECK(check(0) == T(0));
  DOCTEST_CHECK(check(infinity) == infinity);
  DOCTEST_CHECK(std::isnan(check(std::numeric_limits<T>::quiet_NaN())));
  DOCTEST_CHECK(check(std::numeric_limits<T>::denorm_min()) < T(1e-18));
}

DOCTEST_TEST_CASE("adamw: numbers outside their range are refused") {
  auto const list = some_tensors();
  auto const make = [&](train::adamw_options o) { train::adamw<float> optimiser(list, o); };
  DOCTEST_CHECK_THROWS_WITH_AS(make({.beta1 = 1.0}), "seqmix: adamw: beta1 must be in [0, 1), got 1", option_error);
  DOCTEST_CHECK_THROWS_WITH_AS(make({.beta2 = -0.5}), "seqmix: adamw: beta2 must be in [0, 1), got -0.5",
                               option_error);
  DOCTEST_CHECK_THROWS_WITH_AS(make({.eps = 0.0}), "seqmix: adamw: eps must be positive, got 0", option_error);
  DOCTEST_CHECK_THROWS_WITH_AS(make({.weight_decay = -1e-9}),
                               "seqmix: adamw: weight_decay must not be negative, got -1e-09", option_error);
}
