#include "../support/law_attention.hpp"

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

}  // namespace

DOCTEST_TEST_CASE(
    "fast attention gives the golden outputs and gradients of softmax attention, slopes and gates among them") {
  for (auto const* name : {"attn_t1", "attn_gqa", "attn_swa8", "attn_alibi_h4", "attn_alibi_h6", "forgetting_attn",
                           "forgetting_attn_swa8"})
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
