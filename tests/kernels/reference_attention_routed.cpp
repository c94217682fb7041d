#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "../support/reference_run.hpp"

// One chunk of keys per query: own_plus_top1, exactly_one, window_plus_top1 with every score and gradient.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using part = attention_case::part;
using enum chunk_score;
using enum chunk_gradient;
using enum visible_keys;

constexpr double rounding = 1e-13;
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

reference_attention reference_for(selector_request const& s) { return with_routed_selector(s, make_reference{}); }

reference_attention const dense = reference_of<selectors::all, selectors::softmax>();
reference_attention const window_softmax = reference_of<selectors::window, selectors::softmax>();

struct surrogate {
  char const* name;
  chunk_gradient gradient;
  chunk_probability probability;
};
constexpr surrogate surrogates[] = {
    {"index_constant", index_constant, chunk_probability::mass},
    {"chunk_straight_through by mass", chunk_straight_through, chunk_probability::mass},
    {"chunk_straight_through by score", chunk_straight_through, chunk_probability::score},
    {"gated", gated, chunk_probability::mass}};

struct named_score {
  char const* name;
  chunk_score score;
};
constexpr named_score scores[] = {{"mean_key", mean_key},
                                  {"mean_key_prefix", mean_key_prefix},
                                  {"exact_mass", exact_mass},
                                  {"exact_max", exact_max}};

/// Calls body(request, text) for every score and gradient that compiles with these visible keys.
template <class Body>
void for_each_selector(visible_keys visible, Body const& body) {
  for (auto const& score : scores) {
    if (visible == exactly_one && score.score == mean_key) continue;
    for (auto const& s : surrogates) {
      selector_request request;
      request.visible = visible;
      request.score = score.score;
      request.gradient = s.gradient;
      request.probability = s.probability;
      body(request, std::string(score.name) + ", " + s.name);
    }
  }
}

selector_request request_of(visible_keys visible, chunk_score score, chunk_gradient gradient = index_constant) {
  selector_request request;
  request.visible = visible;
  request.score = score;
  request.gradient = gradient;
  return request;
}

attention_case chunked_case(std::uint64_t seed, index_t chunk, index_t window = 0,
                            random_case_size const& size = {}) {
  auto c = random_attention_case(seed, size);
  c.shape.select.chunk = chunk;
  c.shape.select.window = window;
  return c;
}

/// The size of the choice statistics: 148 rows in chunks of 5.
constexpr random_case_size many_rows{.batch = 2, .length = 37};

void add_slopes(attention_case& c) {
  c.gate = attention_case::gate_source::slopes;
  c.input[part::g].value = buffer<double>(c.shape.heads);
  for (index_t h = 0; h < c.shape.heads; ++h) c.input[part::g].value[h] = std::exp2(-2.0 * double(h + 1));
}

void check_same(outcome const& a, outcome const& b, std::string const& text) {
  DOCTEST_CAPTURE(text);
  DOCTEST_CHECK(output_difference(a, b) <= rounding);
  DOCTEST_CHECK(gradient_difference(a, b) <= rounding);
}

index_t rows_that_differ(attention_output<double> const& a, attention_output<double> const& b) {
  index_t count = 0;
  for (std::size_t i = 0; i < a.choice.size(); ++i) count += a.choice[i] != b.choice[i];
  return count;
}

}  // namespace

DOCTEST_TEST_CASE("reference attention gives the golden results of Top-1 chunk selection") {
  auto const cases = golden_cases("top1", "top1_chunk_");
  DOCTEST_REQUIRE(cases.size() == 34);
  for (auto const& path : cases) {
    auto const c = load_attention_case(path);
    check_case(reference_for(c.selector), c);
  }
}

DOCTEST_TEST_CASE("routed attention token by token equals the whole sequence to the bit") {
  for (auto const& path : golden_cases("top1", "top1_chunk_")) {
    auto const c = load_attention_case(path);
    check_stepwise(reference_for(c.selector), c);
  }
}

DOCTEST_TEST_CASE("routed attention never looks ahead, whatever the score") {
  for (auto visible : {own_plus_top1, exactly_one, window_plus_top1})
    for_each_selector(visible, [&](selector_request const& request, std::string const& text) {
      auto c = chunked_case(3, 5, 4, {.length = 18});
      c.name = text;
      check_causality(reference_for(request), c);
    });
}

