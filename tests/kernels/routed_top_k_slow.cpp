#include <algorithm>
#include <limits>

#include <doctest/doctest.h>

#include "../support/routed_run.hpp"
#include <seqmix/selectors/compressed.hpp>

// The selectors that choose several chunks per query, sinks and the router's bias: fast kernels against golden
// vectors, the reference and each other.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using part = attention_case::part;
using selectors::own_plus_top1;
using selectors::own_plus_top_k;
using selectors::top_k_by_compression;
using selectors::window_plus_top_k;
using enum chunk_score;
using enum chunk_gradient;

using own_k = own_plus_top_k<>;
using own_k_gated = own_plus_top_k<mean_key, gated>;
using own_k_through = own_plus_top_k<exact_mass, chunk_straight_through>;
using own_k_through_score = own_plus_top_k<mean_key, chunk_straight_through, chunk_probability::score>;
using near_k = window_plus_top_k<exact_max, gated>;
using near_k_through = window_plus_top_k<mean_key, chunk_straight_through>;
using forced = top_k_by_compression<>;
using unforced = top_k_by_compression<forced_chunks::none>;

struct named {
  std::string name;
  routed_functions f;
  which_spec spec;
};
template <class Which>
named make(std::string const& name) {
  return {name, routed_functions_of<Which>(), Which::spec};
}
std::vector<named> const& selectors_of_several() {
  static std::vector<named> const all{make<own_k>("own_plus_top_k"),
                                      make<own_k_gated>("own_plus_top_k, gated"),
                                      make<own_k_through>("own_plus_top_k, mass, straight through"),
                                      make<own_k_through_score>("own_plus_top_k, straight through by score"),
                                      make<near_k>("window_plus_top_k, max, gated"),
                                      make<near_k_through>("window_plus_top_k, straight through"),
                                      make<forced>("top_k_by_compression"),
                                      make<unforced>("top_k_by_compression, none forced")};
  return all;
}
/// ragged_case with top_k = 2 .. 4, sinks in every other case.
attention_case case_of_several(named const& s, index_t length, index_t i) {
  auto c = ragged_case(length, i);
  c.shape.select.top_k = 2 + i % 3;
  if (i % 2) add_sink(c, std::uint64_t(i));
  if (scores_by_mean(s.spec.score) && !s.spec.by_compression) c.shape.select.router_bias = i % 4 < 2;
  return c;
}
/// Chunks of 5 keys, top_k of them.
attention_case chunked_case(std::uint64_t seed, index_t top_k, random_case_size const& size = {}) {
  auto c = random_attention_case(seed, size);
  c.shape.select.chunk = 5;
  c.shape.select.window = 4;
  c.shape.select.top_k = top_k;
  return c;
}
/// The run of several tokens behind the first `held`, which are handed in as the past.
routed_result<double> behind_past(routed_function<double> f, attention_case const& c, index_t held) {
  auto const a = arrays_of<double>(c);
  index_t const rest = c.length - held, width = c.shape.heads * c.shape.value_dim;
  auto shape = c.shape;
  shape.seq = sequences::batch(1, rest);
  auto const as_past = [&](view3<double const> v) {
    return view4<double const>(v.data, {1, held, v.extent[1], v.extent[2]},
                               {0, v.stride[0], v.stride[1], v.stride[2]});
  };
  auto in = a.in;
  in.q_rhk = a.in.q_rhk.slice(0, held, rest);
  in.k_rhk = a.in.k_rhk.slice(0, held, rest);
  in.v_rhv = a.in.v_rhv.slice(0, held, rest);
  in.past_k_nlhk = as_past(a.in.k_rhk);
  in.past_v_nlhv = as_past(a.in.v_rhv);
  if (a.in.g_rhk && !c.constant_gate()) {
    in.g_rhk = a.in.g_rhk.slice(0, held, rest);
    in.past_g_nlhk = as_past(a.in.g_rhk);
  }
  in.past_length = &held;
  buffer<double> cot(rest * width);
  for (index_t x = 0; x < cot.size(); ++x) cot[x] = c.cot_o[held * width + x];
  return f(shape, in, cot, 1);
}
double worst_difference(buffer<double> const& all, index_t from, buffer<double> const& some) {
  double worst = 0;
  for (index_t x = 0; x < some.size(); ++x) worst = std::max(worst, std::abs(all[from + x] - some[x]));
  return worst;
}

}  // namespace

