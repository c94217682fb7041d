#include <cmath>

#include "../support/models.hpp"
#include <seqmix/layers/gate_room.hpp>
#include <seqmix/layers/s4d_layer.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

using plain = s4d_layer<>;
using branch = s4d_layer<norm_kind::layer, false>;

s4d_layer_options sizes() { return {.states = 6, .recurrence_chunk = 4}; }

/// f(value, index) for a tensor of the first layer.
template <class F>
void each(small_model<plain> const& m, std::string const& name, F const& f) {
  auto const& p = m.model.parameters().at("layers.0.mixer." + name);
  for (index_t i = 0; i < p.size(); ++i) f(m.parameters[p.offset + i], i);
}

}  // namespace

DOCTEST_TEST_CASE("a model of S4D layers has the gradients of both oracles, and the laws hold") {
  check_model_gradients<plain>(sizes());
  check_model_difference<plain>(sizes());
  check_model_laws<plain, double>(sizes());
}

DOCTEST_TEST_CASE("a model of S4D layers in float obeys the laws, with the published number of states") {
  check_model_laws<plain, float>({});
}

DOCTEST_TEST_CASE("an S4D layer without its residual and behind LayerNorm has the gradients of a dual number") {
  check_model_gradients<branch>(sizes());
  DOCTEST_CHECK(plain::name() == "s4d");
  DOCTEST_CHECK(branch::name() == "s4d[norm=layer,branch]");
}

DOCTEST_TEST_CASE("P-I1: S4D starts with steps in [1e-3, 1e-1], A = -1/2 + i pi n, and C and D of variance 1") {
  small_model<plain> const m(sizes());
  index_t const pairs = 3, count = small_model<plain>::d_model * pairs;
  each(m, "log_dt",
       [](double x, index_t i) { DOCTEST_CHECK((x >= std::log(1e-3) && x <= std::log(1e-1) && i < 16)); });
  each(m, "log_A_real",
       [](double x, index_t) { DOCTEST_CHECK(std::exp(x) == doctest::Approx(0.5).epsilon(1e-14)); });
  each(m, "A_imag", [](double x, index_t i) {
    DOCTEST_CHECK(x == doctest::Approx(double(i % 3) * 3.141592653589793).epsilon(1e-14));
  });
  // The test's model has 8 times the published C and D.
  double square = 0;
  each(m, "C", [&](double x, index_t) { square += x * x / 64; });
  DOCTEST_CHECK(square / double(count) == doctest::Approx(1.0).epsilon(0.3));
  square = 0;
  each(m, "D", [&](double x, index_t) { square += x * x / 64; });
  DOCTEST_CHECK(square / 16.0 == doctest::Approx(1.0).epsilon(0.8));
  auto const decays = [&](char const* name) {
    return m.model.parameters().at(std::string("layers.1.mixer.") + name).weight_decay;
  };
  DOCTEST_CHECK_FALSE((decays("log_dt") || decays("log_A_real") || decays("A_imag")));
  DOCTEST_CHECK((decays("C") && decays("D") && decays("out")));
}

DOCTEST_TEST_CASE("an S4D layer's state has one number for every channel and state, whatever it has seen") {
  small_model<plain> const m(sizes());
  DOCTEST_CHECK(m.model.state_elements(3, 5) == 2 * 3 * 16 * 6);
  DOCTEST_CHECK(m.model.state_elements(3, 500) == m.model.state_elements(3, 5));
}

DOCTEST_TEST_CASE("S4D's decay rates are shifted by the knob of a run, in the parameters or in the options alike") {
  small_model<plain> const m(sizes());
  auto const seq = sequences::batch(2, 13);
  auto const logits = [&](small_model<plain> const& x, double offset) {
    auto mem = x.model.make_memory<double>(device::cpu{1}, seq, {});
    mem.run.knobs.decay_offset = offset;
    x.model.forward(mem, x.parameters.data(), x.tokens.data());
    return std::vector<double>(mem.logits_rv.data, mem.logits_rv.data + mem.logits_rv.size());
  };
  auto const by_knob = logits(m, 1.5);
  DOCTEST_CHECK(by_knob != logits(m, 0.0));
  small_model<plain> shifted(sizes());
  DOCTEST_CHECK(shift_decay_rates(shifted.model.parameters(), shifted.parameters.data(), 1.5) == 2 * 16 * 3);
  auto o = sizes();
  o.decay_offset = 1.5;
  small_model<plain> const constructed(o);
  for (auto const& other : {logits(shifted, 0.0), logits(constructed, 0.0)})
    for (std::size_t i = 0; i < other.size(); ++i) DOCTEST_CHECK(std::abs(other[i] - by_knob[i]) <= 1e-12);
}

DOCTEST_TEST_CASE("S4D says which number of states it cannot have") {
  auto o = sizes();
  o.states = 7;
  DOCTEST_CHECK_THROWS_WITH_AS(
      small_model<plain>{o},
      "seqmix: s4d_layer: states must be an even number of at least 2, conjugate pairs, got 7", option_error);
  o = sizes();
  o.recurrence_chunk = 0;
  DOCTEST_CHECK_THROWS_WITH_AS(small_model<plain>{o},
                               "seqmix: s4d_layer: recurrence_chunk must be at least 1, got 0", option_error);
}
