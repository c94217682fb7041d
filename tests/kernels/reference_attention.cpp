#include <limits>

#include <doctest/doctest.h>

#include "../support/reference_run.hpp"

// Every key in view: softmax, linear and Top-1 element weights, and the plain window.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using part = attention_case::part;
using selectors::top1_gradient;
using selectors::top1_output;

constexpr double rounding = 1e-13;
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

reference_attention reference_for(attention_case const& c) {
  return with_element_selector(c.selector, make_reference{});
}

reference_attention const dense = reference_of<selectors::all, selectors::softmax>();

template <top1_gradient Gradient, top1_output Output = top1_output::hard>
reference_attention element() {
  return reference_of<selectors::all, selectors::top1<Output, Gradient>>();
}

struct named_element {
  char const* name;
  reference_attention f;
};
std::vector<named_element> all_elements() {
  using enum top1_gradient;
  constexpr auto weighted = top1_output::weighted;
  return {{"hard, straight_through", element<straight_through>()},
          {"hard, straight_through_output", element<straight_through_output>()},
          {"hard, none", element<none>()},
          {"weighted, straight_through", element<straight_through, weighted>()},
          {"weighted, straight_through_output", element<straight_through_output, weighted>()},
          {"weighted, selected_weight", element<selected_weight, weighted>()},
          {"weighted, none", element<none, weighted>()}};
}

void check_file(std::string const& path) {
  auto const c = load_attention_case(path);
  check_case(reference_for(c), c);
}

/// A problem with one head and width 1, scale 1: scores are q k.
struct scalar_problem {
  buffer<double> q, k, v, o;
  attention_shape shape;
  attention_input<double> in;
  std::vector<index_t> choice;
  buffer<double> lse;

  scalar_problem(std::vector<double> const& queries, std::vector<double> const& keys,
                 std::vector<double> const& values)
      : q(index_t(queries.size())), k(q.size()), v(q.size()), o(q.size()), choice(queries.size()), lse(q.size()) {
    std::copy(queries.begin(), queries.end(), q.begin());
    std::copy(keys.begin(), keys.end(), k.begin());
    std::copy(values.begin(), values.end(), v.begin());
    shape.seq = sequences::batch(1, q.size());
    in.q_rhk = view3<double const>(q.data(), {q.size(), 1, 1});
    in.k_rhk = view3<double const>(k.data(), {q.size(), 1, 1});
    in.v_rhv = view3<double const>(v.data(), {q.size(), 1, 1});
  }
  std::vector<double> run(reference_attention const& f) {
    auto const rows = q.size();
    f.of_double(device::reference{}, shape, in, view3<double>(o.data(), {rows, 1, 1}),
                {view2<index_t>(choice.data(), {rows, 1}), view2<double>(lse.data(), {rows, 1})});
    return {o.begin(), o.end()};
  }
};

}  // namespace

DOCTEST_TEST_CASE("reference attention gives the golden outputs and gradients of softmax attention") {
  for (auto const* name : {"attn_t1", "attn_gqa", "attn_swa8", "attn_sink", "attn_alibi_h4", "attn_alibi_h6",
                           "forgetting_attn", "forgetting_attn_swa8"})
    check_file(std::string("ops/") + name);
}

DOCTEST_TEST_CASE(
    "reference attention with linear weights gives the golden outputs and gradients of linear recurrences") {
  for (auto const* name : {"linear_attn", "linear_attn_init", "linear_attn_t1", "retention", "retention_t1",
                           "simple_gla", "simple_gla_init", "simple_gla_t1"})
    check_file(std::string("ops/") + name);
}

DOCTEST_TEST_CASE("reference attention gives the golden results of the key and temperature ablations") {
  auto const cases = golden_cases("top1", "attn_");
  DOCTEST_REQUIRE(cases.size() == 4);
  for (auto const& path : cases) check_file(path);
}

