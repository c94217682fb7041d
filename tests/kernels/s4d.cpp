#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "../support/golden.hpp"
#include "../support/random_numbers.hpp"
#include <seqmix/kernels/cpu/s4d.hpp>

// S4D against the golden vectors, dual numbers and its own laws.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// What S4D reads, or the derivatives of all of it; `initial` empty: none.
template <class T>
struct s4d_numbers {
  std::vector<T> u, log_dt, log_A_real, A_imag, C, D, initial;

  template <class F>
  void each(F const& f) {
    f(u), f(log_dt), f(log_A_real), f(A_imag), f(C), f(D), f(initial);
  }
  template <class U, class F>
  void each_with(s4d_numbers<U>& o, F const& f) {
    f(u, o.u), f(log_dt, o.log_dt), f(log_A_real, o.log_A_real), f(A_imag, o.A_imag), f(C, o.C), f(D, o.D);
    f(initial, o.initial);
  }
  template <class U>
  s4d_numbers<U> as() {
    s4d_numbers<U> to;
    each_with(to, [](auto& from, auto& other) { other.assign(from.begin(), from.end()); });
    return to;
  }
};
template <class T>
struct s4d_result {
  std::vector<T> y, final;
};

/// s4d_input<T> or s4d_gradient<T> of numbers.
template <class Views, class T>
Views views_of(s4d_shape const& s, std::vector<T> const& u, s4d_numbers<T> const& x) {
  auto const at = [](std::vector<T> const& v) { return const_cast<T*>(v.data()); };
  Views v;
  v.u_rh = {at(u), {s.seq.rows(), s.channels}};
  v.log_dt_h = {at(x.log_dt), {s.channels}};
  v.log_A_real_hp = {at(x.log_A_real), {s.channels, s.pairs}};
  v.A_imag_hp = {at(x.A_imag), {s.channels, s.pairs}};
  v.C_hpc = {at(x.C), {s.channels, s.pairs, 2}};
  v.D_h = {at(x.D), {s.channels}};
  if (!x.initial.empty()) v.initial_nhpc = {at(x.initial), {s.seq.count(), s.channels, s.pairs, 2}};
  return v;
}
template <class T>
s4d_input<T> input_of(s4d_shape const& s, s4d_numbers<T> const& x) {
  return views_of<s4d_input<T>>(s, x.u, x);
}
template <class T>
view2<T> rows_of(s4d_shape const& s, std::vector<T> const& x) {
  return {const_cast<T*>(x.data()), {s.seq.rows(), s.channels}};
}
template <class T>
view4<T> state_of(s4d_shape const& s, std::vector<T> const& x) {
  if (x.empty()) return {};
  return {const_cast<T*>(x.data()), {s.seq.count(), s.channels, s.pairs, 2}};
}

template <class T>
class s4d_machine {
 public:
  explicit s4d_machine(s4d_shape const& s, int threads = 2) : s_(s), device_{threads} {}

  s4d_result<T> forward(s4d_numbers<T> const& x, bool training = true) {
    s4d_result<T> r{std::vector<T>(x.u.size(), nan), std::vector<T>(std::size_t(s_.state_elements()), nan)};
    auto plan = arena::measure();
    kernels::s4d_saved<T>::template carve<device::cpu::isa>(plan, s_);
    saved_block_ = poisoned(plan.used());
    arena pieces(saved_block_);
    saved_ = kernels::s4d_saved<T>::template carve<device::cpu::isa>(pieces, s_);
    planned([&](device::cpu dev, arena& ws) {
      kernels::s4d_forward(dev, s_, input_of(s_, x), rows_of(s_, r.y), training ? &saved_ : nullptr,
                           state_of(s_, r.final), ws);
    });
    return r;
  }
  /// After a training forward; the parameters' derivatives are added to those in `d`.
  s4d_numbers<T> backward(s4d_numbers<T> const& x, std::vector<T> const& d_y, std::vector<T> const& d_final,
                          s4d_numbers<T> d) {
    d.u.assign(x.u.size(), nan);
    d.initial.assign(std::size_t(s_.state_elements()), nan);
    planned([&](device::cpu dev, arena& ws) {
      kernels::s4d_backward(dev, s_, input_of(s_, x), saved_, rows_of(s_, d_y), state_of(s_, d_final),
                            views_of<s4d_gradient<T>>(s_, d.u, d), ws);
    });
    return d;
  }
  s4d_numbers<T> backward(s4d_numbers<T> const& x, std::vector<T> const& d_y, std::vector<T> const& d_final) {
    s4d_numbers<T> zero = x;
    zero.each([](auto& v) { std::fill(v.begin(), v.end(), T(0)); });
    return backward(x, d_y, d_final, zero);
  }

