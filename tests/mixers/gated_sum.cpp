#include "../support/golden.hpp"
#include "../support/law_selectors.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/native_sparse.hpp>
#include <seqmix/mixers/recurrence.hpp>
#include <seqmix/mixers/visible_tokens.hpp>

// Gated sums of mixers: native sparse attention against the golden vectors, and what any sum promises.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

static_assert(mixer_on<native_sparse<>, device::cpu, float> && mixer_on<native_sparse<>, device::cpu, double>);
static_assert(mixer_type<gated_sum<attention<selectors::window>, attention<>>>);
static_assert(std::is_same_v<native_sparse<>::selector_type,
                             seqmix::select<selectors::top_k_by_compression<>, selectors::softmax>>);

mixer_shape golden_shape(golden_case const& g) {
  mixer_shape s;
  s.seq = sequences::batch(g["q"].extent(0), g["q"].extent(1));
  s.heads = s.query_heads = s.gate_heads = g["q"].extent(2);
  s.key_heads = s.value_heads = g["k"].extent(2);
  s.key_dim = s.value_dim = g["k"].extent(3);
  s.scale = g.number("scale", 0);
  s.select.window = index_t(g.number("window_size", 0));
  s.select.chunk = index_t(g.number("block_size", 0));
  s.select.top_k = index_t(g.number("block_counts", 0)) - 1;
  return s;
}
template <class T>
std::vector<T> numbers(golden_tensor const& t) {
  auto const x = t.converted<T>();
  return {x.begin(), x.end()};
}
/// Three gates [R,H] as one mix [R,H,3].
template <class T>
std::vector<T> interleaved(golden_case const& g, std::string const& prefix) {
  std::vector<T> mix;
  for (index_t i = 0; i < g["g_cmp"].size(); ++i)
    for (auto const* branch : {"g_cmp", "g_slc", "g_swa"}) mix.push_back(T(g[prefix + branch][i]));
  return mix;
}
template <class T>
void check(std::vector<T> const& found, golden_tensor const& expected) {
  DOCTEST_REQUIRE(index_t(found.size()) == expected.size());
  auto const r = compare(found.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}

/// One sequence of `length`, one head for all.
mixer_shape small_shape(index_t length) {
  mixer_shape s = law_shape<attention<>>(sequences::batch(1, length));
  s.select.top_k = 2;
  return s;
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("native sparse attention gives the golden outputs and gradients, those of its gates too",
                           T, float, double) {
  golden_case const g("ops/nsa");
  auto const s = golden_shape(g);
  mixer_numbers<T> x;
  x.q = numbers<T>(g["q"]), x.k = numbers<T>(g["k"]), x.v = numbers<T>(g["v"]), x.mix = interleaved<T>(g, "");
  mixer_machine<native_sparse<>, T> machine(s);
  check(machine.forward(x), g["o"]);
  auto const d = machine.backward(x, numbers<T>(g["cot_o"]));
  check(d.q, g["grad_q"]), check(d.k, g["grad_k"]), check(d.v, g["grad_v"]);
  std::size_t member = 0;
  for (auto const* branch : {"grad_g_cmp", "grad_g_slc", "grad_g_swa"}) {
    std::vector<T> of_member;
    for (std::size_t i = member; i < d.mix.size(); i += 3) of_member.push_back(d.mix[i]);
    check(of_member, g[branch]);
    ++member;
  }
}

DOCTEST_TEST_CASE("forcing no block but the own one is another selection") {
  golden_case const g("ops/nsa");
  auto const s = golden_shape(g);
  mixer_numbers<double> x;
  x.q = numbers<double>(g["q"]), x.k = numbers<double>(g["k"]), x.v = numbers<double>(g["v"]);
  x.mix = interleaved<double>(g, "");
  auto const free = mixer_machine<native_sparse<forced_chunks::none>, double>(s).forward(x);
  index_t const width = s.heads * s.value_dim;
  std::size_t differ = 0;
  for (std::size_t t = 0; t < std::size_t(s.seq.rows()); ++t)
    differ += !std::equal(free.begin() + index_t(t) * width, free.begin() + index_t(t + 1) * width,
                          numbers<double>(g["o"]).begin() + index_t(t) * width,
                          [](double a, double b) { return std::abs(a - b) <= 1e-10; });
  DOCTEST_CHECK(differ == 17);  // of 37 queries, as a separate program counts
}

DOCTEST_TEST_CASE("a gated sum is the weighted sum of its members, and its mix learns each member's output") {
  using wide = attention<>;
  using narrow = attention<selectors::window>;
  using both = gated_sum<wide, narrow>;
  auto const s = with_sequences(small_shape(12), sequences::batch(1, 12));
  auto x = random_mixer_numbers<both>(s, 4);
  auto one = s;
  one.select.top_k = 1;
  auto const a = mixer_machine<wide, double>(one).forward(x), b = mixer_machine<narrow, double>(one).forward(x);
  mixer_machine<both, double> machine(s);
  auto const o = machine.forward(x);
  auto const d_o = random_vector(o.size(), 5);
  auto const d = machine.backward(x, d_o);
  std::size_t const V = std::size_t(s.value_dim);
  for (std::size_t rh = 0; rh < o.size() / V; ++rh) {
    double first = 0, second = 0;
    for (std::size_t i = rh * V; i < (rh + 1) * V; ++i) {
      DOCTEST_CHECK(o[i] == doctest::Approx(x.mix[2 * rh] * a[i] + x.mix[2 * rh + 1] * b[i]).epsilon(1e-14));
      first += d_o[i] * a[i], second += d_o[i] * b[i];
    }
    DOCTEST_CHECK(d.mix[2 * rh] == doctest::Approx(first).epsilon(1e-12));
    DOCTEST_CHECK(d.mix[2 * rh + 1] == doctest::Approx(second).epsilon(1e-12));
  }
}

DOCTEST_TEST_CASE("a member of weight zero leaves the others alone, forward and backward") {
  using both = gated_sum<attention<selectors::window>, attention<selectors::compressed>>;
  auto s = small_shape(12);
  auto x = random_mixer_numbers<both>(s, 6);
  for (std::size_t i = 0; i < x.mix.size(); ++i) x.mix[i] = i % 2 == 0 ? 1.0 : 0.0;
  s.select.top_k = 1;
  mixer_machine<both, double> sum(s);
  mixer_machine<attention<selectors::window>, double> alone(s);
  DOCTEST_CHECK(sum.forward(x) == alone.forward(x));
  auto const d_o = random_vector(std::size_t(s.seq.rows() * s.heads * s.value_dim), 7);
  auto d = sum.backward(x, d_o);
  auto expected = alone.backward(x, d_o);
  DOCTEST_CHECK(d.q == expected.q);
  DOCTEST_CHECK(d.k == expected.k);
  DOCTEST_CHECK(d.v == expected.v);
}

DOCTEST_TEST_CASE("a sum of a recurrence and the attention that equals it, half and half, is either of them") {
  using fast = recurrence<states::outer_product, gates::mamba2>;
  using quadratic = attention<selectors::linear, gates::mamba2>;
  using both = gated_sum<fast, quadratic>;
  auto s = law_shape<quadratic>(sequences::batch(2, 11));
  auto x = random_mixer_numbers<both>(s, 8);
  for (std::size_t i = 0; i < x.mix.size(); ++i) x.mix[i] = i % 2 == 0 ? 0.25 : 0.75;
  mixer_machine<both, double> sum(s);
  mixer_machine<fast, double> one(s);
  auto alone = x;
  alone.mix.clear();
  mixer_memory<both, double> after(s);
  auto const o = sum.forward(x, nullptr, &after);
  DOCTEST_CHECK(relative_difference(o, one.forward(alone)) <= 1e-13);
  auto const d_o = random_vector(o.size(), 9);
  auto d = sum.backward(x, d_o);
  d.mix.clear();
  DOCTEST_CHECK(relative_difference(d, one.backward(alone, d_o)) <= 1e-12);
  DOCTEST_CHECK(std::get<1>(after.state.member).length[1] == 11);
  check_gradients<both>(s, random_mixer_numbers<both>(s, 10));
}

DOCTEST_TEST_CASE("a mix that does not fit is refused by name") {
  using both = gated_sum<attention<>, attention<selectors::window>>;
  auto s = small_shape(5);
  s.select.top_k = 1;
  auto x = random_mixer_numbers<both>(s, 11);
  auto in = input_of<both>(s, x);
  in.mix_rhn.extent[2] = 3;
  std::vector<double> o(std::size_t(5 * s.heads * s.value_dim));
  auto ws = arena::growing();
  DOCTEST_CHECK_THROWS_WITH_AS(both::forward(device::cpu{}, s, in,
                                             view3<double>(o.data(), {5, s.heads, s.value_dim}), nullptr, nullptr,
                                             nullptr, ws),
                               "seqmix: gated sum, mix: expected [5,4,2], got [5,4,3]", shape_error);
}

DOCTEST_TEST_CASE("names and counts: a sum names its members, and draws on what each of them reads") {
  DOCTEST_CHECK(native_sparse<>::name() ==
                "gated_sum[attention[which=compressed,how=softmax,gate=none]+attention[which=top_k_by_compression,"
                "how=softmax,forced=first_and_previous,gate=none]+attention[which=window,how=softmax,gate=none]]");
  selection const s{.window = 2, .chunk = 4, .top_k = 1};
  // Rows 0 .. 7: complete chunks 0 0 0 1 1 1 1 2; own chunk and the first other 1 2 3 4 5 6 7 8; window 1 2 2 ...
  DOCTEST_CHECK(mean_visible_tokens<native_sparse<>>(8, s) == doctest::Approx((6 + 36 + 15) / 8.0));
  selection const three{.chunk = 4, .top_k = 3};
  // The last of 32 rows: 3 chosen chunks and the own one.
  DOCTEST_CHECK(mean_visible_tokens<attention<selectors::own_plus_top_k<>>>(32, three) ==
                doctest::Approx((8 * 10 + 4.0 * (0 + 4 + 8 + 5 * 12)) / 32));
  DOCTEST_CHECK(attention<selectors::own_plus_top_k<>>::name() ==
                "attention[which=own_plus_top_k,how=softmax,score=mean_key,gradient=index_constant,gate=none]");
}