DOCTEST_TEST_CASE("reference attention gives the golden results of Top-1 element selection") {
  auto const cases = golden_cases("top1", "top1_element_");
  DOCTEST_REQUIRE(cases.size() == 27);
  for (auto const& path : cases) check_file(path);
}

DOCTEST_TEST_CASE("a hard Top-1 output is a bit-exact copy of the chosen value") {
  for (auto const& path : golden_cases("top1", "top1_element_hard_")) {
    auto const c = load_attention_case(path);
    if (c.shape.knobs.hard_fraction < 1) continue;
    auto const out = run(reference_for(c), c);
    auto const a = arrays_of<double>(c);
    auto const& s = c.shape;
    bool exact = true;
    for (index_t n = 0; n < s.seq.count(); ++n)
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r)
        for (index_t h = 0; h < s.heads; ++h) {
          index_t const row = s.seq.begin(n) + out.choice[std::size_t(r * s.heads + h)];
          for (index_t x = 0; x < s.value_dim; ++x)
            exact = exact &&
                    out.o[(r * s.heads + h) * s.value_dim + x] == a.in.v_rhv(row, h / (s.heads / s.value_heads), x);
        }
    DOCTEST_CHECK_MESSAGE(exact, path);
  }
}

DOCTEST_TEST_CASE("reference attention token by token equals the whole sequence to the bit") {
  for (auto const& path : golden_cases("top1", "top1_element_")) {
    auto const c = load_attention_case(path);
    check_stepwise(reference_for(c), c);
  }
  for (auto const* name :
       {"attn_gqa", "attn_swa8", "attn_alibi_h6", "forgetting_attn_swa8", "retention", "simple_gla"}) {
    auto const c = load_attention_case(std::string("ops/") + name);
    check_stepwise(reference_for(c), c);
  }
}

DOCTEST_TEST_CASE("reference attention never looks ahead: NaN in later tokens leaves earlier rows alone") {
  auto names = golden_cases("top1", "top1_element_hard_st");
  names.push_back("ops/attn_gqa");
  names.push_back("ops/simple_gla");
  for (auto const& path : names) {
    auto c = load_attention_case(path);
    check_causality(reference_for(c), c);
  }
}

DOCTEST_TEST_CASE("a per-channel gate inside the dot product is gated linear attention with its state") {
  // The recurrence S = Diag(e^g) S + k v', o = scale q'S, written out; a past of four tokens in front.
  constexpr index_t T = 9, past = 4, K = 3, V = 2, rows = T - past;
  random_numbers random(7);
  auto const q = random.normals(T * K), k = random.normals(T * K), v = random.normals(T * V);
  buffer<double> g(T * K);
  for (auto& x : g) x = -random.uniform(0, 2);
  attention_shape s;
  s.seq = sequences::batch(1, rows);
  s.key_dim = K;
  s.value_dim = V;
  s.scale = 0.6;
  attention_input<double> in;
  in.q_rhk = view3<double const>(q.data() + past * K, {rows, 1, K});
  in.k_rhk = view3<double const>(k.data() + past * K, {rows, 1, K});
  in.v_rhv = view3<double const>(v.data() + past * V, {rows, 1, V});
  in.g_rhk = view3<double const>(g.data() + past * K, {rows, 1, K});
  in.past_k_nlhk = view4<double const>(k.data(), {1, past, 1, K});
  in.past_v_nlhv = view4<double const>(v.data(), {1, past, 1, V});
  in.past_g_nlhk = view4<double const>(g.data(), {1, past, 1, K});
  in.past_length = &past;
  auto const out = run<double>(reference_of<selectors::all, selectors::linear>(), s, in);
  double S[K][V] = {};
  double worst = 0;
  for (index_t t = 0; t < T; ++t) {
    for (index_t x = 0; x < K; ++x)
      for (index_t y = 0; y < V; ++y) S[x][y] = std::exp(g[t * K + x]) * S[x][y] + k[t * K + x] * v[t * V + y];
    for (index_t y = 0; y < V && t >= past; ++y) {
      double o = 0;
      for (index_t x = 0; x < K; ++x) o += 0.6 * q[t * K + x] * S[x][y];
      worst = std::max(worst, std::abs(o - out.o[(t - past) * V + y]));
    }
  }
  DOCTEST_CHECK(worst <= rounding);
}

