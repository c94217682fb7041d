#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/gates/alibi.hpp>
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/gates/retention.hpp>

// What the gates compute, over their whole range.

namespace {

using namespace seqmix;
using doctest::Approx;

template <class T>
struct mamba2_point {
  T decay, write;    // e^g and the write scale
  T d_raw, d_a_log;  // derivatives of the log-decay
  T d_raw_write;     // derivative of the write scale
};
template <class T>
mamba2_point<T> mamba2_at(T a_log, T raw) {
  auto const value = gates::mamba2::forward<T>({raw}, {a_log, T(0)});
  mamba2_point<T> p{std::exp(bounded_log_decay(value.log_decay)), value.write, 0, 0, 0};
  std::array<T, 1> d_raw{};
  std::array<T, 2> d_p{};
  gates::mamba2::pullback<T>({raw}, {a_log, T(0)}, T(1), T(0), d_raw, d_p);
  p.d_raw = d_raw[0];
  p.d_a_log = d_p[0];
  gates::mamba2::pullback<T>({raw}, {a_log, T(0)}, T(0), T(1), d_raw, d_p);
  p.d_raw_write = d_raw[0];
  return p;
}

}  // namespace

DOCTEST_TEST_CASE("P-N3: Mamba-2's gate in the extremes") {
  struct row {
    float a_log, raw, decay;
  };
  for (row const& r : {row{100, -200, 1}, row{100, 0, 0}, row{-100, 50, 1}, row{2, -3, 0.6983641087f},
                       row{88.8f, -88.8f, 0.3678794412f}, row{5, 5, 0}}) {
    DOCTEST_CAPTURE(r.a_log);
    DOCTEST_CAPTURE(r.raw);
    DOCTEST_CHECK(double(mamba2_at<float>(r.a_log, r.raw).decay) == Approx(double(r.decay)).epsilon(3e-5));
    DOCTEST_CHECK(mamba2_at<double>(double(r.a_log), double(r.raw)).decay == Approx(double(r.decay)).epsilon(1e-5));
  }
  for (auto const& [x, y] :
       {std::pair(-50.0, 1.928749848e-22), std::pair(-20.0, 2.0611536203e-9), std::pair(0.0, 0.6931471806),
        std::pair(20.0, 20.0000000021), std::pair(100.0, 100.0), std::pair(1000.0, 1000.0)}) {
    DOCTEST_CHECK(std::abs(softplus(x) - y) <= 1e-9 * y);
    DOCTEST_CHECK(std::abs(double(softplus(float(x))) - y) <= 1e-6 * y);
  }
  for (auto const& [x, y] : {std::pair(-20.0, 2.0611536182e-9), std::pair(0.0, 0.5), std::pair(100.0, 1.0)})
    DOCTEST_CHECK(std::abs(sigmoid(x) - y) <= 1e-9 * y);
}

DOCTEST_TEST_CASE_TEMPLATE("P-N3: no NaN or infinity over the whole grid of Mamba-2's gate, values and derivatives",
                           T, float, double) {
  index_t bad = 0;
  for (int a = -100; a <= 100; ++a)
    for (int raw = -300; raw <= 300; ++raw) {
      auto const p = mamba2_at<T>(T(a), T(raw));
      for (T x : {p.decay, p.write, p.d_raw, p.d_a_log, p.d_raw_write}) bad += std::isfinite(x) ? 0 : 1;
      bad += p.decay >= 0 && p.decay <= 1 ? 0 : 1;
    }
  DOCTEST_CHECK(bad == 0);
}