DOCTEST_TEST_CASE("own_plus_top_k with mean keys and one chunk less than its topk is MoBA, golden") {
  auto const c = load_attention_case("ops/moba");
  DOCTEST_REQUIRE(c.shape.select.top_k == 2);
  auto const f = routed_functions_of<own_k>();
  check_golden<double>(f.of_double, c);
  check_golden<float>(f.of_float, c);
  check_case(f.reference, c);
  // In float the same blocks, as sets.
  auto const sorted = [&](std::vector<index_t> x) {
    for (auto i = x.begin(); i != x.end(); i += c.shape.select.top_k) std::sort(i, i + c.shape.select.top_k);
    return x;
  };
  DOCTEST_CHECK(sorted(run_case<float>(f.of_float, c).choices) == sorted(run<double>(f.reference, c).choices));
}

DOCTEST_TEST_CASE(
    "top_k_by_compression with the published block count less the own one chooses the golden blocks of NSA") {
  golden_case const g("ops/nsa");
  auto const& q = g["q"];
  attention_shape s;
  s.seq = sequences::batch(1, q.extent(1));
  s.heads = s.gate_heads = q.extent(2);
  s.key_dim = s.value_dim = q.extent(3);
  s.scale = g.number("scale", 0);
  s.select.chunk = index_t(g.number("block_size", 0));
  s.select.top_k = index_t(g.number("block_counts", 0)) - 1;
  auto const f = routed_functions_of<forced>();
  auto const expected = [&](index_t t) {
    std::vector<index_t> blocks;
    for (index_t x = 0; x <= s.select.top_k; ++x) {
      auto const block = index_t(g["block_indices"][t * (s.select.top_k + 1) + x]);
      if (block >= 0 && block != t / s.select.chunk) blocks.push_back(block);
    }
    blocks.resize(std::size_t(s.select.top_k), -1);
    std::sort(blocks.begin(), blocks.end());
    return blocks;
  };
  auto const check = [&]<class T>(routed_function<T> run_it, T) {
    auto const queries = q.converted<T>(), keys = g.converted<T>("k"), values = g.converted<T>("v");
    attention_input<T> in;
    in.q_rhk = {queries.data(), {s.seq.rows(), s.heads, s.key_dim}};
    in.k_rhk = {keys.data(), {s.seq.rows(), 1, s.key_dim}};
    in.v_rhv = {values.data(), {s.seq.rows(), 1, s.value_dim}};
    auto const choices = run_it(s, in, buffer<T>(in.q_rhk.size()), 1).choices;
    for (index_t t = 0; t < s.seq.rows(); ++t)
      for (index_t h = 0; h < s.heads; ++h) {
        auto const at = choices.begin() + (t * s.heads + h) * s.select.top_k;
        std::vector<index_t> found(at, at + s.select.top_k);
        std::sort(found.begin(), found.end());
        DOCTEST_CHECK_MESSAGE(found == expected(t), "row ", t, ", head ", h);
      }
  };
  check(f.of_double, 0.0);
  check(f.of_float, 0.0f);
}

DOCTEST_TEST_CASE("with top_k = 1 the selectors of several choose, read and learn as those of one, to the bit") {
  for (index_t i = 0; i < 6; ++i) {
    auto c = ragged_case(70, i);
    if (!c.offsets.empty()) c.shape.seq = sequences::packed(c.offsets);
    auto const same = [&](routed_functions const& one, routed_functions const& several) {
      auto const a = run_case<float>(one.of_float, c), b = run_case<float>(several.of_float, c);
      DOCTEST_CHECK(same_bits(a.o, b.o));
      DOCTEST_CHECK(a.choice == b.choice);
      DOCTEST_CHECK(a.choices == b.choices);
      for (std::size_t x = 0; x < attention_case::parts; ++x)
        DOCTEST_CHECK(same_bits(a.gradient[x], b.gradient[x]));
    };
    same(routed_functions_of<own_plus_top1<>>(), routed_functions_of<own_k>());
    same(routed_functions_of<own_plus_top1<exact_mass, chunk_straight_through>>(),
         routed_functions_of<own_k_through>());
  }
}