DOCTEST_TEST_CASE("a gate that closes at once gives finite weights: old keys vanish, nothing is NaN") {
  scalar_problem p({1, 1, 1}, {1, 1, 1}, {3, 5, 9});
  buffer<double> g(3);
  g[1] = -infinity;
  p.in.g_rhk = view3<double const>(g.data(), {3, 1, 1});
  DOCTEST_CHECK(p.run(dense) == std::vector<double>{3, 5, 7});
  DOCTEST_CHECK(p.run(reference_of<selectors::all, selectors::linear>()) == std::vector<double>{3, 5, 14});
  DOCTEST_CHECK(p.run(element<top1_gradient::straight_through>()) == std::vector<double>{3, 5, 5});
}

DOCTEST_TEST_CASE("identity 10: what the surrogates of Top-1 element selection share and where they differ") {
  using enum top1_gradient;
  for (double hard_temperature : {0.0, 0.5}) {
    auto c = random_attention_case(10);
    c.shape.knobs.forward_temperature = hard_temperature;
    auto const soft = outcome_of(dense, c);
    auto const st = outcome_of(element<straight_through>(), c);
    auto const sto = outcome_of(element<straight_through_output>(), c);
    auto const none_ = outcome_of(element<none>(), c);
    auto const weighted = outcome_of(element<straight_through, top1_output::weighted>(), c);
    DOCTEST_CHECK(output_difference(st, sto) == 0);
    DOCTEST_CHECK(output_difference(st, none_) == 0);
    for (auto which : {part::q, part::k}) {
      DOCTEST_CHECK(greatest_difference(st.gradient[which], sto.gradient[which]) <= rounding);
      DOCTEST_CHECK(greatest_difference(st.gradient[which], weighted.gradient[which]) <= rounding);
    }
    DOCTEST_CHECK(greatest_difference(st.gradient[part::v], sto.gradient[part::v]) > 0.1);
    DOCTEST_CHECK(greatest_difference(st.gradient[part::v], none_.gradient[part::v]) == 0);
    DOCTEST_CHECK(gradient_difference(sto, soft) <= rounding);
  }
}

DOCTEST_TEST_CASE("identity 11: mixing hard and soft outputs moves values, not the surrogate of the scores") {
  using enum top1_gradient;
  auto const mixed = [](reference_attention const& f, double fraction) {
    auto c = random_attention_case(11);
    c.shape.knobs.hard_fraction = fraction;
    return outcome_of(f, c);
  };
  auto const soft = outcome_of(dense, random_attention_case(11));
  auto const st = element<straight_through>(), sto = element<straight_through_output>(), off = element<none>();
  for (auto const& f : {st, sto, off}) {
    auto const none_hard = mixed(f, 0);
    DOCTEST_CHECK(output_difference(none_hard, soft) <= rounding);
    DOCTEST_CHECK(gradient_difference(none_hard, soft) <= rounding);
  }
  for (auto which : {part::q, part::k}) {
    DOCTEST_CHECK(greatest_difference(mixed(st, 0.3).gradient[which], mixed(st, 0.8).gradient[which]) <= rounding);
    DOCTEST_CHECK(greatest_difference(mixed(sto, 0.3).gradient[which], mixed(sto, 0.8).gradient[which]) <=
                  rounding);
    auto scaled = mixed(off, 0.3);
    for (auto& x : scaled.gradient[which]) x /= 0.7;
    DOCTEST_CHECK(greatest_difference(scaled.gradient[which], soft.gradient[which]) <= rounding);
  }
  DOCTEST_CHECK(greatest_difference(mixed(sto, 0.3).gradient[part::v], mixed(sto, 0.8).gradient[part::v]) <=
                rounding);
  DOCTEST_CHECK(greatest_difference(mixed(st, 0.3).gradient[part::v], mixed(st, 0.8).gradient[part::v]) > 0.1);
}