DOCTEST_TEST_CASE("a NaN key makes every later row NaN that sees its chunk or may choose it") {
  constexpr index_t bad = 6, chunk = 5, window = 2;
  for (auto visible : {own_plus_top1, exactly_one, window_plus_top1})
    for_each_selector(visible, [&](selector_request const& request, std::string const& text) {
      auto c = chunked_case(4, chunk, window, {.heads = 1, .key_heads = 1});
      c.input[part::k].value[bad * c.shape.key_dim] = not_a_number;
      auto const out = run(reference_for(request), c);
      for (index_t t = 0; t < c.length; ++t) {
        bool const seen = t >= bad && (visible != window_plus_top1 || t < bad + window);
        bool const candidate = t / chunk > bad / chunk;
        DOCTEST_CHECK_MESSAGE(std::isnan(out.o[t * c.shape.value_dim]) == (seen || candidate), text, ", row ", t);
      }
    });
}

DOCTEST_TEST_CASE("identity 1: chunks of one key with exactly_one are element selection") {
  using selectors::top1;
  using selectors::top1_gradient;
  using selectors::top1_output;
  auto const hard_none = reference_of<selectors::all, top1<top1_output::hard, top1_gradient::none>>();
  auto const hard_st = reference_of<selectors::all, top1<top1_output::hard, top1_gradient::straight_through>>();
  auto const hard_sto =
      reference_of<selectors::all, top1<top1_output::hard, top1_gradient::straight_through_output>>();
  auto const weighted = reference_of<selectors::all, top1<top1_output::weighted, top1_gradient::selected_weight>>();
  for (bool slopes : {false, true})
    for (double temperature : {1.0, 0.5, 2.0}) {
      auto c = chunked_case(1, 1);
      c.shape.knobs.temperature = temperature;
      if (slopes) add_slopes(c);
      auto const none = outcome_of(hard_none, c), st = outcome_of(hard_st, c), sto = outcome_of(hard_sto, c);
      auto const selected = outcome_of(weighted, c);
      for_each_selector(exactly_one, [&](selector_request const& request, std::string const& text) {
        bool const position_free = request.score == mean_key_prefix;
        auto const chunked = outcome_of(reference_for(request), c);
        if (slopes && position_free) {
          if (request.gradient == index_constant) DOCTEST_CHECK(different_choices(chunked, none) > 0);
          return;
        }
        DOCTEST_CHECK_MESSAGE(different_choices(chunked, none) == 0, text);
        if (request.gradient == index_constant) {
          check_same(chunked, none, text);
          for (auto which : {part::q, part::k})
            for (double x : chunked.gradient[which]) DOCTEST_CHECK(x == 0);
          DOCTEST_CHECK(gradient_difference(chunked, st) > 0.1);
        }
        if (request.gradient == chunk_straight_through) {
          check_same(chunked, st, text);
          DOCTEST_CHECK(gradient_difference(chunked, sto) > 0.1);
        }
        if (request.gradient == gated) check_same(chunked, selected, text);
      });
    }
}

DOCTEST_TEST_CASE("identity 2: chunks of one key make own_plus_top1 a window of one key plus the best") {
  auto const c = chunked_case(2, 1, 1);
  auto const element = run(reference_of<selectors::all, selectors::top1<>>(), c);
  for_each_selector(own_plus_top1, [&](selector_request const& request, std::string const& text) {
    auto near = request;
    near.visible = window_plus_top1;
    auto const own = outcome_of(reference_for(request), c);
    auto const window = outcome_of(reference_for(near), c);
    check_same(own, window, text);
    DOCTEST_CHECK(different_choices(own, window) == 0);
    DOCTEST_CHECK(greatest_difference(own.out.o, element.o) > 0.1);
  });
}

DOCTEST_TEST_CASE("identity 3: one chunk for everything is dense attention, or the window") {
  for (index_t chunk : {19, 20, 1000}) {
    auto const c = chunked_case(3, chunk, 6);
    auto const all = outcome_of(dense, c), near = outcome_of(window_softmax, c);
    for (auto visible : {own_plus_top1, exactly_one})
      for_each_selector(visible, [&](selector_request const& request, std::string const& text) {
        check_same(outcome_of(reference_for(request), c), all, text);
      });
    for_each_selector(window_plus_top1, [&](selector_request const& request, std::string const& text) {
      check_same(outcome_of(reference_for(request), c), near, text);
    });
  }
}