DOCTEST_TEST_CASE("a few chunks on the CPU agree with the reference on ragged sizes, forward and backward") {
  index_t i = 0;
  for (auto const& s : selectors_of_several())
    for (index_t length : {1, 2, 5, 9, 16, 17, 23, 30, 37, 40, 64, 65, 130}) {
      auto c = case_of_several(s, length, i++);
      if (length == 130) c.shape.select.chunk = 33 - length % 7;
      DOCTEST_INFO(s.name, ", length ", length, ", chunk ", c.shape.select.chunk, ", case ", i - 1);
      check_against_reference(s.f, c, 2);
    }
}

DOCTEST_TEST_CASE("several chunks after a past continue the sequence, token by token too, and teach the past") {
  index_t i = 0;
  for (auto const& s : selectors_of_several())
    for (index_t held : {1, 7, 31}) {
      auto c = case_of_several(s, held + 6 + i % 5 * 7, i);
      c.offsets.clear();
      c.shape.select.chunk = 3 + i % 3;
      ++i;
      DOCTEST_INFO(s.name, ", past ", held, ", case ", i - 1);
      index_t const width = c.shape.heads * c.shape.value_dim;
      for (index_t x = 0; x < held * width; ++x) c.cot_o[x] = 0;
      auto const all = run_case<double>(s.f.of_double, c);
      auto const after = behind_past(s.f.of_double, c, held);
      DOCTEST_CHECK(worst_difference(all.o, held * width, after.o) <= 1e-12);
      DOCTEST_CHECK(std::equal(after.choices.begin(), after.choices.end(),
                               all.choices.begin() + held * c.shape.heads * c.shape.select.top_k));
      auto const& d = all.gradient;
      DOCTEST_CHECK(worst_difference(d[part::k], 0, after.past[0]) <= 1e-12);
      DOCTEST_CHECK(worst_difference(d[part::k], after.past[0].size(), after.gradient[part::k]) <= 1e-12);
      DOCTEST_CHECK(worst_difference(d[part::v], 0, after.past[1]) <= 1e-12);
      DOCTEST_CHECK(worst_difference(d[part::sink], 0, after.gradient[part::sink]) <= 1e-12);
      if (c.constant_gate())
        DOCTEST_CHECK(worst_difference(d[part::g], 0, after.gradient[part::g]) <= 1e-11);
      else if (d[part::g].size() > 0)
        DOCTEST_CHECK(worst_difference(d[part::g], after.past[2].size(), after.gradient[part::g]) <= 1e-12);
      check_stepwise(s.f.reference, c);
    }
}

DOCTEST_TEST_CASE("the k lowest indices win ties, in float too, and k never counts the own chunk") {
  for (auto const& s : selectors_of_several()) {
    auto c = chunked_case(5, 3, {.length = 63, .heads = 2, .key_heads = 1, .key_dim = 5, .value_dim = 3});
    c.keys = attention_case::key_source::one;
    bool const previous = s.spec.forced == forced_chunks::first_and_previous;
    auto const check = [&](std::vector<index_t> const& choices) {
      index_t wrong = 0;
      for (std::size_t i = 0; i < choices.size(); i += 3) {
        index_t const own = index_t(i) / 6 / 5;
        std::vector<index_t> expected;
        if (previous && own > 0) expected.push_back(0);
        if (previous && own > 1) expected.push_back(own - 1);
        for (index_t x = 0; x < own && expected.size() < 3; ++x)
          if (std::find(expected.begin(), expected.end(), x) == expected.end()) expected.push_back(x);
        expected.resize(3, -1);
        wrong += !std::equal(expected.begin(), expected.end(), choices.begin() + index_t(i));
      }
      DOCTEST_CHECK_MESSAGE(wrong == 0, s.name);
    };
    check(run_case<double>(s.f.of_double, c).choices);
    check(run_case<float>(s.f.of_float, c).choices);
    check(run<double>(s.f.reference, c).choices);
  }
}