DOCTEST_TEST_CASE("identity 12: the gradients of all keys of a head sum to zero for every element policy") {
  for (auto const& selector : all_elements()) {
    auto const& f = selector.f;
    char const* const name = selector.name;
    auto c = random_attention_case(12);
    c.shape.knobs.forward_temperature = 0.5;
    auto const gradient = full_gradients(f, c);
    index_t const width = c.shape.key_heads * c.shape.key_dim;
    for (index_t x = 0; x < width; ++x) {
      double sum = 0;
      for (index_t r = 0; r < c.rows(); ++r) sum += gradient[part::k][r * width + x];
      DOCTEST_CHECK_MESSAGE(std::abs(sum) <= rounding, name);
    }
  }
}

DOCTEST_TEST_CASE("identity 14: temperature without a bias leaves the choice of an element alone") {
  auto cold = random_attention_case(14, {.length = 37});
  auto hot = random_attention_case(14, {.length = 37});
  cold.shape.knobs.temperature = 0.5;
  hot.shape.knobs.temperature = 2;
  auto const f = element<top1_gradient::straight_through>();
  DOCTEST_CHECK(run(f, cold).choice == run(f, hot).choice);
}

DOCTEST_TEST_CASE("identity 15: with one key per head attention is the running mean and the first element wins") {
  auto c = random_attention_case(15);
  auto const& s = c.shape;
  c.keys = attention_case::key_source::one;
  auto const soft = outcome_of(dense, c);
  double worst = 0;
  for (index_t h = 0; h < s.heads; ++h)
    for (index_t x = 0; x < s.value_dim; ++x) {
      double sum = 0;
      for (index_t t = 0; t < c.length; ++t) {
        index_t const at = (t * s.heads + h) * s.value_dim + x;
        sum += c.input[part::v].value[at];
        worst = std::max(worst, std::abs(sum / double(t + 1) - soft.out.o[at]));
      }
    }
  DOCTEST_CHECK(worst <= 1e-14);
  for (double dq : soft.gradient[part::q]) DOCTEST_CHECK(std::abs(dq) <= 1e-14);
  for (auto const choice : run(element<top1_gradient::none>(), c).choice) DOCTEST_CHECK(choice == 0);
}