DOCTEST_TEST_CASE("identity 3: with one chunk, window_plus_top1 reproduces the golden window and dense attention") {
  for (auto const* name : {"attn_swa8", "attn_gqa", "attn_t1"}) {
    auto c = load_attention_case(std::string("ops/") + name);
    c.shape.select.chunk = c.length;
    if (c.shape.select.window == 0) c.shape.select.window = c.length;
    auto const f = reference_for(request_of(window_plus_top1, exact_mass, chunk_straight_through));
    check_forward<double>(f, c);
    check_directions(f, c, 5);
  }
}

DOCTEST_TEST_CASE("identity 4: two chunks make own_plus_top1 dense attention") {
  constexpr index_t chunk = 10;
  auto const c = chunked_case(4, chunk, chunk), narrow = chunked_case(4, chunk, chunk - 1);
  auto const all = outcome_of(dense, c);
  for_each_selector(own_plus_top1, [&](selector_request const& request, std::string const& text) {
    check_same(outcome_of(reference_for(request), c), all, text);
  });
  for_each_selector(window_plus_top1, [&](selector_request const& request, std::string const& text) {
    check_same(outcome_of(reference_for(request), c), all, text);
    DOCTEST_CHECK(output_difference(outcome_of(reference_for(request), narrow), all) > 1e-4);
  });
  auto const one = run(reference_for(request_of(exactly_one, exact_mass)), c);
  DOCTEST_CHECK(greatest_difference(one.o, all.out.o) > 0.01);
}

DOCTEST_TEST_CASE("identity 5: a window over everything is dense attention except for gated outputs") {
  auto const c = chunked_case(5, 5, 19);
  auto const all = outcome_of(dense, c);
  for_each_selector(window_plus_top1, [&](selector_request const& request, std::string const& text) {
    auto const found = outcome_of(reference_for(request), c);
    if (request.gradient == gated)
      DOCTEST_CHECK(output_difference(found, all) > 0.1);
    else
      check_same(found, all, text);
  });
}

DOCTEST_TEST_CASE("identity 6: where the own chunk does not compete, mean_key and mean_key_prefix are the same") {
  auto const c = chunked_case(6, 5, 6);
  for (auto visible : {own_plus_top1, window_plus_top1})
    for (auto gradient : {index_constant, chunk_straight_through, gated}) {
      auto const plain = outcome_of(reference_for(request_of(visible, mean_key, gradient)), c);
      auto const prefix = outcome_of(reference_for(request_of(visible, mean_key_prefix, gradient)), c);
      DOCTEST_CHECK(output_difference(plain, prefix) == 0);
      DOCTEST_CHECK(gradient_difference(plain, prefix) == 0);
      DOCTEST_CHECK(different_choices(plain, prefix) == 0);
    }
}

namespace {
/// MoBA (arXiv 2502.13189) with top k = 2 for one head, written from its equations: gates q.mean(k) of all chunks,
/// the own one +infinity, later ones -infinity; softmax over the keys of the k greatest.
buffer<double> moba_of_two(attention_case const& c) {
  constexpr double never = -std::numeric_limits<double>::infinity();
  auto const& s = c.shape;
  index_t const T = c.length, K = s.key_dim, V = s.value_dim, B = s.select.chunk, chunks = (T + B - 1) / B;
  auto const& q = c.input[part::q].value;
  auto const& k = c.input[part::k].value;
  auto const& v = c.input[part::v].value;
  buffer<double> o(T * V);
  for (index_t t = 0; t < T; ++t) {
    std::vector<double> gate(std::size_t(chunks), never);
    for (index_t b = 0; b < t / B; ++b) {
      gate[std::size_t(b)] = 0;
      for (index_t j = b * B; j < (b + 1) * B; ++j)
        for (index_t x = 0; x < K; ++x) gate[std::size_t(b)] += q[t * K + x] * k[j * K + x] / double(B);
    }
    gate[std::size_t(t / B)] = -never;
    std::vector<bool> chosen(gate.size());
    for (int round = 0; round < 2; ++round) {
      std::size_t best = gate.size();
      for (std::size_t b = 0; b < gate.size(); ++b)
        if (!chosen[b] && gate[b] > never && (best == gate.size() || gate[b] > gate[best])) best = b;
      if (best < gate.size()) chosen[best] = true;
    }
    double sum = 0;
    for (index_t j = 0; j <= t; ++j) {
      if (!chosen[std::size_t(j / B)]) continue;
      double score = 0;
      for (index_t x = 0; x < K; ++x) score += s.scale * q[t * K + x] * k[j * K + x];
      sum += std::exp(score);
      for (index_t x = 0; x < V; ++x) o[t * V + x] += std::exp(score) * v[j * V + x];
    }
    for (index_t x = 0; x < V; ++x) o[t * V + x] /= sum;
  }
  return o;
}
}  // namespace

