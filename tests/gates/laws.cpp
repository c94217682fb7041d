#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include "../support/random_numbers.hpp"
#include "every_gate.hpp"

// What holds for every gate, over its whole range.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

bool apart(double a, double b, double tolerance) {
  return !(std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b)));
}

/// Sets the arguments of a gate one after the other.
template <class G, class T, class Raw, class Parameter>
gate_point<G, T> point(Raw const& raw, Parameter const& parameter) {
  gate_point<G, T> at;
  for (T& x : at.raw) x = T(raw());
  for (std::size_t i = 0; i < at.p.size(); ++i) at.p[i] = admissible<T>(G::parameters[i], parameter());
  return at;
}
template <class G, class T>
gate_point<G, T> random_point(random_numbers& numbers, double raw, double parameter) {
  return point<G, T>([&] { return numbers.uniform(-raw, raw); },
                     [&] { return numbers.uniform(-parameter, parameter); });
}

/// How many of a gate's values and derivatives are NaN or infinite, or a log-decay outside its range.
template <class G, class T>
int bad_numbers(gate_point<G, T> at) {
  auto const value = at.value();
  T const g = bounded_log_decay(value.log_decay);
  int bad = value.log_decay <= T(0) && g >= log_decay_bound<T> && std::isfinite(value.write) ? 0 : 1;
  if (!G::spec.log_write && !(value.write >= T(0))) ++bad;
  auto const count = [&](T x) { bad += std::isfinite(x) ? 0 : 1; };
  at.pull(T(1), T(0)), at.each_derivative(count);
  at.pull(T(0), T(1)), at.each_derivative(count);
  return bad;
}

/// How many derivatives of the pullback differ from those of the formula on dual numbers.
template <class G, class T>
int wrong_derivatives(gate_point<G, T> at) {
  T const d_log_decay = T(0.75), d_write = T(-1.25);
  auto const value = on_dual_numbers(at);
  auto const g = bounded_log_decay(value.log_decay);
  at.pull(d_log_decay, d_write);
  int wrong = 0;
  std::size_t i = 0;
  at.each_derivative([&](T found) {
    T const expected = (g.slope[i] == T(0) ? T(0) : d_log_decay * g.slope[i]) + d_write * value.write.slope[i];
    wrong += apart(double(found), double(expected), std::is_same_v<T, float> ? 1e-5 : 1e-12) ? 1 : 0;
    ++i;
  });
  return wrong;
}

/// How many derivatives of the formula on dual numbers differ from its differences.
template <class G>
int wrong_slopes(gate_point<G, double> const& at) {
  constexpr double h = 1e-5;
  auto const value = on_dual_numbers(at);
  int wrong = 0;
  auto const compare = [&](auto const& move, std::size_t direction) {
    auto low = at, high = at;
    move(low, -h), move(high, h);
    auto const a = low.value(), b = high.value();
    wrong += apart((b.log_decay - a.log_decay) / (2 * h), value.log_decay.slope[direction], 1e-7) ? 1 : 0;
    wrong += apart((b.write - a.write) / (2 * h), value.write.slope[direction], 1e-7) ? 1 : 0;
  };
  for (std::size_t i = 0; i < at.raw.size(); ++i) compare([i](auto& to, double by) { to.raw[i] += by; }, i);
  for (std::size_t i = 0; i < at.p.size(); ++i)
    compare([i](auto& to, double by) { to.p[i] += by; }, at.raw.size() + i);
  return wrong;
}

/// P-N3's grid: every parameter takes A_log's place in [-100,100], every raw value all of [-300,300].
template <class G, class T>
int bad_on_the_grid() {
  int bad = 0;
  for (int a = -100; a <= 100; ++a)
    for (int raw = -300; raw <= 300; ++raw) {
      bool first = true;  // the other parameters (biases) stay 0
      bad += bad_numbers(
          point<G, T>([&] { return double(raw); }, [&] { return std::exchange(first, false) ? double(a) : 0.0; }));
    }
  return bad;
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE(
    "P-N3: no NaN or infinity for A_log in [-100,100], raw in [-300,300]: gdn, kda, kda_bounded, mamba1, rg_lru, "
    "rwkv4, rwkv5, rwkv6, rwkv7",
    T, float, double) {
  using listed = gate_list<gates::gdn, gates::kda, gates::kda_bounded, gates::mamba1, gates::rg_lru, gates::rwkv4,
                           gates::rwkv5, gates::rwkv6, gates::rwkv7>;
  listed::each([]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    DOCTEST_CHECK(bad_on_the_grid<G, T>() == 0);
  });
}

DOCTEST_TEST_CASE_TEMPLATE("every gate: log-decays in [bound, 0], no NaN or infinity, however large the arguments",
                           T, float, double) {
  random_numbers numbers(1);
  every_gate::each([&]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    int bad = 0, ablated = 0;
    for (int i = 0; i < 2000; ++i) {
      double const size = i % 4 == 0 ? 300 : i % 4 == 1 ? 30 : 3;
      bad += bad_numbers(random_point<G, T>(numbers, size, size / 3));
      ablated += bad_numbers(random_point<gates::constant_form<G>, T>(numbers, size, size / 3));
      ablated += bad_numbers(random_point<gates::without_decay<G>, T>(numbers, size, size / 3));
    }
    for (double raw : {-300.0, -88.0, 0.0, 88.0, 300.0})
      for (double p : {-100.0, 0.0, 100.0}) bad += bad_numbers(point<G, T>([&] { return raw; }, [&] { return p; }));
    DOCTEST_CHECK(bad == 0);
    DOCTEST_CHECK(ablated == 0);
  });
}