 private:
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  static buffer<std::byte> poisoned(index_t bytes) {
    buffer<std::byte> block(bytes);
    block.fill(std::byte(0xff));
    return block;
  }
  template <class F>
  void planned(F const& f) {
    auto plan = arena::measure();
    auto dry = device_;
    dry.dry = true;
    f(dry, plan);
    auto block = poisoned(plan.peak());
    arena ws(block);
    f(device_, ws);
  }

  s4d_shape s_;
  device::cpu device_;
  buffer<std::byte> saved_block_;
  kernels::s4d_saved<T> saved_;
};

template <class T>
s4d_result<T> reference(s4d_shape const& s, s4d_numbers<T> const& x) {
  s4d_result<T> r{std::vector<T>(x.u.size()), std::vector<T>(std::size_t(s.state_elements()))};
  kernels::s4d_forward(device::reference{}, s, input_of(s, x), rows_of(s, r.y), state_of(s, r.final));
  return r;
}

std::vector<double> draw(index_t n, std::uint64_t seed, double size = 1.0) {
  random_numbers random(seed);
  std::vector<double> x(std::size_t(n), 0.0);
  for (auto& e : x) e = size * random.normal();
  return x;
}
/// Steps and decays of many sizes: dt A from 1e-6 to about 30, on both sides of where its series ends.
s4d_numbers<double> random_input(s4d_shape const& s, std::uint64_t seed, bool with_state) {
  index_t const H = s.channels, P = s.pairs;
  s4d_numbers<double> x{draw(s.seq.rows() * H, seed),
                        draw(H, seed + 1, 2.0),
                        draw(H * P, seed + 2),
                        draw(H * P, seed + 3, 2.0),
                        draw(H * P * 2, seed + 4),
                        draw(H, seed + 5),
                        {}};
  for (auto& e : x.log_dt) e -= 2.0;
  x.log_dt[0] = std::log(1e-6);
  x.A_imag[0] = 0.0;
  if (with_state) x.initial = draw(s.state_elements(), seed + 6);
  return x;
}

template <class T, class U>
double difference(std::vector<T> const& a, std::vector<U> const& b) {
  DOCTEST_REQUIRE(a.size() == b.size());
  double most = 0, size = 1e-300;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const d = std::abs(double(a[i]) - double(b[i]));
    if (d != d) return d;
    most = std::max(most, d);
    size = std::max(size, std::abs(double(b[i])));
  }
  return most / size;
}
template <class T>
double difference(s4d_numbers<T> a, s4d_numbers<T> b) {
  double most = 0;
  a.each_with(b, [&](auto& x, auto& y) {
    double const d = difference(x, y);
    if (!(d <= most)) most = d;
  });
  return most;
}

/// Backward is the derivative of the reference, for a loss on y and the final state: one tensor at a time and all
/// together.
void check_gradient(s4d_shape const& s, s4d_numbers<double> x) {
  using oracle = dual<double, 1>;
  s4d_machine<double> machine(s);
  auto const r = machine.forward(x);
  auto const d_y = draw(index_t(r.y.size()), 71), d_final = draw(index_t(r.final.size()), 72);
  auto d = machine.backward(x, d_y, d_final);
  // What is there already is added to.
  random_numbers random(73);
  auto there = x;
  there.each([&](auto& v) {
    for (auto& e : v) e = random.normal();
  });
  auto const added = machine.backward(x, d_y, d_final, there);
  there.u.assign(there.u.size(), 0.0);
  there.initial.assign(d.initial.size(), 0.0);
  there.each_with(d, [](auto& to, auto& from) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  });
  DOCTEST_CHECK(difference(added, there) <= 1e-15);
  if (x.initial.empty()) d.initial.clear();
  for (int which = 0; which < 9; ++which) {
    double got = 0, expected = 0, absolute = 0;
    int tensor = 0;
    s4d_numbers<oracle> moved;
    auto plain = x;
    std::vector<std::vector<double>> gradients;
    d.each([&](auto& g) { gradients.push_back(g); });
    plain.each_with(moved, [&](auto& value, auto& to) {
      auto const& gradient = gradients[std::size_t(tensor)];
      for (std::size_t i = 0; i < value.size(); ++i) {
        to.push_back(value[i]);
        to.back().slope[0] = which > 6 || which == tensor ? random.normal() : 0.0;
        got += to.back().slope[0] * gradient[i];
        absolute += std::abs(to.back().slope[0] * gradient[i]);
      }
      ++tensor;
    });
    auto const o = reference(s, moved);
    std::vector<double> y, final;
    auto const add = [&](std::vector<oracle> const& value, std::vector<double> const& cotangent) {
      std::vector<double> numbers;
      for (std::size_t i = 0; i < value.size(); ++i) {
        expected += cotangent[i] * value[i].slope[0];
        absolute += std::abs(cotangent[i] * value[i].slope[0]);
        numbers.push_back(value[i].value);
      }
      return numbers;
    };
    DOCTEST_CHECK(difference(r.y, add(o.y, d_y)) <= 1e-12);
    DOCTEST_CHECK(difference(r.final, add(o.final, d_final)) <= 1e-12);
    DOCTEST_CHECK_MESSAGE(std::abs(got - expected) <= 1e-10 * absolute, "direction ", which, ": backward gives ",
                          got, ", the reference ", expected, ", terms ", absolute);
  }
}

