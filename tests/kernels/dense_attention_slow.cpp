#include "../support/law_attention.hpp"
#include "../support/reference_run.hpp"
#include <seqmix/selectors/compressed.hpp>

// The fast attention over element selectors against the golden vectors. Linear weights are held by the dual law and
// by the recurrence's own golden vectors beside what is here.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

struct check_selector {
  attention_case const& c;
  template <class Which, class How>
  void operator()() const {
    check_against_golden(c, run_cpu_attention<Which, How, double>(c));
    check_against_golden(c, run_cpu_attention<Which, How, float>(c));
    // Without a backward to come, a hard selector leaves its surrogate out; outputs and choices stay.
    auto const inference = run_cpu_attention<Which, How, double>(c, 1, false);
    auto const o = compare(inference.o.data(), *c.o);
    DOCTEST_CHECK_MESSAGE(o.good, o.text);
    if (!c.choice.empty()) DOCTEST_CHECK(inference.choice == c.choice);
  }
};

void check_file(std::string const& path) {
  auto const c = load_attention_case(path);
  DOCTEST_CAPTURE(c.name);
  with_element_selector(c.selector, check_selector{c});
}

/// The same case with key_dim unit queries behind every sequence, whose outputs are the rows of the final state.
attention_case with_state_read(attention_case&& from, index_t& state_rows) {
  using enum attention_case::part;
  attention_case c = std::move(from);
  auto const& s = c.shape;
  index_t const N = s.seq.count(), T = c.length, more = s.key_dim;
  state_rows = more;
  auto const extended = [&](buffer<double> const& x, index_t width, auto const& tail) {
    buffer<double> y(N * (T + more) * width);
    for (index_t n = 0; n < N; ++n)
      for (index_t t = 0; t < T + more; ++t)
        for (index_t i = 0; i < width; ++i)
          y[(n * (T + more) + t) * width + i] = t < T ? x[(n * T + t) * width + i] : tail(n, t - T, i);
    return y;
  };
  auto const zero = [](index_t, index_t, index_t) { return 0.0; };
  c.input[q].value = extended(c.input[q].value, s.heads * s.key_dim, [&](index_t, index_t row, index_t i) {
    return i % s.key_dim == row ? 1.0 / s.scale : 0.0;
  });
  c.input[k].value = extended(c.input[k].value, s.key_heads * s.key_dim, zero);
  c.input[v].value = extended(c.input[v].value, s.value_heads * s.value_dim, zero);
  if (c.gate == attention_case::gate_source::tokens)
    c.input[g].value = extended(c.input[g].value, s.gate_heads, zero);
  c.cot_o = extended(c.cot_o, s.heads * s.value_dim, [&](index_t n, index_t row, index_t i) {
    if (c.cot_state.size() == 0) return 0.0;
    index_t const h = i / s.value_dim, x = i % s.value_dim;
    return c.cot_state[((n * s.heads + h) * s.key_dim + row) * s.value_dim + x];
  });
  c.length = T + more;
  c.shape.seq = sequences::batch(N, T + more);
  return c;
}

/// Cuts the unit queries off again: what is left are the case's own rows, and the state they read.
template <class T>
void check_linear(std::string const& path) {
  using enum attention_case::part;
  auto const plain = load_attention_case(path);
  index_t more = 0;
  auto const c = with_state_read(load_attention_case(path), more);
  auto const& s = c.shape;
  auto r = run_cpu_attention<selectors::all, selectors::linear, T>(c);
  std::vector<T> state(std::size_t(s.seq.count() * s.heads * s.key_dim * s.value_dim));
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h)
      for (index_t row = 0; row < more; ++row)
        for (index_t x = 0; x < s.value_dim; ++x)
          state[std::size_t(((n * s.heads + h) * s.key_dim + row) * s.value_dim + x)] =
              r.o[std::size_t(((n * c.length + plain.length + row) * s.heads + h) * s.value_dim + x)];
  auto const cut = [&](std::vector<T>& x) {
    index_t const width = index_t(x.size()) / c.rows();
    std::vector<T> y;
    for (index_t n = 0; n < s.seq.count(); ++n)
      y.insert(y.end(), x.begin() + n * c.length * width, x.begin() + (n * c.length + plain.length) * width);
    x = y;
  };
  cut(r.o);
  for (auto part : {q, k, v}) cut(r.gradient[part]);
  if (c.gate == attention_case::gate_source::tokens) cut(r.gradient[g]);
  check_against_golden(plain, r);
  if (!plain.state) return;
  auto const S = compare(state.data(), *plain.state);
  DOCTEST_CHECK_MESSAGE(S.good, S.text);
}