DOCTEST_TEST_CASE("identity 7: own_plus_top1 with mean keys is MoBA with two chunks") {
  auto const c = chunked_case(7, 5, 0, {.length = 37, .heads = 1, .key_heads = 1});
  auto const out = run(reference_for(request_of(own_plus_top1, mean_key)), c);
  DOCTEST_CHECK(greatest_difference(out.o, moba_of_two(c)) <= rounding);
}

DOCTEST_TEST_CASE("identity 8: exactly_one by mass, gated, is the full softmax cut to the chosen chunk") {
  constexpr index_t chunk = 5;
  auto const c = chunked_case(8, chunk, 0, {.heads = 1, .key_heads = 1});
  auto const out = run(reference_for(request_of(exactly_one, exact_mass, gated)), c);
  auto const a = arrays_of<double>(c);
  double worst = 0;
  for (index_t t = 0; t < c.length; ++t) {
    std::vector<double> cut(std::size_t(c.shape.value_dim), 0.0);
    double sum = 0;
    for (index_t j = 0; j <= t; ++j) {
      double score = 0;
      for (index_t x = 0; x < c.shape.key_dim; ++x)
        score += c.shape.scale * a.in.q_rhk(t, 0, x) * a.in.k_rhk(j, 0, x);
      sum += std::exp(score);
      if (j / chunk == out.choice[std::size_t(t)])
        for (std::size_t x = 0; x < cut.size(); ++x) cut[x] += std::exp(score) * a.in.v_rhv(j, 0, x);
    }
    for (std::size_t x = 0; x < cut.size(); ++x)
      worst = std::max(worst, std::abs(cut[x] / sum - out.o[t * c.shape.value_dim + index_t(x)]));
  }
  DOCTEST_CHECK(worst <= rounding);
}

DOCTEST_TEST_CASE("identity 9: chunk_straight_through changes the gradient of the scores and nothing else") {
  auto const c = chunked_case(9, 5, 6);
  for (auto visible : {own_plus_top1, exactly_one, window_plus_top1})
    for (auto score : {mean_key_prefix, exact_mass, exact_max}) {
      auto const constant = outcome_of(reference_for(request_of(visible, score)), c);
      auto const through = outcome_of(reference_for(request_of(visible, score, chunk_straight_through)), c);
      DOCTEST_CHECK(output_difference(constant, through) == 0);
      DOCTEST_CHECK(different_choices(constant, through) == 0);
      DOCTEST_CHECK(greatest_difference(constant.gradient[part::v], through.gradient[part::v]) == 0);
      DOCTEST_CHECK(greatest_difference(constant.gradient[part::q], through.gradient[part::q]) > 0.01);
      DOCTEST_CHECK(greatest_difference(constant.gradient[part::k], through.gradient[part::k]) > 0.01);
    }
}

DOCTEST_TEST_CASE("identity 12: the gradients of all keys of a head sum to zero for every routed selector") {
  for (auto visible : {own_plus_top1, exactly_one, window_plus_top1})
    for_each_selector(visible, [&](selector_request const& request, std::string const& text) {
      auto c = chunked_case(12, 5, 6);
      c.shape.knobs.temperature = 0.5;
      auto const gradient = full_gradients(reference_for(request), c);
      index_t const width = c.shape.key_heads * c.shape.key_dim;
      for (index_t x = 0; x < width; ++x) {
        double sum = 0;
        for (index_t r = 0; r < c.rows(); ++r) sum += gradient[part::k][r * width + x];
        DOCTEST_CHECK_MESSAGE(std::abs(sum) <= rounding, text);
      }
    });
}

