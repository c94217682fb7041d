#include "../support/laws.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/attention.hpp>

// Small problems with numbers worked out by hand, through attention on the CPU.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using numbers = std::vector<double>;
using selectors::top1_element;

mixer_shape one_head(sequences seq, index_t keys, index_t values) {
  mixer_shape s;
  s.seq = seq;
  s.key_dim = keys;
  s.value_dim = values;
  s.capacity = seq.longest();
  return s;
}
bool near(numbers const& a, numbers const& b, double tolerance = 1e-9) {
  bool good = a.size() == b.size();
  for (std::size_t i = 0; good && i < a.size(); ++i)
    good = std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i]));
  return good;
}

/// Row 0 sees key 0, row 1 nothing, row 2 keys 0 and 1.
struct with_a_blind_row {
  static constexpr std::string_view name = "with_a_blind_row";
  static constexpr which_spec spec{.full_sequence = false};
  static constexpr key_ranges blocks(index_t query, index_t, selection const&) noexcept {
    key_ranges seen;
    if (query != 1) seen.add({0, query == 0 ? 1 : 2});
    return seen;
  }
};

}  // namespace

DOCTEST_TEST_CASE("P-N1: a row that sees nothing is zero and leaves the others alone") {
  auto s = one_head(sequences::batch(1, 3), 2, 2);
  s.scale = 1 / std::sqrt(2.0);
  mixer_numbers<double> const x{{1, 0, 0, 1, 1, 1}, {1, 2, 0, 1, -1, 0}, {1, 10, 2, 20, 3, 30}, {}, {}, {}};
  using M = attention<with_a_blind_row>;
  mixer_machine<M, double> machine(s);
  auto const o = machine.forward(x);
  DOCTEST_CHECK(near(o, {1, 10, 0, 0, 1.1955703175, 11.9557031749}));
  DOCTEST_CHECK(o[2] == 0.0);
  DOCTEST_CHECK(o[3] == 0.0);
  auto const d = machine.backward(x, numbers(6, 1.0));
  DOCTEST_CHECK(d.q[2] == 0.0);
  DOCTEST_CHECK(d.q[3] == 0.0);
  DOCTEST_CHECK(same_bits(d, d));  // no NaN anywhere
  auto const hard =
      mixer_machine<attention<seqmix::select<with_a_blind_row, selectors::top1<>>>, double>(s).forward(x);
  DOCTEST_CHECK(hard == numbers{1, 10, 0, 0, 1, 10});
}

DOCTEST_TEST_CASE_TEMPLATE("P-N4 and P-G6: ties take the lowest index, and the chosen value gets the gradient", T,
                           float, double) {
  using none = selectors::top1<selectors::top1_output::hard, selectors::top1_gradient::none>;
  auto const s = one_head(sequences::batch(1, 4), 1, 1);
  mixer_numbers<T> const x{{1, 1, 1, 1}, {2, 3, 3, 1}, {10, 20, 30, 40}, {}, {}, {}};
  DOCTEST_CHECK(mixer_machine<attention<top1_element<>>, T>(s).forward(x) == std::vector<T>{10, 20, 20, 20});
  mixer_machine<attention<none>, T> machine(s);
  DOCTEST_CHECK(machine.forward(x) == std::vector<T>{10, 20, 20, 20});
  auto const d = machine.backward(x, {1, 1, 1, 1});
  DOCTEST_CHECK(d.v == std::vector<T>{1, 3, 0, 0});
  DOCTEST_CHECK(d.q == std::vector<T>(4, T(0)));
  DOCTEST_CHECK(d.k == std::vector<T>(4, T(0)));
  for (auto const& [keys, value] :
       {std::pair(std::vector<T>{1, 3, 3, 2}, T(20)), std::pair(std::vector<T>{5, 5, 5, 5}, T(10)),
        std::pair(std::vector<T>{-3, -1, -1, -2}, T(20))}) {
    auto row = x;
    row.k = keys;
    DOCTEST_CHECK(machine.forward(row)[3] == value);
  }
}

DOCTEST_TEST_CASE_TEMPLATE("P-N4: equal keys get equal scores wherever they stand, for any number of threads", T,
                           float, double) {
  random_numbers random(71);
  std::vector<T> key, query;
  for (int c = 0; c < 19; ++c) key.push_back(T(random.normal())), query.push_back(T(random.normal()));
  for (index_t length : {1, 63, 64, 65, 1000, 4097}) {
    DOCTEST_CAPTURE(length);
    auto const s = one_head(sequences::batch(1, length), 19, 1);
    mixer_numbers<T> x;
    for (index_t t = 0; t < length; ++t) {
      x.q.insert(x.q.end(), query.begin(), query.end());
      x.k.insert(x.k.end(), key.begin(), key.end());
      x.v.push_back(T(t));
    }
    for (int threads : {1, 3})
      DOCTEST_CHECK(mixer_machine<attention<top1_element<>>, T>(s, threads).forward(x, nullptr, nullptr, false) ==
                    std::vector<T>(std::size_t(length), T(0)));
  }
}