/// A case with a sink per head, of lengths and options that go round with `i`.
attention_case sink_case(index_t i) {
  constexpr std::array<index_t, 6> lengths{1, 2, 9, 40, 65, 70};
  auto c = random_attention_case(std::uint64_t(300 + i), {.batch = 1 + i % 2,
                                                          .length = lengths[std::size_t(i) % lengths.size()],
                                                          .heads = 4,
                                                          .key_heads = 2,
                                                          .key_dim = 5,
                                                          .value_dim = 3});
  c.shape.select.window = 7;
  c.shape.select.chunk = 1 + i % 4;
  c.shape.knobs.temperature = i % 2 ? 0.7 : 1.0;
  add_sink(c, std::uint64_t(i));
  return c;
}
template <class Which>
void check_against_reference(attention_case const& c, int directions = 2) {
  using selectors::softmax;
  auto const f = reference_of<Which, softmax>();
  auto const expected = run<double>(f, c);
  auto const found = run_cpu_attention<Which, softmax, double>(c);
  double worst = 0;
  for (index_t i = 0; i < expected.o.size(); ++i)
    worst = std::max(worst, std::abs(expected.o[i] - found.o[std::size_t(i)]));
  DOCTEST_CHECK(worst <= 1e-12);
  random_numbers random(9);
  for (int d = 0; d < directions; ++d) {
    double actual = 0, absolute = 0;
    std::array<buffer<double>, attention_case::parts> direction;
    for (std::size_t part = 0; part < attention_case::parts; ++part) {
      direction[part] = random.normals(c.input[part].value.size());
      for (index_t i = 0; i < direction[part].size(); ++i) {
        double const term = direction[part][i] * found.gradient[part][std::size_t(i)];
        actual += term;
        absolute += std::abs(term);
      }
    }
    double const slope = slopes_of_loss<1>(
        f, c, [&](std::size_t part, index_t i) { return std::array<double, 1>{direction[part][i]}; })[0];
    DOCTEST_CHECK_MESSAGE(std::abs(slope - actual) <= 1e-10 * (absolute + 1e-3), "expected ", slope, ", got ",
                          actual);
  }
}

}  // namespace

DOCTEST_TEST_CASE(
    "fast attention gives the golden outputs and gradients of softmax attention, slopes and gates among them") {
  for (auto const* name : {"attn_t1", "attn_gqa", "attn_swa8", "attn_sink", "attn_alibi_h4", "attn_alibi_h6",
                           "forgetting_attn", "forgetting_attn_swa8"})
    check_file(std::string("ops/") + name);
}

DOCTEST_TEST_CASE("fast attention gives the golden results of the key and temperature ablations") {
  auto const cases = golden_cases("top1", "attn_");
  DOCTEST_REQUIRE(cases.size() == 4);
  for (auto const& path : cases) check_file(path);
}

DOCTEST_TEST_CASE("fast attention gives the golden results of Top-1 element selection") {
  auto const cases = golden_cases("top1", "top1_element_");
  DOCTEST_REQUIRE(cases.size() == 27);
  for (auto const& path : cases) check_file(path);
}

DOCTEST_TEST_CASE(
    "fast attention with linear weights gives the golden results of linear recurrences, final state included") {
  for (auto const* name : {"linear_attn", "linear_attn_init", "linear_attn_t1", "retention", "retention_t1",
                           "simple_gla", "simple_gla_init", "simple_gla_t1"}) {
    check_linear<double>(std::string("ops/") + name);
    check_linear<float>(std::string("ops/") + name);
  }
}

DOCTEST_TEST_CASE(
    "a sink joins the denominator alone, behind windows and gates: as the reference, with its gradient") {
  for (index_t i = 0; i < 12; ++i) {
    auto c = sink_case(i);
    if (i % 3 == 1) add_token_gate(c, i % 2 ? 4 : 1, 2);
    if (i % 3 == 2) add_constant_gate(c, 2);
    DOCTEST_CAPTURE(i);
    check_against_reference<selectors::all>(c);
    check_against_reference<selectors::window>(c);
  }
}

