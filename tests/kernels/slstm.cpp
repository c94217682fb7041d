#include <algorithm>
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "../support/golden.hpp"
#include "../support/random_numbers.hpp"
#include <seqmix/kernels/cpu/slstm.hpp>
#include <seqmix/kernels/reference/slstm.hpp>

// sLSTM against the golden vectors, dual numbers and its own laws.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// x, R and the initial state (y, c, n, m behind one another; empty: none), or the derivatives of all.
template <class T>
struct slstm_numbers {
  std::vector<T> x, R, initial;
  template <class U>
  slstm_numbers<U> as() const {
    return {{x.begin(), x.end()}, {R.begin(), R.end()}, {initial.begin(), initial.end()}};
  }
};
template <class T>
struct slstm_result {
  std::vector<T> y, final;
};

template <class T>
slstm_state<T> state_of(slstm_shape const& s, std::vector<std::remove_const_t<T>> const& x) {
  if (x.empty()) return {};
  index_t const size = s.seq.count() * s.heads * s.head_dim;
  auto const part = [&](index_t i) {
    return view3<T>(const_cast<T*>(x.data()) + i * size, {s.seq.count(), s.heads, s.head_dim});
  };
  return {part(0), part(1), part(2), part(3)};
}
template <class T>
slstm_input<T> input_of(slstm_shape const& s, slstm_numbers<T> const& x) {
  slstm_input<T> in;
  in.x_rghd = {x.x.data(), {s.seq.rows(), 4, s.heads, s.head_dim}};
  in.R_hgoi = {x.R.data(), {s.heads, 4, s.head_dim, s.head_dim}};
  in.initial = state_of<T const>(s, x.initial);
  return in;
}
std::size_t state_size(slstm_shape const& s) { return std::size_t(slstm_state<double>::elements(s)); }
std::size_t rows_size(slstm_shape const& s) { return std::size_t(s.seq.rows() * s.heads * s.head_dim); }

template <class T>
class slstm_machine {
 public:
  explicit slstm_machine(slstm_shape const& s, int threads = 2) : s_(s), device_{threads} {}

  slstm_result<T> forward(slstm_numbers<T> const& x, bool training = true) {
    result_ = {std::vector<T>(rows_size(s_), nan), std::vector<T>(state_size(s_), nan)};
    auto plan = arena::measure();
    kept::template carve<device::cpu::isa>(plan, s_);
    saved_block_ = poisoned(plan.used());
    arena pieces(saved_block_);
    saved_ = kept::template carve<device::cpu::isa>(pieces, s_);
    planned([&](device::cpu dev, arena& ws) {
      kernels::slstm_forward(dev, s_, input_of(s_, x), rows(result_.y), training ? &saved_ : nullptr,
                             state_of<T>(s_, result_.final), ws);
    });
    return result_;
  }
  /// After a training forward; d.R is added to `d_R`.
  slstm_numbers<T> backward(slstm_numbers<T> const& x, std::vector<T> const& d_y, std::vector<T> const& d_final,
                            std::vector<T> const& d_R) {
    slstm_numbers<T> d{std::vector<T>(x.x.size(), nan), d_R, std::vector<T>(state_size(s_), nan)};
    slstm_gradient<T> to;
    to.x_rghd = {d.x.data(), {s_.seq.rows(), 4, s_.heads, s_.head_dim}};
    to.R_hgoi = {d.R.data(), {s_.heads, 4, s_.head_dim, s_.head_dim}};
    to.initial = state_of<T>(s_, d.initial);
    planned([&](device::cpu dev, arena& ws) {
      kernels::slstm_backward(dev, s_, input_of(s_, x), rows(result_.y), saved_, rows(d_y),
                              state_of<T const>(s_, d_final), to, ws);
    });
    return d;
  }

 private:
  using kept = kernels::slstm_saved<T>;
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  view3<T> rows(std::vector<T> const& x) const {
    return {const_cast<T*>(x.data()), {s_.seq.rows(), s_.heads, s_.head_dim}};
  }
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

  slstm_shape s_;
  device::cpu device_;
  slstm_result<T> result_;
  buffer<std::byte> saved_block_;
  kept saved_;
};