DOCTEST_TEST_CASE("with k and more chunks to choose from, all are read: dense attention and its gradient") {
  auto const dense = reference_of<selectors::all, selectors::softmax>();
  for (index_t top_k : {3, 7}) {
    auto fewer = chunked_case(6, 1, {.length = 20}), c = chunked_case(6, top_k, {.length = 20});
    fewer.shape.select.window = c.shape.select.window = 5;  // as far back as the own chunk may begin
    auto const expected = outcome_of(dense, fewer);
    for (auto const& s : selectors_of_several()) {
      auto const found = run_case<double>(s.f.of_double, c);
      DOCTEST_CHECK_MESSAGE(greatest_difference(found.o, expected.out.o) <= 1e-13, s.name, " with ", top_k);
      for (auto x : {part::q, part::k, part::v})
        DOCTEST_CHECK_MESSAGE(greatest_difference(found.gradient[x], expected.gradient[x]) <= 1e-12, s.name,
                              " with ", top_k);
      DOCTEST_CHECK(greatest_difference(run_case<double>(s.f.of_double, fewer).o, expected.out.o) > 0.01);
    }
  }
}

DOCTEST_TEST_CASE("several chunks have the same bits for one, two and three threads") {
  index_t i = 0;
  for (auto const& s : selectors_of_several()) {
    auto c = case_of_several(s, 70, i++);
    if (!c.offsets.empty()) c.shape.seq = sequences::packed(c.offsets);
    auto const one = run_case<float>(s.f.of_float, c, 1);
    for (int threads : {2, 3}) {
      auto const more = run_case<float>(s.f.of_float, c, threads);
      DOCTEST_CHECK(same_bits(one.o, more.o));
      DOCTEST_CHECK(one.choices == more.choices);
      for (std::size_t x = 0; x < attention_case::parts; ++x)
        DOCTEST_CHECK_MESSAGE(same_bits(one.gradient[x], more.gradient[x]), s.name, ", input ", x);
    }
  }
}

DOCTEST_TEST_CASE(
    "a NaN key makes those rows NaN that see it or may choose its chunk among several, and no others") {
  for (auto const& s : selectors_of_several()) {
    auto c = chunked_case(8, 2, {.length = 40, .heads = 4, .key_heads = 2});
    c.input[part::k].value[12 * c.shape.key_heads * c.shape.key_dim] = std::numeric_limits<double>::quiet_NaN();
    auto const expected = run<double>(s.f.reference, c);
    auto const found = run_case<double>(s.f.of_double, c);
    index_t spoilt = 0;
    bool same = true;
    for (index_t x = 0; x < found.o.size(); ++x) {
      bool const nan = std::isnan(expected.o[x]);
      spoilt += nan;
      same = same && (nan ? std::isnan(found.o[x]) : std::abs(expected.o[x] - found.o[x]) <= 1e-12);
    }
    DOCTEST_CHECK_MESSAGE(same, s.name);
    DOCTEST_CHECK(spoilt > 0);
    DOCTEST_CHECK(spoilt < found.o.size());
  }
}

DOCTEST_TEST_CASE("a shared choice is one set for the query heads of a key head") {
  auto c = chunked_case(9, 3, {.length = 60, .heads = 4, .key_heads = 2});
  for (auto const& s : selectors_of_several()) {
    auto const differ = [&](bool shared) {
      c.shape.select.shared_choice = shared;
      auto const choices = run_case<double>(s.f.of_double, c).choices;
      index_t count = 0;
      for (std::size_t r = 0; r < choices.size(); r += 12)
        for (std::size_t x = 0; x < 3; ++x)
          count += (choices[r + x] != choices[r + 3 + x]) + (choices[r + 6 + x] != choices[r + 9 + x]);
      return count;
    };
    DOCTEST_CHECK_MESSAGE(differ(true) == 0, s.name);
    DOCTEST_CHECK_MESSAGE((differ(false) > 0) == !s.spec.by_compression, s.name);
  }
}