template <class T>
void check(std::vector<T> const& actual, golden_tensor const& expected) {
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}
template <class T>
std::vector<T> numbers_of(golden_tensor const& t) {
  return {t.data.begin(), t.data.end()};
}

template <class T>
void check_golden() {
  golden_case const c("ops/s4d");
  auto const u = token_first(c["u"]);
  s4d_shape s;
  s.seq = sequences::batch(u.extent(0), u.extent(1));
  s.channels = u.extent(2);
  s.pairs = index_t(c.number("N", 0)) / 2;
  s.chunk = 8;
  s4d_numbers<T> in{numbers_of<T>(u),
                    numbers_of<T>(c["log_dt"]),
                    numbers_of<T>(c["log_A_real"]),
                    numbers_of<T>(c["A_imag"]),
                    numbers_of<T>(c["C"]),
                    numbers_of<T>(c["D"]),
                    {}};
  s4d_machine<T> machine(s);
  auto const r = machine.forward(in);
  check(r.y, token_first(c["y"]));
  auto const d = machine.backward(in, numbers_of<T>(token_first(c["cot_y"])), {});
  check(d.u, token_first(c["grad_u"]));
  check(d.log_dt, c["grad_log_dt"]);
  check(d.log_A_real, c["grad_log_A_real"]);
  check(d.A_imag, c["grad_A_imag"]);
  check(d.C, c["grad_C"]);
  check(d.D, c["grad_D"]);
  // The stored kernel K [H,T] is what an impulse leaves.
  std::fill(in.u.begin(), in.u.end(), T(0));
  std::fill_n(in.u.begin(), s.channels, T(1));
  std::fill(in.D.begin(), in.D.end(), T(0));
  check(s4d_machine<T>(s).forward(in, false).y, with_axes_swapped(c["K"], 0, 1));
}

constexpr std::array<index_t, 6> offsets{0, 0, 1, 9, 9, 60};

template <class T>
std::vector<T> part_of(std::vector<T> const& x, index_t width, index_t begin, index_t count) {
  auto const from = x.begin() + begin * width;
  return {from, from + count * width};
}

}  // namespace

DOCTEST_TEST_CASE("S4D gives the golden outputs, kernel and gradients") {
  check_golden<double>();
  check_golden<float>();
}

DOCTEST_TEST_CASE("S4D's backward is the derivative of its forward, initial and final states included") {
  struct size {
    index_t channels, pairs, chunk;
  };
  for (auto const& z : {size{1, 1, 1}, size{3, 2, 4}, size{19, 7, 64}}) {
    DOCTEST_CAPTURE(z.channels);
    s4d_shape const s{sequences::packed(offsets), z.channels, z.pairs, 0.0, z.chunk};
    check_gradient(s, random_input(s, 75, false));
    check_gradient(s, random_input(s, 76, true));
  }
  s4d_shape const many{sequences::batch(150, 2), 2, 1};  // more sequences than sums are kept for
  check_gradient(many, random_input(many, 74, true));
  s4d_shape const shifted{sequences::packed(offsets), 3, 2, -0.7, 4};
  check_gradient(shifted, random_input(shifted, 77, true));
}