template <class T>
slstm_result<T> reference(slstm_shape const& s, slstm_numbers<T> const& x) {
  slstm_result<T> r{std::vector<T>(rows_size(s)), std::vector<T>(state_size(s))};
  kernels::slstm_forward(device::reference{}, s, input_of(s, x),
                         view3<T>(r.y.data(), {s.seq.rows(), s.heads, s.head_dim}), state_of<T>(s, r.final));
  return r;
}

std::vector<double> draw(std::size_t n, std::uint64_t seed, double size = 1.0) {
  random_numbers random(seed);
  std::vector<double> x(n);
  for (auto& e : x) e = size * random.normal();
  return x;
}
slstm_numbers<double> random_input(slstm_shape const& s, std::uint64_t seed, bool with_state) {
  slstm_numbers<double> x{draw(4 * rows_size(s), seed, 1.5),
                          draw(std::size_t(4 * s.heads * s.head_dim * s.head_dim), seed + 1, 0.4),
                          {}};
  if (!with_state) return x;
  x.initial = draw(state_size(s), seed + 2);
  auto const part = std::ptrdiff_t(state_size(s) / 4);
  std::for_each(x.initial.begin() + 2 * part, x.initial.begin() + 3 * part,
                [](double& n) { n = 0.5 + std::abs(n); });
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
double difference(slstm_numbers<T> const& a, slstm_numbers<T> const& b) {
  return std::max({difference(a.x, b.x), difference(a.R, b.R), difference(a.initial, b.initial)});
}

/// Backward is the derivative of the reference, for a loss on y and the final state, in random directions.
void check_gradient(slstm_shape const& s, slstm_numbers<double> const& x) {
  using oracle = dual<double, 1>;
  slstm_machine<double> machine(s);
  auto const r = machine.forward(x);
  auto const d_y = draw(r.y.size(), 71), d_final = draw(r.final.size(), 72), d_R = draw(x.R.size(), 73);
  auto d = machine.backward(x, d_y, d_final, d_R);
  for (std::size_t i = 0; i < d_R.size(); ++i) d.R[i] -= d_R[i];
  random_numbers random(74);
  for (int direction = 0; direction < 5; ++direction) {
    double got = 0, expected = 0, absolute = 0;
    auto const seed = [&](std::vector<double> const& value, std::vector<double> const& gradient) {
      std::vector<oracle> to;
      for (std::size_t i = 0; i < value.size(); ++i) {
        to.push_back(value[i]);
        to.back().slope[0] = random.normal();
        got += to.back().slope[0] * gradient[i];
        absolute += std::abs(to.back().slope[0] * gradient[i]);
      }
      return to;
    };
    auto const o = reference(s, slstm_numbers<oracle>{seed(x.x, d.x), seed(x.R, d.R), seed(x.initial, d.initial)});
    std::vector<double> y, final;
    auto const add = [&](std::vector<oracle> const& value, std::vector<double> const& cotangent) {
      std::vector<double> plain;
      for (std::size_t i = 0; i < value.size(); ++i) {
        expected += cotangent[i] * value[i].slope[0];
        absolute += std::abs(cotangent[i] * value[i].slope[0]);
        plain.push_back(value[i].value);
      }
      return plain;
    };
    DOCTEST_CHECK(difference(r.y, add(o.y, d_y)) <= 1e-12);
    DOCTEST_CHECK(difference(r.final, add(o.final, d_final)) <= 1e-12);
    DOCTEST_CHECK_MESSAGE(std::abs(got - expected) <= 1e-10 * absolute, "direction ", direction,
                          ": backward gives ", got, ", the reference ", expected, ", terms ", absolute);
  }
}

template <class T>
void check(std::vector<T> const& actual, golden_tensor const& expected) {
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}
/// [T,B,...] as [B,T,...]
golden_tensor batch_first(golden_tensor const& t) { return with_axes_swapped(t, 0, 1); }
std::vector<double> numbers_of(golden_tensor const& t) { return {t.data.begin(), t.data.end()}; }

template <class T>
void check_case(char const* name) {
  DOCTEST_CAPTURE(name);
  golden_case const c(std::string("ops/") + name);
  auto const x = batch_first(c["x"]);
  slstm_shape s;
  s.seq = sequences::batch(x.extent(0), x.extent(1));
  s.heads = c["R"].extent(0);
  s.head_dim = c["R"].extent(2);
  // The bias belongs to the projection that feeds the gates.
  slstm_numbers<double> in{numbers_of(x), numbers_of(c["R"]), {}};
  index_t const width = c["b"].size();
  for (std::size_t i = 0; i < in.x.size(); ++i) in.x[i] += c["b"][index_t(i) % width];
  if (c.has("s0")) in.initial = numbers_of(c["s0"]);
  auto const typed = in.as<T>();
  slstm_machine<T> machine(s);
  auto const r = machine.forward(typed);
  check(r.y, batch_first(c["y"]));
  check(r.final, c["states"]);
  auto const cotangent = [&](golden_tensor const& t) { return std::vector<T>(t.data.begin(), t.data.end()); };
  auto const d = machine.backward(typed, cotangent(batch_first(c["cot_y"])), cotangent(c["cot_states"]),
                                  std::vector<T>(in.R.size(), T(0)));
  check(d.x, batch_first(c["grad_x"]));
  check(d.R, c["grad_R"]);
  std::vector<T> d_bias(std::size_t(width), T(0));
  for (std::size_t i = 0; i < d.x.size(); ++i) d_bias[i % std::size_t(width)] += d.x[i];
  check(d_bias, c["grad_b"]);
  if (c.has("grad_s0")) check(d.initial, c["grad_s0"]);
}

constexpr std::array<index_t, 6> offsets{0, 0, 1, 9, 9, 90};

template <class T>
std::vector<T> part_of(std::vector<T> const& x, std::size_t width, std::size_t begin, std::size_t count) {
  auto const from = x.begin() + std::ptrdiff_t(begin * width);
  return {from, from + std::ptrdiff_t(count * width)};
}

}  // namespace