DOCTEST_TEST_CASE("P-S3: a window of three keys counts the query itself") {
  using M = attention<selectors::window>;
  auto s = one_head(sequences::batch(1, 5), 1, 1);
  mixer_numbers<double> const x{numbers(5, 0.0), numbers(5, 1.0), {1, 2, 3, 4, 5}, {}, {}, {}};
  s.select.window = 3;
  DOCTEST_CHECK(mixer_machine<M, double>(s).forward(x) == numbers{1, 1.5, 2, 3, 4});
  s.select.window = 1;
  DOCTEST_CHECK(mixer_machine<M, double>(s).forward(x) == numbers{1, 2, 3, 4, 5});
  auto const causal = mixer_machine<attention<>, double>(s).forward(x);
  for (index_t window : {5, 6, 1'000'000'000}) {
    s.select.window = window;
    DOCTEST_CHECK(mixer_machine<M, double>(s).forward(x) == causal);
  }
  for (index_t window : {0, -1}) {
    s.select.window = window;
    s.capacity = 0;
    DOCTEST_CHECK_THROWS_AS((mixer_machine<M, double>(s).forward(x)), value_error);
  }
}

DOCTEST_TEST_CASE("P-C5: decoding goes on rightly when the window's cache is full") {
  using M = attention<selectors::window>;
  numbers const tokens{0, 1, 2, 3, 4, 5, 6};
  for (auto const& [window, expected] : {std::pair(index_t(3), numbers{0, 0.7310585786, 1.5752103826, 2.5752103826,
                                                                       3.5752103826, 4.5752103826, 5.5752103826}),
                                         std::pair(index_t(4), numbers{0, .7310585786, 1.5752103826, 2.4926527346,
                                                                       3.4926527346, 4.4926527346, 5.4926527346})})
    for (index_t prompt = 1; prompt <= 7; ++prompt) {
      auto s = one_head(sequences::batch(1, 7), 1, 1);
      s.select.window = window;
      mixer_memory<M, double> carried(s);
      numbers o;
      for (index_t begin = 0, count = prompt; begin < 7; begin += count, count = 1) {
        numbers const part(tokens.begin() + begin, tokens.begin() + begin + count);
        auto const y = mixer_machine<M, double>(with_sequences(s, sequences::batch(1, count)))
                           .forward({numbers(part.size(), 1.0), part, part, {}, {}, {}}, &carried, &carried);
        o.insert(o.end(), y.begin(), y.end());
        DOCTEST_CHECK(carried.state.length[0] == std::min(begin + count, window - 1));
      }
      DOCTEST_CHECK(near(o, expected));
    }
}

DOCTEST_TEST_CASE("P-S5: a cache counts what it stores") {
  auto s = one_head(sequences::batch(3, 5), 4, 6);
  s.heads = s.query_heads = 4;
  s.key_heads = s.value_heads = s.gate_heads = 2;
  s.capacity = 7;
  DOCTEST_CHECK(attention<>::state<double>::elements(s) == 3 * 7 * (2 * 4 + 2 * 6));
  s.select.window = 4;
  DOCTEST_CHECK(attention<selectors::window>::state<double>::elements(s) == 3 * 3 * (2 * 4 + 2 * 6));
  DOCTEST_CHECK(attention<selectors::softmax, gates::mamba2>::state<double>::elements(s) ==
                3 * 7 * (2 * 4 + 2 * 6 + 2));
}

DOCTEST_TEST_CASE("a cache that is too small is refused by name, with both sizes") {
  auto s = one_head(sequences::batch(1, 5), 1, 1);
  s.capacity = 4;
  mixer_memory<attention<>, double> carried(s);
  auto const x = random_mixer_numbers<attention<>>(s, 72);
  DOCTEST_CHECK_THROWS_WITH_AS((mixer_machine<attention<>, double>(s).forward(x, nullptr, &carried)),
                               doctest::Contains("needs room for 5 tokens, the state holds 4"), shape_error);
}

DOCTEST_TEST_CASE_TEMPLATE("scores near and beyond the range of exp leave softmax finite, forward and backward", T,
                           float, double) {
  for (double size : {1e3, 1e6}) {
    auto const s = one_head(sequences::batch(1, 70), 3, 2);
    auto x = random_mixer_numbers<attention<>>(s, 73);
    for (auto& e : x.q) e *= size;
    auto const x_here = x.as<T>();
    mixer_machine<attention<>, T> machine(s);
    auto const o = machine.forward(x_here);
    DOCTEST_CHECK(same_bits(o, o));
    auto const d = machine.backward(x_here, std::vector<T>(o.size(), T(1)));
    DOCTEST_CHECK(same_bits(d, d));
  }
}

DOCTEST_TEST_CASE_TEMPLATE("a NaN among the visible scores makes its rows NaN and no other", M, attention<>,
                           attention<top1_element<>>) {
  auto const s = one_head(sequences::batch(1, 70), 3, 2);
  auto x = random_mixer_numbers<M>(s, 74);
  auto const clean = mixer_machine<M, double>(s).forward(x);
  x.k[66 * 3] = std::numeric_limits<double>::quiet_NaN();
  auto const o = mixer_machine<M, double>(s).forward(x);
  for (std::size_t i = 0; i < o.size(); ++i) DOCTEST_CHECK((i < 66 * 2 ? o[i] == clean[i] : o[i] != o[i]));
}
