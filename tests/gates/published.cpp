#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../support/golden.hpp"
#include "../support/random_numbers.hpp"
#include "every_gate.hpp"

// Formulas and start values against the papers and the published code.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using doctest::Approx;

double const e = std::exp(1.0);
double plain_sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double plain_softplus(double x) { return std::log(1 + std::exp(x)); }

/// The place of channel n of `channels` in heads of `keys`.
gate_element channel(index_t n, index_t channels, index_t keys, index_t layer = 0, index_t layers = 1) {
  return {n / keys, channels / keys, n % keys, keys, layer, layers, 0.5};
}
gate_element drawn(double uniform) { return {0, 1, 0, 1, 0, 1, uniform}; }

template <class G>
void check_value(std::array<double, gate_detail::raws<G>> const& raw,
                 std::array<double, gate_detail::parameters<G>> const& p, double decay, double write = 1) {
  DOCTEST_CAPTURE(std::string(G::name));
  auto const value = G::template forward<double>(raw, p);
  DOCTEST_CHECK(std::exp(value.log_decay) == Approx(decay).epsilon(1e-12));
  DOCTEST_CHECK(value.write == Approx(write).epsilon(1e-12));
}

/// A stored gate: raw values [tokens, heads (, keys)], A_log per head, dt_bias per raw value of a token.
template <class G, class T>
void check_stored(char const* name) {
  golden_case const stored(std::string("ops/") + name);
  DOCTEST_CAPTURE(stored.name());
  auto const raw = stored.converted<T>("g"), a_log = stored.converted<T>("A_log"),
             dt_bias = stored.converted<T>("dt_bias"), cotangent = stored.converted<T>("cot_y");
  index_t const heads = a_log.size(), width = dt_bias.size(), tokens = raw.size() / width;
  std::vector<T> y, d_raw, d_a_log(std::size_t(heads), T(0)), d_dt_bias(std::size_t(width), T(0));
  for (index_t t = 0; t < tokens; ++t)
    for (index_t c = 0; c < width; ++c) {
      index_t const i = t * width + c, head = c / (width / heads);
      gate_point<G, T> at;
      at.raw = {raw[i]};
      at.p = {a_log[head], dt_bias[c]};
      y.push_back(at.value().log_decay);
      at.pull(cotangent[i], T(0));
      d_raw.push_back(at.d_raw[0]);
      d_a_log[std::size_t(head)] += at.d_p[0];
      d_dt_bias[std::size_t(c)] += at.d_p[1];
    }
  auto const check = [&](std::vector<T> const& found, char const* tensor) {
    auto const r = compare(found.data(), stored[tensor]);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  check(y, "y"), check(d_raw, "grad_g"), check(d_a_log, "grad_A_log"), check(d_dt_bias, "grad_dt_bias");
}

/// Whether all but the last digits agree, however small the numbers.
bool agrees(double found, double expected, double tolerance) {
  return std::abs(found - expected) <= tolerance * std::abs(expected);
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("gdn, kda, kda_bounded: values and gradients of their authors' code", T, float, double) {
  check_stored<gates::gdn, T>("gate_gdn");
  check_stored<gates::kda, T>("gate_kda");
  check_stored<gates::kda_bounded, T>("gate_kda_lowerbound");
}

DOCTEST_TEST_CASE("every gate is the formula of its paper") {
  random_numbers numbers(7);
  for (int i = 0; i < 20; ++i) {
    double const x = numbers.uniform(-3, 3), y = numbers.uniform(-3, 3), a = numbers.uniform(-1, 1),
                 b = numbers.uniform(-1, 1), lb = numbers.uniform(0, 1), s = plain_softplus(x + b);
    double const f = lb + (1 - lb) * plain_sigmoid(x);
    check_value<gates::log_sigmoid>({x}, {}, plain_sigmoid(x));
    check_value<gates::gla>({x}, {}, std::pow(plain_sigmoid(x), 1.0 / 16));
    check_value<gates::gdn>({x}, {a, b}, std::exp(-std::exp(a) * s));
    check_value<gates::kda>({x}, {a, b}, std::exp(-std::exp(a) * s));
    check_value<gates::kda_bounded>({x}, {a, b}, std::exp(-5 * plain_sigmoid(std::exp(a) * (x + b))));
    check_value<gates::mamba1>({x}, {a, b}, std::exp(-std::exp(a) * s), s);
    check_value<gates::mamba2>({x}, {a, b}, std::exp(-std::exp(a) * s), s);
    check_value<gates::mamba3>({x, y}, {b}, std::exp(-s * (y < 0 ? 1 / (1 - y) : 1 + y)), s);
    check_value<gates::rwkv4>({x}, {a}, std::exp(-std::exp(a)), x);
    check_value<gates::rwkv5>({}, {a}, std::exp(-std::exp(a)));
    check_value<gates::rwkv6>({x}, {a}, std::exp(-std::exp(a + x)));
    check_value<gates::rwkv7>({x}, {a}, std::exp(-plain_sigmoid(a + x) / std::sqrt(e)));
    check_value<gates::hgrn>({x}, {lb}, f, 1 - f);
    check_value<gates::hgrn2>({x}, {lb}, f);
    double const r = std::exp(-8 * plain_sigmoid(x) * plain_softplus(a));
    check_value<gates::rg_lru>({x, y}, {a}, r, std::sqrt(1 - r * r) * plain_sigmoid(y));
    DOCTEST_CHECK(gates::rg_lru::first<double>({x, y}, {a}).write == Approx(plain_sigmoid(y)).epsilon(1e-14));
    check_value<gates::min_gru>({x}, {}, 1 - plain_sigmoid(x), plain_sigmoid(x));
    double const both = plain_sigmoid(x) + plain_sigmoid(y);
    check_value<gates::min_lstm>({x, y}, {}, plain_sigmoid(x) / both, plain_sigmoid(y) / both);
    check_value<gates::mlstm>({x, y}, {}, plain_sigmoid(x), y);
  }
  check_value<gates::mamba3>({0.0, -1e5}, {0.5}, std::exp(-1e-4 * plain_softplus(0.5)), plain_softplus(0.5));
}

DOCTEST_TEST_CASE("P-U1: RWKV-5's and -6's raw w of -6, -1, 0, 1 are these decays, and RWKV-4's") {
  double const decays[][2] = {{-6, 0.9975243174}, {-1, 0.6922006276}, {0, 0.3678794412}, {1, 0.0659880358}};
  for (auto const& [w, decay] : decays) {
    DOCTEST_CHECK(std::exp(gates::rwkv4::forward<double>({0.3}, {w}).log_decay) == Approx(decay).epsilon(1e-9));
    DOCTEST_CHECK(std::exp(gates::rwkv5::forward<double>({}, {w}).log_decay) == Approx(decay).epsilon(1e-9));
    DOCTEST_CHECK(std::exp(gates::rwkv6::forward<double>({0.0}, {w}).log_decay) == Approx(decay).epsilon(1e-9));
    DOCTEST_CHECK(std::exp(gates::rwkv6::forward<double>({w}, {0.0}).log_decay) == Approx(decay).epsilon(1e-9));
  }
}

DOCTEST_TEST_CASE("P-N3: the listed pairs of A_log and raw, for gdn, kda and mamba1") {
  struct row {
    float a_log, raw, decay;
  };
  for (row const& r : {row{100, -200, 1}, row{100, 0, 0}, row{-100, 50, 1}, row{2, -3, 0.6983641087f},
                       row{88.8f, -88.8f, 0.3678794412f}, row{5, 5, 0}})
    gate_list<gates::gdn, gates::kda, gates::mamba1>::each([&]<class G>() {
      DOCTEST_CAPTURE(std::string(G::name));
      DOCTEST_CAPTURE(r.a_log);
      float const g = bounded_log_decay(G::template forward<float>({r.raw}, {r.a_log, 0.0f}).log_decay);
      DOCTEST_CHECK(double(std::exp(g)) == Approx(double(r.decay)).epsilon(3e-5));
    });
}

DOCTEST_TEST_CASE("P-I1: steps start between 1e-3 and 1e-1, rates in their published ranges") {
  for (int i = 1; i < 1000; ++i) {
    auto const at = drawn(i / 1000.0);
    for (double bias : {gates::mamba1::initial(gates::mamba1::dt_bias, at), gates::mamba3::initial(0, at),
                        gates::gdn::initial(gates::gdn::dt_bias, at), gates::kda::initial(gates::kda::dt_bias, at),
                        gates::kda_bounded::initial(gates::kda_bounded::dt_bias, at)}) {
      double const step = plain_softplus(bias);
      DOCTEST_CHECK((step >= 0.999e-3 && step <= 0.1001));
    }
    DOCTEST_CHECK(std::exp(gates::gdn::initial(0, at)) == Approx(16 * at.uniform));
    DOCTEST_CHECK(std::exp(gates::kda::initial(0, at)) == Approx(1 + 15 * at.uniform));
    DOCTEST_CHECK(gates::kda_bounded::initial(0, at) == 0.0);
    double const a = std::exp(-plain_softplus(gates::rg_lru::initial(0, at)));
    DOCTEST_CHECK(a * a == Approx(0.81 + at.uniform * (0.998001 - 0.81)));
  }
  for (index_t n = 0; n < 16; ++n)
    DOCTEST_CHECK(std::exp(gates::mamba1::initial(gates::mamba1::a_log, {3, 8, n, 16, 0, 1, 0.5})) ==
                  Approx(double(n + 1)));
}

DOCTEST_TEST_CASE("RWKV's start values over channels and layers") {
  // 8 channels, two heads of 4, layer 1 of 3: depth 1/2
  for (index_t n : {0, 3, 7}) {
    double const place = double(n) / 7, z[] = {-1, -1.0 / 3, 1.0 / 3, 1};
    auto const at = channel(n, 8, 4, 1, 3);
    DOCTEST_CHECK(gates::rwkv4::initial(0, channel(n, 8, 1, 1, 3)) == Approx(-5 + 8 * std::pow(place, 1.35)));
    DOCTEST_CHECK(gates::rwkv5::initial(0, at) == Approx(-6 + 5 * std::pow(place, 1.35)));
    DOCTEST_CHECK(gates::rwkv6::initial(0, at) == Approx(-6 + 5 * std::pow(place, 1.35)));
    double const zz = z[n % 4] * std::abs(z[n % 4]);
    DOCTEST_CHECK(gates::rwkv7::initial(0, at) ==
                  Approx(-5.5 + 6 * std::pow(place, 1 + std::pow(0.5, 0.3)) + 2.5 * zz));
  }
  // the first layer, and a single layer
  for (index_t layers : {1, 4}) {
    DOCTEST_CHECK(gates::rwkv5::initial(0, channel(5, 8, 4, 0, layers)) == Approx(-6 + 5 * std::pow(5.0 / 7, 0.7)));
    DOCTEST_CHECK(gates::rwkv7::initial(0, channel(5, 8, 4, 0, layers)) == Approx(-5.5 + 6 * 5.0 / 7 - 2.5 / 9));
  }
  gate_list<gates::rwkv4, gates::rwkv5, gates::rwkv6, gates::rwkv7>::each(
      []<class G>() { DOCTEST_CHECK(std::isfinite(G::initial(0, channel(0, 1, 1)))); });
}

DOCTEST_TEST_CASE("biases start where published: mLSTM from 3 to 6 and N(0, 0.1), FoX's spaced contexts") {
  for (index_t h = 0; h < 4; ++h)
    DOCTEST_CHECK(gates::mlstm::bias_initial(0, {h, 4, 0, 1, 0, 1, 0.5}) == Approx(3.0 + double(h)));
  DOCTEST_CHECK(gates::mlstm::bias_initial(0, drawn(0.5)) == 3.0);
  double const quantiles[][2] = {{0.5, 0},
                                 {0.975, 1.959963984540054},
                                 {0.025, -1.959963984540054},
                                 {1e-9, -5.997807015007687},
                                 {0.8413447460685429, 1}};
  for (auto const& [u, x] : quantiles)
    DOCTEST_CHECK(gates::mlstm::bias_initial(1, drawn(u)) == Approx(0.1 * x).epsilon(1e-9));
  using spaced = gates::spaced_log_sigmoid<2, 128>;
  for (index_t h = 0; h < 7; ++h) {
    double const bias = spaced::bias_initial(0, {h, 7, 0, 1, 0, 1, 0.5});
    DOCTEST_CHECK(-1 / spaced::forward<double>({bias}, {}).log_decay == Approx(std::exp2(double(h + 1))));
  }
  DOCTEST_CHECK(spaced::name == "spaced_log_sigmoid<2,128>");
  DOCTEST_CHECK(gates::spaced_log_sigmoid<>::name == "spaced_log_sigmoid<4,256>");
}

DOCTEST_TEST_CASE("constant_form: a gate's formula on trained numbers") {
  using constant = gates::constant_form<gates::mamba2>;
  static_assert(constant::name == "constant_form<mamba2>");
  static_assert(constant::spec.constant() && constant::spec.from == feed::nothing && constant::spec.writes);
  static_assert(constant::parameters.size() == 3 && constant::parameters[2].name == "raw");
  static_assert(constant::parameters[0].name == "A_log" && constant::parameters[0].log_rate);
  auto const a = constant::forward<double>({}, {0.5, -1.0, 2.0});
  auto const b = gates::mamba2::forward<double>({2.0}, {0.5, -1.0});
  DOCTEST_CHECK((a.log_decay == b.log_decay && a.write == b.write));
  DOCTEST_CHECK(constant::initial(1, drawn(0.3)) == gates::mamba2::initial(1, drawn(0.3)));
  DOCTEST_CHECK(constant::initial(2, drawn(0.3)) == 0.0);

  using of_channels = gates::constant_form<gates::kda>;  // raw values per key channel stay per key channel
  static_assert(of_channels::parameters[2].on == axis::head_key && of_channels::spec.decay == axis::head_key);
  using of_two = gates::constant_form<gates::mlstm>;
  static_assert(of_two::parameters[0].name == "raw_0" && of_two::parameters[1].name == "raw_1");
  static_assert(of_two::spec.log_write && !of_two::spec.bias);
  DOCTEST_CHECK(of_two::initial(0, {1, 4, 0, 1, 0, 1, 0.5}) == 4.0);
  using factored = gates::constant_form<gates::mamba1>;
  static_assert(factored::spec.factored && factored::spec.source == feed_source::input);
  using griffin = gates::constant_form<gates::rg_lru>;
  DOCTEST_CHECK(griffin::first<double>({}, {0.5, 1.0, 2.0}).write == sigmoid(2.0));
  using bounds = gates::constant_form<gates::hgrn>;
  static_assert(bounds::parameters[0].source == parameter_source::cumulative_softmax);
}

DOCTEST_TEST_CASE("without_decay: nothing is forgotten, the write scale stays") {
  using kept = gates::without_decay<gates::mamba2>;
  static_assert(kept::name == "without_decay<mamba2>");
  static_assert(!kept::spec.decays && kept::spec.writes && kept::spec.from == feed::linear);
  static_assert(kept::parameters.size() == 2 && !kept::parameters[0].log_rate);
  DOCTEST_CHECK(kept::initial(1, drawn(0.3)) == gates::mamba2::initial(1, drawn(0.3)));
  every_gate::each([]<class G>() {
    using ablated = gates::without_decay<G>;
    DOCTEST_CAPTURE(std::string(ablated::name));
    static_assert(gate<ablated> && !ablated::spec.decays && !ablated::spec.factored);
    static_assert(ablated::spec.writes == G::spec.writes && ablated::spec.log_write == G::spec.log_write);
    static_assert(G::spec.writes || (ablated::spec.raws == 0 && ablated::parameters.size() == 0));
    static_assert(ablated::spec.decay == axis::head);  // so that no parameter is left out of a sum over keys
    for (auto const& p : ablated::parameters) DOCTEST_CHECK((p.on == axis::head && !p.log_rate));
    gate_point<ablated, double> at;
    DOCTEST_CHECK(at.value().log_decay == 0.0);
  });
  // Mamba-1's rates per state go, its step stays
  using steps = gates::without_decay<gates::mamba1>;
  static_assert(steps::parameters.size() == 1 && steps::parameters[0].name == "dt_bias");
  DOCTEST_CHECK(steps::forward<double>({0.7}, {0.4}).write == softplus(1.1));
  DOCTEST_CHECK(steps::initial(0, drawn(0.3)) == gates::mamba1::initial(1, drawn(0.3)));
  using griffin = gates::without_decay<gates::rg_lru>;
  DOCTEST_CHECK(griffin::forward<double>({0.5, 1.0}, {0.2}).write ==
                gates::rg_lru::forward<double>({0.5, 1.0}, {0.2}).write);
  DOCTEST_CHECK(griffin::first<double>({0.5, 1.0}, {0.2}).write == sigmoid(1.0));
  using lstm = gates::without_decay<gates::mlstm>;
  DOCTEST_CHECK(lstm::bias_initial(0, {1, 4, 0, 1, 0, 1, 0.5}) == 4.0);
}

DOCTEST_TEST_CASE("the names of gates and their ablations are all different") {
  std::vector<std::string> names;
  every_gate::each([&]<class G>() {
    for (std::string_view name : {G::name, gates::constant_form<G>::name, gates::without_decay<G>::name})
      names.emplace_back(name);
  });
  std::sort(names.begin(), names.end());
  DOCTEST_CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
  DOCTEST_CHECK(names.size() == 69);
}

DOCTEST_TEST_CASE("functions of formulas keep their digits where the plain ones lose them") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  DOCTEST_CHECK(agrees(log_add_exp(1000.0, 1000.0), 1000 + std::log(2.0), 1e-15));
  DOCTEST_CHECK(log_add_exp(-infinity, -2.0) == -2.0);
  DOCTEST_CHECK(log_add_exp(-infinity, -infinity) == -infinity);
  DOCTEST_CHECK(std::isnan(log_add_exp(std::nan(""), 0.0)));
  DOCTEST_CHECK(std::isnan(log_add_exp(0.0, std::nan(""))));
  using number = dual<double, 2>;
  auto const variable = [](double x, std::size_t i) {
    number n(x);
    n.slope[i] = 1;
    return n;
  };
  auto const sum = log_add_exp(variable(-1, 0), variable(0.5, 1));
  DOCTEST_CHECK(sum.value == Approx(std::log(std::exp(-1) + std::exp(0.5))).epsilon(1e-15));
  DOCTEST_CHECK(sum.slope[0] == Approx(std::exp(-1 - sum.value)));
  DOCTEST_CHECK(sum.slope[1] == Approx(std::exp(0.5 - sum.value)));
  DOCTEST_CHECK(log_add_exp(variable(-infinity, 0), variable(-infinity, 1)).slope[0] == 0.5);

  DOCTEST_CHECK(agrees(one_minus_exp(-1e-20), 1e-20, 1e-15));
  DOCTEST_CHECK(agrees(double(one_minus_exp(-1e-5f)), 9.99995e-6, 1e-7));
  DOCTEST_CHECK(agrees(inverse_softplus(softplus(-20.0)), -20.0, 1e-12));
  DOCTEST_CHECK(inverse_softplus(100.0) == 100.0);
  DOCTEST_CHECK(softplus_difference(300.25f, 300.0f) == 0.25f);
  DOCTEST_CHECK(agrees(double(softplus_difference(20.25f, 20.0f)), softplus(20.25) - softplus(20.0), 1e-7));
  DOCTEST_CHECK(agrees(double(softplus_difference(9.125f, 9.0f)), softplus(9.125) - softplus(9.0), 1e-7));
  DOCTEST_CHECK(agrees(softplus_difference(-300.0, -299.0), std::exp(-300) - std::exp(-299), 1e-12));
  for (double x : {-3.0, 0.5, 2.0})
    for (double y : {-2.0, 1.0}) DOCTEST_CHECK(agrees(softplus_difference(x, y), softplus(x) - softplus(y), 1e-13));

  // Griffin's root: 1000 below 2.5e-7, where the plain derivative passes it
  DOCTEST_CHECK(bounded_sqrt(variable(0, 0)).slope[0] == 1000.0);
  DOCTEST_CHECK(bounded_sqrt(variable(1e-7, 0)).slope[0] == 1000.0);
  DOCTEST_CHECK(bounded_sqrt(variable(1e-6, 0)).slope[0] == Approx(500));
  DOCTEST_CHECK(bounded_sqrt(variable(0.25, 0)).slope[0] == 1.0);
  DOCTEST_CHECK(bounded_sqrt(0.25) == 0.5);

  // a forget gate near 1 keeps 1 - f, a bound of 0 leaves the plain log(sigmoid)
  DOCTEST_CHECK(agrees(log_floored_sigmoid(40.0, 0.25), -0.75 * std::exp(-40.0), 1e-12));
  DOCTEST_CHECK(agrees(log_floored_sigmoid(-700.0, 0.25), std::log(0.25), 1e-15));
  DOCTEST_CHECK(log_floored_sigmoid(-700.0, 0.0) == -700.0);
}