DOCTEST_TEST_CASE("sLSTM gives the golden outputs, states and gradients") {
  for (auto const* name : {"slstm", "slstm_init", "slstm_t1"}) {
    check_case<double>(name);
    check_case<float>(name);
  }
}

DOCTEST_TEST_CASE("sLSTM's backward is the derivative of its forward, initial "
                  "and final states included") {
  for (index_t width : {1, 5, 17}) {
    DOCTEST_CAPTURE(width);
    slstm_shape const s{sequences::packed(offsets), 3, width};
    check_gradient(s, random_input(s, 75, false));
    auto x = random_input(s, 76, true);
    check_gradient(s, x);
    // Every n of the second sequence is 0, but its c and m are not.
    auto const each = state_size(s) / 4, sequence = each / 5;
    std::fill_n(x.initial.begin() + std::ptrdiff_t(2 * each + sequence), sequence, 0.0);
    std::fill_n(x.initial.begin() + std::ptrdiff_t(3 * each + sequence), sequence / 2, 9.0);
    check_gradient(s, x);
  }
}

DOCTEST_TEST_CASE("sLSTM with gates of 300 and -300 has no NaN and exact derivatives") {
  slstm_shape const s{sequences::packed(offsets), 2, 5};
  for (bool with_state : {false, true}) {
    auto x = random_input(s, 77, with_state);
    random_numbers random(78);
    std::array<double, 6> const choices{-300, -30, -1, 1, 30, 300};
    for (auto& e : x.x) e = choices[std::size_t(random.below(6))] + 0.1 * random.normal();
    check_gradient(s, x);
    slstm_machine<double> exact(s);
    slstm_machine<float> machine(s);
    auto const r = exact.forward(x);
    auto const found = machine.forward(x.as<float>());
    DOCTEST_CHECK(difference(found.y, r.y) <= 1e-3);  // a step of 2^-15 in a gate of 300
    auto const d =
        machine.backward(x.as<float>(), std::vector<float>(r.y.size(), 1), {}, std::vector<float>(x.R.size(), 0));
    for (auto const* part : {&d.x, &d.R, &d.initial})
      DOCTEST_CHECK(std::all_of(part->begin(), part->end(), [](float e) { return std::isfinite(e); }));
  }
}