DOCTEST_TEST_CASE("neither temperature nor gate touches a sink: one key and one sink, by hand") {
  auto c = random_attention_case(1, {.length = 1, .heads = 1, .key_heads = 1, .key_dim = 1, .value_dim = 1});
  c.shape.scale = 1;
  c.shape.knobs.temperature = 2;
  c.input[attention_case::q].value[0] = 3;
  c.input[attention_case::k].value[0] = 1;
  c.input[attention_case::v].value[0] = 5;
  add_token_gate(c, 1, 2);
  add_sink(c, 3);
  c.input[attention_case::sink].value[0] = 0.25;
  auto const r = run_cpu_attention<selectors::all, selectors::softmax, double>(c);
  double const p = 1 / (1 + std::exp(0.25 - 1.5));
  DOCTEST_CHECK(r.o[0] == doctest::Approx(5 * p).epsilon(1e-14));
  DOCTEST_CHECK(r.gradient[attention_case::sink][0] ==
                doctest::Approx(-c.cot_o[0] * 5 * p * (1 - p)).epsilon(1e-13));
}

DOCTEST_TEST_CASE("a sink of -inf is none, to the bit; a huge one leaves zeros, and nothing is NaN") {
  auto with = sink_case(5);
  auto without = sink_case(5);
  without.input[attention_case::sink].value = buffer<double>();
  for (auto& x : with.input[attention_case::sink].value) x = -std::numeric_limits<double>::infinity();
  auto const a = run_cpu_attention<selectors::window, selectors::softmax, float>(with);
  auto const b = run_cpu_attention<selectors::window, selectors::softmax, float>(without);
  DOCTEST_CHECK(a.o == b.o);
  for (std::size_t x = 0; x < attention_case::sink; ++x) DOCTEST_CHECK(a.gradient[x] == b.gradient[x]);
  for (float x : a.gradient[attention_case::sink]) DOCTEST_CHECK(x == 0.0f);
  for (auto& x : with.input[attention_case::sink].value) x = 1e4;
  auto const closed = run_cpu_attention<selectors::window, selectors::softmax, float>(with);
  for (float x : closed.o) DOCTEST_CHECK(x == 0.0f);
  for (auto const& d : closed.gradient)
    for (float x : d) DOCTEST_CHECK(x == 0.0f);
}

DOCTEST_TEST_CASE("a sink and its gradient have the same bits for one, two and three threads") {
  auto const c = sink_case(5);
  auto const one = run_cpu_attention<selectors::all, selectors::softmax, float>(c, 1);
  for (int threads : {2, 3}) {
    auto const more = run_cpu_attention<selectors::all, selectors::softmax, float>(c, threads);
    DOCTEST_CHECK(one.o == more.o);
    DOCTEST_CHECK(one.gradient == more.gradient);
  }
}

DOCTEST_TEST_CASE("a sink of hard or linear weights is refused in one sentence") {
  auto const c = sink_case(2);
  auto const sentence = doctest::Contains(
      "a sink joins the denominator of a softmax, and these weights have none; take selectors::softmax");
  using hard = selectors::top1<>;
  DOCTEST_CHECK_THROWS_WITH_AS((run_cpu_attention<selectors::all, hard, double>(c)), sentence, value_error);
  DOCTEST_CHECK_THROWS_WITH_AS((run_cpu_attention<selectors::all, selectors::linear, double>(c)), sentence,
                               value_error);
  auto const linear = reference_of<selectors::all, selectors::linear>();
  DOCTEST_CHECK_THROWS_WITH_AS(run<double>(linear, c), sentence, value_error);
}

DOCTEST_TEST_CASE("attention to the means of complete chunks agrees with the reference, forward and backward") {
  for (index_t i = 0; i < 12; ++i) {
    auto c = sink_case(i);
    c.shape.select.chunk = 1 + i;
    if (i % 2) c.input[attention_case::sink].value = buffer<double>();
    std::array<index_t, 4> const offsets{0, c.rows() / 3, c.rows() / 3, c.rows()};
    if (i % 3 == 2) c.shape.seq = sequences::packed(offsets);
    DOCTEST_CAPTURE(i);
    check_against_reference<selectors::compressed>(c);
  }
}

DOCTEST_TEST_CASE("a chunk is seen through its mean from its last token on, and before the first one all is zero") {
  auto c = random_attention_case(4, {.length = 9, .heads = 1, .key_heads = 1, .key_dim = 2, .value_dim = 1});
  c.shape.select.chunk = 4;
  for (auto& x : c.input[attention_case::q].value) x = 0;
  auto& v = c.input[attention_case::v].value;
  for (index_t t = 0; t < 9; ++t) v[t] = double(1 + t);
  auto const o = run_cpu_attention<selectors::compressed, selectors::softmax, double>(c).o;
  for (index_t t = 0; t < 9; ++t)
    DOCTEST_CHECK(o[std::size_t(t)] == doctest::Approx(t < 3 ? 0 : t < 7 ? 2.5 : 4.5).epsilon(1e-15));
}