DOCTEST_TEST_CASE_TEMPLATE("hgrn, hgrn2: finite without a lower bound (layer 0), with a tiny one and with 1", T,
                           float, double) {
  gate_list<gates::hgrn, gates::hgrn2>::each([]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    for (T bound : {T(0), T(1e-30), T(1e-3), T(0.5), T(1), T(1) + std::numeric_limits<T>::epsilon()})
      for (int raw = -300; raw <= 300; ++raw) {
        gate_point<G, T> at;
        at.raw[0] = T(raw), at.p[0] = bound;
        DOCTEST_CAPTURE(raw);
        DOCTEST_CAPTURE(bound);
        if (bound <= T(1)) DOCTEST_CHECK(bad_numbers(at) == 0);
        DOCTEST_CHECK(at.value().log_decay <= T(0));
        DOCTEST_CHECK(wrong_derivatives(at) == 0);
        if (bound == T(0)) DOCTEST_CHECK(!apart(double(at.value().log_decay), log_sigmoid(double(raw)), 1e-6));
      }
  });
}

DOCTEST_TEST_CASE_TEMPLATE(
    "every gate: its pullback is its formula on dual numbers, at random and extreme arguments", T, float, double) {
  random_numbers numbers(2);
  every_gate::each([&]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    int wrong = 0;
    for (int i = 0; i < 2000; ++i) {
      double const size = i % 4 == 0 ? 300 : i % 4 == 1 ? 30 : 3;
      wrong += wrong_derivatives(random_point<G, T>(numbers, size, size / 3));
    }
    DOCTEST_CHECK(wrong == 0);
  });
}

DOCTEST_TEST_CASE("every gate and its ablations: dual numbers give the slopes of the formula") {
  random_numbers numbers(3);
  every_gate::each([&]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    int wrong = 0;
    for (int i = 0; i < 100; ++i) {
      wrong += wrong_slopes(random_point<G, double>(numbers, 3, 1.5));
      wrong += wrong_slopes(random_point<gates::constant_form<G>, double>(numbers, 3, 1.5));
      wrong += wrong_slopes(random_point<gates::without_decay<G>, double>(numbers, 3, 1.5));
    }
    DOCTEST_CHECK(wrong == 0);
  });
}

DOCTEST_TEST_CASE("every gate: float agrees with double") {
  random_numbers numbers(4);
  every_gate::each([&]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    int wrong = 0;
    for (int i = 0; i < 500; ++i) {
      auto const exact = random_point<G, double>(numbers, 3, 1.5);
      gate_point<G, float> rounded;
      for (std::size_t k = 0; k < exact.raw.size(); ++k) rounded.raw[k] = float(exact.raw[k]);
      for (std::size_t k = 0; k < exact.p.size(); ++k) rounded.p[k] = float(exact.p[k]);
      wrong += apart(double(rounded.value().log_decay), exact.value().log_decay, 1e-5) ? 1 : 0;
      wrong += apart(double(rounded.value().write), exact.value().write, 1e-5) ? 1 : 0;
    }
    DOCTEST_CHECK(wrong == 0);
  });
}

DOCTEST_TEST_CASE("every gate that decays with its input: a NaN among the raw values stays one") {
  every_gate::each([]<class G>() {
    DOCTEST_CAPTURE(std::string(G::name));
    if constexpr (G::spec.raws > 0 && !G::spec.log_write) {
      gate_point<G, double> at;
      at.raw.fill(std::numeric_limits<double>::quiet_NaN());
      DOCTEST_CHECK(std::isnan(bounded_log_decay(at.value().log_decay)));
      DOCTEST_CHECK((!G::spec.writes || std::isnan(at.value().write)));
    }
  });
}

DOCTEST_TEST_CASE("every factored gate: log_decay is -e^(log_rate + log_step), also in its constant form") {
  random_numbers numbers(5);
  gate_list<gates::mamba1, gates::constant_form<gates::mamba1>>::each([&]<class G>() {
    for (int i = 0; i < 100; ++i) {
      auto const at = random_point<G, double>(numbers, 30, 4);
      double const product =
          -std::exp(G::template log_rate<double>(at.p) + G::template log_step<double>(at.raw, at.p));
      DOCTEST_CHECK(!apart(product, at.value().log_decay, 1e-14));
    }
  });
}

DOCTEST_TEST_CASE("every parameter marked log_rate: adding delta multiplies the decay rate by e^delta") {
  random_numbers numbers(6);
  int marked = 0;
  every_gate::each([&]<class G>() {
    for (std::size_t i = 0; i < gate_detail::parameters<G>; ++i) {
      DOCTEST_CAPTURE(std::string(G::name));
      auto at = random_point<G, double>(numbers, 2, 1);
      double const before = at.value().log_decay;
      at.p[i] += 0.5;
      bool const multiplies = !apart(at.value().log_decay / before, std::exp(0.5), 1e-12);
      DOCTEST_CHECK(multiplies == G::parameters[i].log_rate);
      marked += G::parameters[i].log_rate ? 1 : 0;
    }
  });
  DOCTEST_CHECK(marked == 8);
}