DOCTEST_TEST_CASE("identity 16: packed sequences are the sequences run apart, shared heads are repeated heads") {
  std::vector<index_t> const offsets{0, 5, 5, 20, 37};
  for (auto const& selector : all_elements()) {
    auto const& f = selector.f;
    char const* const name = selector.name;
    auto c = random_attention_case(16, {.length = 37});
    auto const& s = c.shape;
    c.shape.seq = sequences::packed(offsets);
    auto const packed = run(f, c);
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
      auto apart = random_attention_case(16, {.length = 37});
      auto const a = arrays_of<double>(apart);
      auto in = a.in;
      index_t const begin = offsets[n], count = offsets[n + 1] - begin;
      in.q_rhk = in.q_rhk.slice(0, begin, count);
      in.k_rhk = in.k_rhk.slice(0, begin, count);
      in.v_rhv = in.v_rhv.slice(0, begin, count);
      apart.shape.seq = sequences::batch(1, count);
      auto const out = run<double>(f, apart.shape, in);
      bool same = true;
      for (index_t i = 0; i < out.o.size(); ++i)
        same = same && out.o[i] == packed.o[begin * s.heads * s.value_dim + i];
      DOCTEST_CHECK_MESSAGE(same, name, ", sequence ", n);
    }

    auto const grouped_case = random_attention_case(17, {.heads = 4, .key_heads = 2});
    auto const& g = grouped_case.shape;
    auto repeated_case = random_attention_case(17, {.heads = 4, .key_heads = 2});
    repeated_case.shape.key_heads = repeated_case.shape.value_heads = 4;
    for (auto which : {part::k, part::v}) {
      index_t const width = which == part::k ? g.key_dim : g.value_dim;
      buffer<double> repeated(grouped_case.rows() * 4 * width);
      for (index_t r = 0; r < grouped_case.rows(); ++r)
        for (index_t h = 0; h < 4; ++h)
          for (index_t x = 0; x < width; ++x)
            repeated[(r * 4 + h) * width + x] = grouped_case.input[which].value[(r * 2 + h / 2) * width + x];
      repeated_case.input[which].value = std::move(repeated);
    }
    auto const grouped = outcome_of(f, grouped_case);
    auto const repeated = outcome_of(f, repeated_case);
    DOCTEST_CHECK(output_difference(grouped, repeated) == 0);
    DOCTEST_CHECK(greatest_difference(grouped.gradient[part::q], repeated.gradient[part::q]) == 0);
    for (auto which : {part::k, part::v}) {
      index_t const width = which == part::k ? g.key_dim : g.value_dim;
      double worst = 0;
      for (index_t i = 0; i < grouped.gradient[which].size(); ++i) {
        index_t const group = i / width, x = i % width;
        double const sum =
            repeated.gradient[which][2 * group * width + x] + repeated.gradient[which][(2 * group + 1) * width + x];
        worst = std::max(worst, std::abs(sum - grouped.gradient[which][i]));
      }
      DOCTEST_CHECK(worst <= rounding);
    }
  }
}

namespace {
/// The mask of case P-N1: rows see keys {0}, {}, {0, 1}. Also what a user's own selector half looks like.
struct case_pn1_mask {
  [[maybe_unused]] static constexpr std::string_view name = "case_pn1_mask";
  static constexpr which_spec spec{};
  static constexpr key_ranges blocks(index_t query, index_t, selection const&) noexcept {
    key_ranges seen;
    seen.add({0, query});
    if (query == 1) seen.count = 0;
    if (query == 0) seen.add({0, 1});
    return seen;
  }
};
}  // namespace

DOCTEST_TEST_CASE("P-N1: a row that sees nothing is zero and spoils no other row") {
  std::vector<double> const q{1, 0, 0, 1, 1, 1}, k{1, 2, 0, 1, -1, 0}, v{1, 10, 2, 20, 3, 30};
  attention_shape s;
  s.seq = sequences::batch(1, 3);
  s.key_dim = s.value_dim = 2;
  s.scale = 1 / std::sqrt(2.0);
  attention_input<double> in;
  in.q_rhk = view3<double const>(q.data(), {3, 1, 2});
  in.k_rhk = view3<double const>(k.data(), {3, 1, 2});
  in.v_rhv = view3<double const>(v.data(), {3, 1, 2});
  auto const out = run<double>(reference_of<case_pn1_mask, selectors::softmax>(), s, in);
  DOCTEST_CHECK(out.o[0] == 1);
  DOCTEST_CHECK(out.o[1] == 10);
  DOCTEST_CHECK(out.o[2] == 0);
  DOCTEST_CHECK(out.o[3] == 0);
  DOCTEST_CHECK(out.o[4] == doctest::Approx(1.1955703175).epsilon(1e-9));
  DOCTEST_CHECK(out.o[5] == doctest::Approx(11.9557031749).epsilon(1e-9));
  DOCTEST_CHECK(out.lse[1] == -infinity);
  auto const hard = run<double>(reference_of<case_pn1_mask, selectors::top1<>>(), s, in);
  DOCTEST_CHECK(hard.choice == std::vector<index_t>{0, -1, 0});
  DOCTEST_CHECK(hard.o[2] == 0);
  DOCTEST_CHECK(hard.o[3] == 0);
}