DOCTEST_TEST_CASE_TEMPLATE("sLSTM cut anywhere, with its state carried on and "
                           "its derivative handed back, is one pass",
                           T, double, float) {
  index_t const N = 2, length = 9;
  slstm_shape whole{sequences::batch(N, length), 2, 3};
  auto const x = random_input(whole, 79, true).as<T>();
  auto const typed = [](std::vector<double> const& v) { return std::vector<T>(v.begin(), v.end()); };
  slstm_machine<T> machine(whole);
  auto const r = machine.forward(x);
  auto const d_y = typed(draw(r.y.size(), 80)), d_final = typed(draw(r.final.size(), 81));
  auto const d = machine.backward(x, d_y, d_final, std::vector<T>(x.R.size(), T(0)));
  auto const width = std::size_t(whole.heads * whole.head_dim);
  for (index_t cut : {0, 1, 4, 8, 9}) {
    DOCTEST_CAPTURE(cut);
    std::array<index_t, 2> const begin{0, cut}, count{cut, length - cut};
    std::vector<slstm_machine<T>> machines;
    std::vector<slstm_numbers<T>> inputs;
    auto const rows = [&](std::vector<T> const& from, std::size_t w, std::size_t piece) {
      std::vector<T> to;
      for (index_t n = 0; n < N; ++n) {
        auto const part = part_of(from, w, std::size_t(n * length + begin[piece]), std::size_t(count[piece]));
        to.insert(to.end(), part.begin(), part.end());
      }
      return to;
    };
    auto state = x.initial;
    for (std::size_t piece : {0u, 1u}) {
      machines.emplace_back(slstm_shape{sequences::batch(N, count[piece]), 2, 3});
      inputs.push_back({rows(x.x, 4 * width, piece), x.R, state});
      auto const part = machines.back().forward(inputs.back());
      DOCTEST_CHECK(part.y == rows(r.y, width, piece));
      DOCTEST_CHECK(machines.back().forward(inputs.back(), false).y == part.y);
      machines.back().forward(inputs.back());
      state = part.final;
    }
    DOCTEST_CHECK(state == r.final);
    std::vector<T> d_state = d_final, d_R(x.R.size(), T(0));
    for (std::size_t piece : {1u, 0u}) {
      auto const part = machines[piece].backward(inputs[piece], rows(d_y, width, piece), d_state, d_R);
      DOCTEST_CHECK(difference(part.x, rows(d.x, 4 * width, piece)) <= (sizeof(T) == 4 ? 1e-5 : 1e-13));
      d_state = part.initial;
      d_R = part.R;
    }
    DOCTEST_CHECK(difference(d_state, d.initial) <= (sizeof(T) == 4 ? 1e-5 : 1e-13));
    DOCTEST_CHECK(difference(d_R, d.R) <= (sizeof(T) == 4 ? 1e-5 : 1e-13));
  }
}

DOCTEST_TEST_CASE_TEMPLATE("packed sequences of an sLSTM give what each gives "
                           "alone, with any number of threads",
                           T, double, float) {
  slstm_shape const s{sequences::packed(offsets), 3, 5};
  auto const x = random_input(s, 82, false).as<T>();
  auto const d_y_double = draw(rows_size(s), 83);
  std::vector<T> const d_y(d_y_double.begin(), d_y_double.end()), none(x.R.size(), T(0));
  slstm_machine<T> machine(s, 1);
  auto const r = machine.forward(x);
  auto const d = machine.backward(x, d_y, {}, none);
  for (int threads : {2, 3}) {
    slstm_machine<T> other(s, threads);
    auto const r_other = other.forward(x);
    auto const d_other = other.backward(x, d_y, {}, none);
    DOCTEST_CHECK(r_other.y == r.y);
    DOCTEST_CHECK(r_other.final == r.final);
    DOCTEST_CHECK(d_other.x == d.x);
    DOCTEST_CHECK(d_other.R == d.R);
  }
  auto const width = std::size_t(s.heads * s.head_dim);
  auto d_R = none;
  for (index_t n = 0; n < s.seq.count(); ++n) {
    slstm_shape const single{sequences::batch(1, s.seq.length(n)), 3, 5};
    auto const begin = std::size_t(s.seq.begin(n)), count = std::size_t(s.seq.length(n));
    slstm_machine<T> alone(single);
    slstm_numbers<T> const part{part_of(x.x, 4 * width, begin, count), x.R, {}};
    DOCTEST_CHECK(alone.forward(part).y == part_of(r.y, width, begin, count));
    auto const d_part = alone.backward(part, part_of(d_y, width, begin, count), {}, d_R);
    DOCTEST_CHECK(d_part.x == part_of(d.x, 4 * width, begin, count));
    d_R = d_part.R;
  }
  DOCTEST_CHECK(d_R == d.R);
}