DOCTEST_TEST_CASE(
    "identity 13: with equal keys inside each chunk the scores agree, but mass counts a partial chunk less") {
  constexpr index_t chunk = 5;
  auto c = chunked_case(13, chunk, 0, many_rows);
  index_t const width = c.shape.key_heads * c.shape.key_dim;
  for (index_t r = 0; r < c.rows(); ++r)
    for (index_t x = 0; x < width; ++x) {
      index_t const first = r / c.length * c.length + r % c.length / chunk * chunk;
      c.input[part::k].value[r * width + x] = c.input[part::k].value[first * width + x];
    }
  auto const choose = [&](visible_keys visible, chunk_score score) {
    return run(reference_for(request_of(visible, score)), c);
  };
  auto const mean = choose(own_plus_top1, mean_key);
  DOCTEST_CHECK(rows_that_differ(mean, choose(own_plus_top1, exact_max)) == 0);
  DOCTEST_CHECK(rows_that_differ(mean, choose(own_plus_top1, exact_mass)) == 0);
  auto const most = choose(exactly_one, exact_max);
  DOCTEST_CHECK(rows_that_differ(most, choose(exactly_one, mean_key_prefix)) == 0);
  DOCTEST_CHECK(rows_that_differ(most, choose(exactly_one, exact_mass)) > 0);
}

DOCTEST_TEST_CASE("identity 14: temperature changes the choice of exact_mass alone") {
  for (auto visible : {own_plus_top1, exactly_one})
    for (auto score : {mean_key_prefix, exact_max, exact_mass}) {
      auto c = chunked_case(14, 5, 0, many_rows);
      auto const f = reference_for(request_of(visible, score));
      c.shape.knobs.temperature = 0.5;
      auto const cold = run(f, c);
      c.shape.knobs.temperature = 2;
      auto const hot = run(f, c);
      DOCTEST_CHECK((rows_that_differ(cold, hot) > 0) == (score == exact_mass));
    }
}

DOCTEST_TEST_CASE("identity 15: with one key per head every score ties and the first chunk wins") {
  constexpr index_t chunk = 5;
  auto c = chunked_case(15, chunk, 0, many_rows);
  c.keys = attention_case::key_source::one;
  for (auto const& score : scores) {
    auto const out = run(reference_for(request_of(own_plus_top1, score.score)), c);
    for (index_t i = 0; i < index_t(out.choice.size()); ++i) {
      index_t const t = i / c.shape.heads % c.length;
      DOCTEST_CHECK_MESSAGE(out.choice[std::size_t(i)] == (t < chunk ? -1 : 0), score.name, ", row ", t);
    }
  }
  for (auto score : {exact_mass, exact_max, mean_key_prefix}) {
    // A mean is exact when the sum of the keys is.
    if (score == mean_key_prefix)
      for (auto& x : c.input[part::k].value) x = std::round(16 * x) / 16;
    for (auto choice : run(reference_for(request_of(exactly_one, score)), c).choice) DOCTEST_CHECK(choice == 0);
  }
}