DOCTEST_TEST_CASE("P-N1: a row whose scores are all -inf is zero") {
  scalar_problem masked({1, 1}, {-infinity, -infinity}, {3, 4});
  DOCTEST_CHECK(masked.run(dense) == std::vector<double>{0, 0});
  DOCTEST_CHECK(masked.lse[1] == -infinity);
}

DOCTEST_TEST_CASE("a NaN among the scores a row sees makes that row NaN, for every selector") {
  auto selectors = all_elements();
  selectors.push_back({"softmax", dense});
  for (auto const& selector : selectors) {
    scalar_problem p({1, 1, 1}, {1, not_a_number, 7}, {3, 4, 5});
    auto const o = p.run(selector.f);
    DOCTEST_CHECK_MESSAGE(o[0] == 3, selector.name);
    DOCTEST_CHECK_MESSAGE(std::isnan(o[1]), selector.name);
    DOCTEST_CHECK_MESSAGE(std::isnan(o[2]), selector.name);
  }
}

DOCTEST_TEST_CASE("a hard choice gathers: an infinite value it does not take changes nothing") {
  scalar_problem p({1, 1}, {1, 7}, {infinity, 5});
  DOCTEST_CHECK(p.run(element<top1_gradient::straight_through>())[1] == 5);
}

DOCTEST_TEST_CASE("P-N4: equal scores select the lowest index") {
  scalar_problem p({1, 1, 1, 1}, {2, 3, 3, 1}, {10, 20, 30, 40});
  for (auto const& f : {element<top1_gradient::straight_through>(), element<top1_gradient::none>()}) {
    DOCTEST_CHECK(p.run(f) == std::vector<double>{10, 20, 20, 20});
    DOCTEST_CHECK(p.choice == std::vector<index_t>{0, 1, 1, 1});
  }
  // The last row of each table of scores.
  for (auto const& [scores, expected] : std::vector<std::pair<std::vector<double>, index_t>>{
           {{1, 3, 3, 2}, 1}, {{5, 5, 5, 5}, 0}, {{-3, -1, -1, -2}, 1}}) {
    scalar_problem table({1, 1, 1, 1}, scores, {10, 20, 30, 40});
    table.run(element<top1_gradient::straight_through>());
    DOCTEST_CHECK(table.choice.back() == expected);
  }
}