DOCTEST_TEST_CASE("S4D's step and its derivative have all their digits for any dt A, small ones too") {
  // Against phi(z) = (e^z - 1) / z in twice the digits, and central differences.
  for (double size : {1e-12, 1e-6, 1e-3, 0.4999, 0.5001, 1.0, 7.0, 40.0})
    for (double slope : {0.0, 0.3, 3.0}) {
      using wide = long double;
      kernels::detail::s4d_step<double> const step(std::log(size), 0.0, slope, 0.0);
      auto const phi = [&](wide a, wide b) {
        wide const half = std::sin(b / 2), re = std::expm1(a) * std::cos(b) - 2 * half * half;
        wide const im = std::exp(a) * std::sin(b), square = a * a + b * b;
        return std::array<wide, 2>{(re * a + im * b) / square, (im * a - re * b) / square};
      };
      wide const a = wide(step.z.re), b = wide(step.z.im), move = 1e-5L * std::sqrt(a * a + b * b);
      auto const here = phi(a, b), above = phi(a + move, b), below = phi(a - move, b);
      DOCTEST_CAPTURE(size);
      DOCTEST_CAPTURE(slope);
      wide const length = std::hypot(here[0], here[1]);
      DOCTEST_CHECK(double(std::hypot(wide(step.phi.re) - here[0], wide(step.phi.im) - here[1]) / length) <= 1e-15);
      // Rounding of the difference itself: phi is near 1.
      wide const re = (above[0] - below[0]) / (2 * move), im = (above[1] - below[1]) / (2 * move);
      wide const error = std::hypot(wide(step.slope.re) - re, wide(step.slope.im) - im);
      DOCTEST_CHECK(double(error) <= 1e-9 * double(std::hypot(re, im)) + 1e-18 / double(move));
    }
  kernels::detail::s4d_step<double> const none(-800.0, 0.0, 1.0, 0.0);  // dt = 0
  DOCTEST_CHECK((none.phi.re == 1.0 && none.slope.re == 0.5 && none.B.re == 0.0));
}

DOCTEST_TEST_CASE("S4D with decays from none to at once stays finite, and a NaN reaches its sequence and channel "
                  "alone") {
  s4d_shape const s{sequences::batch(2, 9), 4, 2, 0.0, 4};
  auto x = random_input(s, 78, false);
  x.log_dt = {-800.0, -30.0, 3.0, 6.0};
  x.log_A_real = {-700.0, 6.0, -700.0, 6.0, 0.0, 6.0, 6.0, 300.0};
  for (double e : s4d_machine<double>(s).forward(x).y) DOCTEST_CHECK(std::isfinite(e));
  check_gradient(s, x);
  x.u[9 * 4 + 3 * 4 + 1] = std::nan("");
  auto const r = s4d_machine<double>(s).forward(x);
  for (index_t row = 0; row < 18; ++row)
    for (index_t h = 0; h < 4; ++h)
      DOCTEST_CHECK(std::isnan(r.y[std::size_t(row * 4 + h)]) == (row >= 12 && h == 1));
}

DOCTEST_TEST_CASE("S4D in float keeps the digits of a slow decay over thousands of tokens") {
  s4d_shape const s{sequences::batch(1, 3000), 3, 2};
  auto x = random_input(s, 79, false);
  x.log_dt = {std::log(1e-3), std::log(1e-3), std::log(1e-4)};
  x.log_A_real.assign(6, std::log(0.5));
  x.A_imag = {0.0, 3.14, 6.28, 0.0, 0.0, 3.14};
  std::fill(x.u.begin(), x.u.end(), 1.0);
  DOCTEST_CHECK(difference(s4d_machine<float>(s).forward(x.as<float>()).y, s4d_machine<double>(s).forward(x).y) <=
                1e-5);
}