DOCTEST_TEST_CASE(
    "a router's bias adds the mean of the gate's biases to a chunk's score, and can turn the choice") {
  // Two chunks of two keys with equal keys; the gate forgets between them, so that the later one is worth more.
  auto c = random_attention_case(10, {.length = 5, .heads = 1, .key_heads = 1});
  c.keys = attention_case::key_source::one;
  c.shape.select.chunk = 2;
  add_token_gate(c, 1, 1);
  auto const f = routed_functions_of<own_plus_top1<>>();
  DOCTEST_CHECK(run_case<double>(f.of_double, c).choice.back() == 0);
  c.shape.select.router_bias = true;
  DOCTEST_CHECK(run_case<double>(f.of_double, c).choice.back() == 1);
  DOCTEST_CHECK(run<double>(f.reference, c).choice.back() == 1);
  // Three gates by hand: the mean over keys 0, 1 of G_4 - G_j, and over 2, 3.
  auto& g = c.input[part::g].value;
  auto const score = [&](index_t chunk) {
    double G[5];
    for (index_t j = 0; j < 5; ++j) G[j] = g[j] + (j > 0 ? G[j - 1] : 0);
    return 0.5 * ((G[4] - G[2 * chunk]) + (G[4] - G[2 * chunk + 1]));
  };
  auto const r = routed_functions_of<own_plus_top1<mean_key, gated>>();
  auto const with = run_case<double>(r.of_double, c).o;
  c.shape.select.router_bias = false;
  auto const without = run_case<double>(r.of_double, c).o;
  double const p = 1 / (1 + std::exp(score(0) - score(1)));
  for (index_t x = 0; x < c.shape.value_dim; ++x) {
    // Without the bias both chunks weigh one half, and the first is read.
    DOCTEST_CHECK(std::abs(with[4 * c.shape.value_dim + x]) > 0);
    DOCTEST_CHECK(without[4 * c.shape.value_dim + x] != with[4 * c.shape.value_dim + x]);
  }
  c.shape.select.router_bias = true;
  auto const plain = run_case<double>(f.of_double, c).o;
  for (index_t x = 4 * c.shape.value_dim; x < plain.size(); ++x)
    DOCTEST_CHECK(with[x] == doctest::Approx(p * plain[x]).epsilon(1e-13));
}

DOCTEST_TEST_CASE("the router's bias, with competing prefixes and straight through, agrees with the reference") {
  using selectors::exactly_one;
  auto const prefix = routed_functions_of<exactly_one<mean_key_prefix, gated>>();
  auto const through =
      routed_functions_of<exactly_one<mean_key_prefix, chunk_straight_through, chunk_probability::score>>();
  for (index_t i = 0; i < 12; ++i)
    for (auto const& f : {prefix, through}) {
      auto c = ragged_case(20 + 11 * i, i);
      c.shape.select.router_bias = true;
      if (i % 3 == 0) add_token_gate(c, 2, 5);
      check_against_reference(f, c, 2);
    }
}

DOCTEST_TEST_CASE("a selector refuses the numbers it has no use for, in one sentence") {
  auto c = chunked_case(11, 2);
  DOCTEST_CHECK_THROWS_WITH_AS(run_case<double>(routed_functions_of<own_plus_top1<>>().of_double, c),
                               doctest::Contains("this selector chooses at most one chunk, got 2"), value_error);
  c.shape.select.top_k = 0;
  DOCTEST_CHECK_THROWS_WITH_AS(run_case<double>(selectors_of_several()[0].f.of_double, c),
                               doctest::Contains("top_k (chunks chosen beside the own one) must be at least 1"),
                               value_error);
  c.shape.select.top_k = 1;
  c.shape.select.router_bias = true;
  for (auto const& s : {selectors_of_several()[2], selectors_of_several()[6]})
    DOCTEST_CHECK_THROWS_WITH_AS(run_case<double>(s.f.of_double, c),
                                 doctest::Contains("router_bias is for chunk scores by mean keys"), value_error);
}