DOCTEST_TEST_CASE("P-S3: a window of W sees W keys, the query's own among them") {
  auto const window = reference_of<selectors::window, selectors::softmax>();
  scalar_problem p({0, 0, 0, 0, 0}, {1, 2, 3, 4, 5}, {1, 2, 3, 4, 5});
  p.shape.select.window = 3;
  auto const o = p.run(window);
  std::vector<double> const expected{1, 1.5, 2, 3, 4};
  for (std::size_t t = 0; t < o.size(); ++t) DOCTEST_CHECK(o[t] == doctest::Approx(expected[t]).epsilon(1e-15));
  p.shape.select.window = 1;
  DOCTEST_CHECK(p.run(window) == std::vector<double>{1, 2, 3, 4, 5});
  auto const plain = p.run(dense);
  for (index_t w : {index_t(5), index_t(6), index_t(1'000'000'000)}) {
    p.shape.select.window = w;
    DOCTEST_CHECK(p.run(window) == plain);
  }
  for (index_t w : {index_t(0), index_t(-1)}) {
    p.shape.select.window = w;
    DOCTEST_CHECK_THROWS_AS(p.run(window), value_error);
  }
  DOCTEST_CHECK_THROWS_WITH_AS(
      p.run(window), "seqmix: attention: window (keys a query sees, itself among them) must be at least 1, got -1",
      value_error);
}

DOCTEST_TEST_CASE(
    "P-G6: a hard choice passes the values' gradient to the lowest index, and its surrogate to the scores") {
  attention_case c;
  c.name = "P-G6";
  c.length = 4;
  c.shape.seq = sequences::batch(1, 4);
  auto const set = [&](part which, std::vector<double> const& values) {
    c.input[which].value = buffer<double>(index_t(values.size()));
    std::copy(values.begin(), values.end(), c.input[which].value.begin());
  };
  set(part::q, {1, 1, 1, 1});
  set(part::k, {2, 3, 3, 1});
  set(part::v, {10, 20, 30, 40});
  c.cot_o = buffer<double>(4);
  c.cot_o.fill(1);
  auto const list = [](buffer<double> const& b) { return std::vector<double>(b.begin(), b.end()); };

  auto const off = full_gradients(element<top1_gradient::none>(), c);
  DOCTEST_CHECK(list(off[part::v]) == std::vector<double>{1, 3, 0, 0});
  DOCTEST_CHECK(list(off[part::q]) == std::vector<double>{0, 0, 0, 0});
  DOCTEST_CHECK(list(off[part::k]) == std::vector<double>{0, 0, 0, 0});

  auto const st = full_gradients(element<top1_gradient::straight_through>(), c);
  DOCTEST_CHECK(list(st[part::v]) == std::vector<double>{1, 3, 0, 0});
  // ds_i = p_i (g v_i - g o~), here for the second row: p over scores 2 and 3, values 10 and 20.
  double const p = 1 / (1 + std::exp(-1.0));
  DOCTEST_CHECK(st[part::q][1] == doctest::Approx(10 * p * (1 - p)).epsilon(1e-12));
}

DOCTEST_TEST_CASE("reference attention of no tokens and of no sequences does nothing") {
  for (index_t count : {index_t(0), index_t(2)}) {
    scalar_problem p({}, {}, {});
    p.shape.seq = sequences::batch(count, 0);
    DOCTEST_CHECK(p.run(dense).empty());
  }
}

DOCTEST_TEST_CASE("reference attention refuses sizes and numbers that do not fit, naming them") {
  scalar_problem p({1, 1}, {1, 1}, {1, 1});
  p.shape.seq = sequences::batch(1, 3);
  DOCTEST_CHECK_THROWS_WITH_AS(p.run(dense), "seqmix: attention q: expected [3,1,1], got [2,1,1]", shape_error);
  p.shape.seq = sequences::batch(1, 2);
  p.shape.knobs.temperature = 0;
  DOCTEST_CHECK_THROWS_AS(p.run(dense), value_error);
  p.shape.knobs.temperature = not_a_number;
  DOCTEST_CHECK_THROWS_AS(p.run(dense), value_error);
  p.shape.knobs = {};
  p.shape.knobs.hard_fraction = 1.5;
  DOCTEST_CHECK_THROWS_AS(p.run(dense), value_error);
  p.shape.knobs = {};
  p.shape.select.shared_choice = true;
  DOCTEST_CHECK_THROWS_AS(p.run(dense), value_error);
  p.shape.select = {};
  p.shape.heads = 3;
  p.shape.key_heads = 2;
  DOCTEST_CHECK_THROWS_WITH_AS(p.run(dense), "seqmix: attention: key_heads must divide the 3 query heads, got 2",
                               shape_error);
  p.shape.heads = p.shape.key_heads = 1;
  std::vector<double> const g(4, -1.0);
  p.in.g_rhk = view3<double const>(g.data(), {2, 1, 2});
  DOCTEST_CHECK_THROWS_WITH_AS(p.run(dense), "seqmix: attention g: expected [2,1,1], got [2,1,2]", shape_error);
  p.in.g_rhk = {};
  index_t const past = 2;
  p.in.past_length = &past;
  DOCTEST_CHECK_THROWS_AS(p.run(dense), shape_error);
  p.in.past_k_nlhk = view4<double const>(g.data(), {1, 1, 1, 1});
  p.in.past_v_nlhv = p.in.past_k_nlhk;
  DOCTEST_CHECK_THROWS_WITH_AS(p.run(dense), "seqmix: attention past_k: expected room for 2 tokens, got 1",
                               shape_error);
}