DOCTEST_TEST_CASE_TEMPLATE(
    "S4D cut anywhere, with its state carried on and its derivative handed back, is one pass", T, double, float) {
  index_t const N = 2, length = 9, channels = 3, pairs = 3;
  s4d_shape const whole{sequences::batch(N, length), channels, pairs, 0.0, 4};
  auto const x = random_input(whole, 80, true).as<T>();
  auto const typed = [](std::vector<double> const& v) { return std::vector<T>(v.begin(), v.end()); };
  s4d_machine<T> machine(whole);
  auto const r = machine.forward(x);
  auto const d_y = typed(draw(index_t(r.y.size()), 81)), d_final = typed(draw(whole.state_elements(), 82));
  auto const d = machine.backward(x, d_y, d_final);
  DOCTEST_CHECK(machine.forward(x, false).y == r.y);
  for (index_t cut : {0, 1, 4, 8, 9}) {
    DOCTEST_CAPTURE(cut);
    std::array<index_t, 2> const begin{0, cut}, count{cut, length - cut};
    std::vector<s4d_machine<T>> machines;
    std::vector<s4d_numbers<T>> inputs;
    auto const rows = [&](std::vector<T> const& from, std::size_t piece) {
      std::vector<T> to;
      for (index_t n = 0; n < N; ++n) {
        auto const part = part_of(from, channels, n * length + begin[piece], count[piece]);
        to.insert(to.end(), part.begin(), part.end());
      }
      return to;
    };
    auto state = x.initial;
    for (std::size_t piece : {0u, 1u}) {
      machines.emplace_back(s4d_shape{sequences::batch(N, count[piece]), channels, pairs, 0.0, 4});
      inputs.push_back(x);
      inputs.back().u = rows(x.u, piece);
      inputs.back().initial = state;
      auto const part = machines.back().forward(inputs.back());
      DOCTEST_CHECK(part.y == rows(r.y, piece));
      state = part.final;
    }
    DOCTEST_CHECK(state == r.final);
    auto const second = machines[1].backward(inputs[1], rows(d_y, 1), d_final);
    auto both = machines[0].backward(inputs[0], rows(d_y, 0), second.initial, second);
    double const tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
    DOCTEST_CHECK(difference(second.u, rows(d.u, 1)) <= tolerance);
    DOCTEST_CHECK(difference(both.u, rows(d.u, 0)) <= tolerance);
    both.u = d.u;
    DOCTEST_CHECK(difference(both, d) <= tolerance);
  }
}

DOCTEST_TEST_CASE_TEMPLATE("packed sequences of S4D give what each gives alone, with any number of threads", T,
                           double, float) {
  index_t const channels = 21, pairs = 3;
  s4d_shape const s{sequences::packed(offsets), channels, pairs, 0.0, 4};
  auto const x = random_input(s, 83, false).as<T>();
  auto const d_y_double = draw(index_t(x.u.size()), 84);
  std::vector<T> const d_y(d_y_double.begin(), d_y_double.end());
  s4d_machine<T> machine(s, 1);
  auto const r = machine.forward(x);
  auto d = machine.backward(x, d_y, {});
  for (int threads : {2, 3}) {
    s4d_machine<T> other(s, threads);
    auto const r_other = other.forward(x);
    auto d_other = other.backward(x, d_y, {});
    DOCTEST_CHECK(r_other.y == r.y);
    DOCTEST_CHECK(r_other.final == r.final);
    d_other.each_with(d, [](auto& a, auto& b) { DOCTEST_CHECK(a == b); });
  }
  s4d_numbers<T> sum = x;
  sum.each([](auto& v) { std::fill(v.begin(), v.end(), T(0)); });
  for (index_t n = 0; n < s.seq.count(); ++n) {
    s4d_shape const single{sequences::batch(1, s.seq.length(n)), channels, pairs, 0.0, 4};
    index_t const begin = s.seq.begin(n), count = s.seq.length(n);
    s4d_machine<T> alone(single);
    auto part = x;
    part.u = part_of(x.u, channels, begin, count);
    auto const r_part = alone.forward(part);
    DOCTEST_CHECK(r_part.y == part_of(r.y, channels, begin, count));
    DOCTEST_CHECK(r_part.final == part_of(r.final, channels * pairs * 2, n, 1));
    sum = alone.backward(part, part_of(d_y, channels, begin, count), {}, sum);
    DOCTEST_CHECK(sum.u == part_of(d.u, channels, begin, count));
  }
  sum.u = d.u;
  sum.initial = d.initial;
  DOCTEST_CHECK(difference(sum, d) <= (sizeof(T) == 4 ? 1e-5 : 1e-13));
}

DOCTEST_TEST_CASE("S4D names the view that does not fit") {
  s4d_shape const s{sequences::batch(2, 3), 4, 2};
  auto const x = random_input(s, 85, true);
  auto in = input_of(s, x);
  in.C_hpc.extent[1] = 3;
  std::vector<double> y(x.u.size());
  DOCTEST_CHECK_THROWS_WITH_AS(kernels::s4d_forward(device::reference{}, s, in, rows_of(s, y), view4<double>{}),
                               "seqmix: S4D C: expected [4,2,2], got [4,3,2]", shape_error);
  s4d_shape wrong = s;
  wrong.chunk = 0;
  DOCTEST_CHECK_THROWS_WITH_AS(validate(wrong, input_of(s, x)),
                               "seqmix: S4D: channels, pairs and chunk must be at least 1, got 4, 2 and 0",
                               shape_error);
}