DOCTEST_TEST_CASE("Mamba-2's pullback is the derivative of its formula, and 0 through a decay at its bound") {
  index_t bad = 0;
  for (double a = -10; a <= 10; a += 0.5)
    for (double raw = -60; raw <= 60; raw += 1.5) {
      using number = dual<double, 3>;
      number const r = [&] {
        number x(raw);
        x.slope[0] = 1;
        return x;
      }();
      std::array<number, 2> p{number(a), number(0.25)};
      p[0].slope[1] = p[1].slope[2] = 1;
      auto const value = gates::mamba2::forward<number>({r}, p);
      auto const decay = bounded_log_decay(value.log_decay);
      std::array<double, 1> d_raw{};
      std::array<double, 2> d_p{};
      gates::mamba2::pullback<double>({raw}, {a, 0.25}, 0.7, -1.3, d_raw, d_p);
      auto const expected = [&](std::size_t i) { return 0.7 * decay.slope[i] - 1.3 * value.write.slope[i]; };
      auto const differs = [](double x, double y) {
        return !(std::abs(x - y) <= 1e-12 * std::max(1.0, std::abs(y)));
      };
      bad += differs(d_raw[0], expected(0)) + differs(d_p[0], expected(1)) + differs(d_p[1], expected(2));
    }
  DOCTEST_CHECK(bad == 0);
  DOCTEST_CHECK(mamba2_at<float>(20, 20).d_a_log == 0.0f);
  DOCTEST_CHECK(mamba2_at<float>(20, 20).d_raw == 0.0f);
}

DOCTEST_TEST_CASE("P-I1: Mamba-2's start values lie in their published ranges") {
  for (int i = 1; i < 1000; ++i) {
    gate_element const e{0, 1, 0, 1, 0, 1, i / 1000.0};
    double const A = std::exp(gates::mamba2::initial(gates::mamba2::a_log, e));
    double const step = softplus(gates::mamba2::initial(gates::mamba2::dt_bias, e));
    DOCTEST_CHECK((A >= 1 && A <= 16));
    DOCTEST_CHECK((step >= 0.999e-3 && step <= 0.1001));
  }
}

DOCTEST_TEST_CASE("ALiBi's slopes for a power of two heads and for others") {
  for (int h = 0; h < 8; ++h) DOCTEST_CHECK(gates::alibi::slope(h, 8) == std::exp2(-(h + 1)));
  std::vector<double> six;
  for (int h = 0; h < 6; ++h) six.push_back(gates::alibi::slope(h, 6));
  DOCTEST_CHECK(six == std::vector<double>{0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125});
  DOCTEST_CHECK(gates::alibi::initial(0, {1, 6, 0, 1, 0, 1, 0.5}) == -0.0625);
}

DOCTEST_TEST_CASE("RetNet's decays are 1 - 2^(-5-h), and the constant gate's contexts reach from 4 to 256 tokens") {
  for (int h = 0; h < 4; ++h)
    DOCTEST_CHECK(std::exp(gates::retention::initial(0, {h, 4, 0, 1, 0, 1, 0.5})) ==
                  Approx(1 - std::exp2(-5.0 - h)).epsilon(1e-15));
  auto const context = [](index_t h) {
    auto const g = gates::constant::forward<double>({}, {gates::constant::initial(0, {h, 8, 0, 1, 0, 1, 0.5})});
    return -1 / g.log_decay;
  };
  DOCTEST_CHECK(context(0) == Approx(4));
  DOCTEST_CHECK(context(7) == Approx(256));
  DOCTEST_CHECK(context(1) / context(0) == Approx(context(7) / context(6)));
}

DOCTEST_TEST_CASE("P-U1: a log-decay is kept between its bound and 0, and a NaN stays one") {
  DOCTEST_CHECK(bounded_log_decay(-1e9f) == -128.0f);
  DOCTEST_CHECK(bounded_log_decay(-1e9) == -1024.0);
  DOCTEST_CHECK(bounded_log_decay(-0.5f) == -0.5f);
  DOCTEST_CHECK(std::isnan(bounded_log_decay(std::numeric_limits<float>::quiet_NaN())));
  for (auto const& name : {gates::mamba2::parameters[0].name, gates::constant::parameters[0].name})
    DOCTEST_CHECK((name.find("log") != std::string_view::npos));  // the space a number lives in stands in its name
  for (double w : {-6.0, -1.0, 0.0, 1.0}) {
    double const decay = std::exp(gates::constant::forward<double>({}, {w}).log_decay);
    DOCTEST_CHECK(decay == Approx(w == -6   ? 0.9975243174
                                  : w == -1 ? 0.6922006276
                                  : w == 0  ? 0.3678794412
                                            : 0.0659880358)
                               .epsilon(1e-9));
  }
}