DOCTEST_TEST_CASE("identity 16: packed sequences are routed apart, shared heads are repeated heads") {
  std::vector<index_t> const offsets{0, 5, 5, 20, 37};
  for (auto visible : {own_plus_top1, exactly_one, window_plus_top1})
    for (auto gradient : {index_constant, chunk_straight_through, gated}) {
      auto const f = reference_for(request_of(visible, exact_mass, gradient));
      auto c = chunked_case(16, 5, 6, {.length = 37});
      c.shape.seq = sequences::packed(offsets);
      auto const packed = run(f, c);
      auto const a = arrays_of<double>(c);
      index_t const heads = c.shape.heads, width = heads * c.shape.value_dim;
      for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
        index_t const begin = offsets[n], count = offsets[n + 1] - begin;
        auto apart = c.shape;
        apart.seq = sequences::batch(1, count);
        auto in = a.in;
        in.q_rhk = in.q_rhk.slice(0, begin, count);
        in.k_rhk = in.k_rhk.slice(0, begin, count);
        in.v_rhv = in.v_rhv.slice(0, begin, count);
        auto const out = run<double>(f, apart, in);
        bool same = true;
        for (index_t i = 0; i < out.o.size(); ++i) same = same && out.o[i] == packed.o[begin * width + i];
        for (index_t i = 0; i < count * heads; ++i)
          same = same && out.choice[std::size_t(i)] == packed.choice[std::size_t(begin * heads + i)];
        DOCTEST_CHECK_MESSAGE(same, "sequence ", n);
      }

      auto const grouped_case = chunked_case(17, 5, 6, {.heads = 4, .key_heads = 2});
      auto repeated_case = chunked_case(17, 5, 6, {.heads = 4, .key_heads = 2});
      repeated_case.shape.key_heads = repeated_case.shape.value_heads = 4;
      auto const width_of = [&](part which) {
        return which == part::k ? grouped_case.shape.key_dim : grouped_case.shape.value_dim;
      };
      for (auto which : {part::k, part::v}) {
        index_t const w = width_of(which);
        buffer<double> repeated(grouped_case.rows() * 4 * w);
        for (index_t i = 0; i < repeated.size(); ++i)
          repeated[i] = grouped_case.input[which].value[i / w / 2 * w + i % w];
        repeated_case.input[which].value = std::move(repeated);
      }
      auto const grouped = outcome_of(f, grouped_case);
      auto const repeated = outcome_of(f, repeated_case);
      DOCTEST_CHECK(output_difference(grouped, repeated) == 0);
      for (auto which : {part::k, part::v}) {
        index_t const w = width_of(which);
        double worst = 0;
        for (index_t i = 0; i < grouped.gradient[which].size(); ++i) {
          index_t const first = 2 * (i / w) * w + i % w;
          double const sum = repeated.gradient[which][first] + repeated.gradient[which][first + w];
          worst = std::max(worst, std::abs(sum - grouped.gradient[which][i]));
        }
        DOCTEST_CHECK(worst <= rounding);
      }
    }
}

DOCTEST_TEST_CASE("identity 17: mean_key, exact_mass and exact_max are different choices") {
  auto const c = chunked_case(17, 5, 0, many_rows);
  auto const mean = run(reference_for(request_of(own_plus_top1, mean_key)), c);
  auto const mass = run(reference_for(request_of(own_plus_top1, exact_mass)), c);
  auto const most = run(reference_for(request_of(own_plus_top1, exact_max)), c);
  DOCTEST_CHECK(rows_that_differ(mean, mass) > 10);
  DOCTEST_CHECK(rows_that_differ(mean, most) > 10);
  DOCTEST_CHECK(rows_that_differ(mass, most) > 10);
}

DOCTEST_TEST_CASE(
    "a shared choice is one chunk for all query heads of a key head, and follows their summed probability") {
  auto c = chunked_case(18, 5, 0, {.length = 37, .heads = 4, .key_heads = 2});
  auto const f = reference_for(request_of(own_plus_top1, mean_key));
  auto const apart = run(f, c);
  c.shape.select.shared_choice = true;
  auto const shared = run(f, c);
  for (std::size_t i = 0; i < shared.choice.size(); i += 2) DOCTEST_CHECK(shared.choice[i] == shared.choice[i + 1]);
  DOCTEST_CHECK(rows_that_differ(apart, shared) > 0);
  // A head whose scores are NaN leaves its group without a choice.
  c.input[part::q].value[(36 * 4 + 1) * c.shape.key_dim] = not_a_number;
  auto const spoilt = run(f, c);
  for (index_t h = 0; h < 4; ++h) DOCTEST_CHECK(std::isnan(spoilt.o[(36 * 4 + h) * c.shape.value_dim]) == (h < 2));
}

DOCTEST_TEST_CASE("P-S3: routed attention refuses a window or chunk below 1") {
  auto c = chunked_case(19, 0, 1);
  auto const f = reference_for(request_of(window_plus_top1, mean_key));
  DOCTEST_CHECK_THROWS_WITH_AS(run(f, c), "seqmix: attention: chunk (keys per chunk) must be at least 1, got 0",
                               value_error);
  c = chunked_case(19, 1, 0);
  DOCTEST_CHECK_THROWS_AS(run(f, c), value_error);
}
