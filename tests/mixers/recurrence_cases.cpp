#include "../support/law_delta_rule.hpp"
#include "../support/law_recurrence.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/mixers/attention.hpp>

// Small problems with numbers worked out by hand, through every form a recurrence has.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::outer_product;
using numbers = std::vector<double>;

template <class Gate>
using chunkwise = recurrence_in_form<recurrence_form::chunkwise, outer_product, Gate>;
template <class Gate>
using sequential = recurrence_in_form<recurrence_form::sequential, outer_product, Gate>;
using token_gate = given_decays<axis::head, false>;
using channel_gate = given_decays<axis::head_key, false>;

mixer_shape one_head(sequences seq, index_t keys, index_t values, index_t chunk = 32) {
  mixer_shape s;
  s.seq = seq;
  s.key_dim = keys;
  s.value_dim = values;
  s.chunk = chunk;
  s.capacity = seq.longest();
  return s;
}
bool near(numbers const& a, numbers const& b, double tolerance = 1e-9) {
  bool good = a.size() == b.size();
  for (std::size_t i = 0; good && i < a.size(); ++i)
    good = std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i]));
  return good;
}
numbers as_numbers(std::vector<float> const& x) { return {x.begin(), x.end()}; }

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("P-N2: a tiny decay in a chunk leaves a gated recurrence finite and right, in float", M,
                           chunkwise<channel_gate>, sequential<channel_gate>,
                           recurrence<outer_product, channel_gate>) {
  mixer_numbers<float> const x{std::vector<float>(8, 1),
                               std::vector<float>(8, 1),
                               {1, 2, 3, 4},
                               {-30, -0.1f, -30, -0.2f, -30, -0.3f, -30, -0.4f},
                               {},
                               {}};
  for (index_t chunk : {1, 2, 4, 64}) {
    auto const s = one_head(sequences::batch(1, 4), 2, 1, chunk);
    mixer_machine<M, float> machine(s);
    mixer_memory<M, float> after(s);
    DOCTEST_CHECK(near(as_numbers(machine.forward(x, nullptr, &after)),
                       {2, 4.8187307531, 8.0881671011, 11.4107004054}, 1e-6));
    DOCTEST_CHECK(near(as_numbers(after.numbers()), {4, 7.4107004054}, 1e-6));
    auto const d = machine.backward(x, {1, 1, 1, 1});
    DOCTEST_CHECK(near(as_numbers(d.v), {3.8318310725, 3.2374035245, 2.6703200460, 2}, 1e-6));
    numbers const g = as_numbers(d.g);
    DOCTEST_CHECK(near({g[1], g[3], g[5], g[7]}, {0, 1.8318310725, 3.4879073684, 3.4107004054}, 1e-6));
    DOCTEST_CHECK(std::max({std::abs(g[0]), std::abs(g[2]), std::abs(g[4]), std::abs(g[6])}) <= 1e-12);
  }
}

DOCTEST_TEST_CASE_TEMPLATE("P-C6: retention gives the same numbers in its parallel, chunked and recurrent form", M,
                           chunkwise<gates::constant>, sequential<gates::constant>,
                           attention<selectors::linear, gates::constant>, sequential<token_gate>,
                           chunkwise<token_gate>) {
  for (index_t chunk : {1, 2, 3, 5}) {
    auto const s = one_head(sequences::batch(1, 5), 1, 1, chunk);
    for (double gamma : {0.5, 0.9375}) {
      mixer_numbers<double> x{{1, -1, 2, .5, 1}, {1, 2, -1, 1, .5}, {1, 1, 2, -2, 4}, {}, {}, {}};
      x.g.assign(mixer_needs<M>::constant ? 1 : 5, std::log(gamma));
      auto const o = mixer_machine<M, double>(s).forward(x);
      DOCTEST_CHECK(near(o, gamma == 0.5 ? numbers{1, -2.5, -1.5, -1.1875, 0.8125}
                                         : numbers{1, -2.9375, 1.5078125, -0.6466064453, 0.7876129150}));
    }
  }
}

DOCTEST_TEST_CASE_TEMPLATE("P-G3: the scale is in forward and backward", M, chunkwise<gates::none>,
                           sequential<gates::none>, attention<selectors::linear>,
                           recurrence_in_form<recurrence_form::chunkwise_per_channel, outer_product, gates::none>) {
  auto s = one_head(sequences::batch(1, 2), 2, 2);
  s.scale = 0.5;
  mixer_numbers<double> const x{{1, 2, 3, -1}, {1, 0, 2, 1}, {1, 2, -1, 3}, {}, {}, {}};
  mixer_machine<M, double> machine(s);
  DOCTEST_CHECK(machine.forward(x) == numbers{.5, 1, -1, 10.5});
  auto const d = machine.backward(x, {1, 1, 1, 1});
  DOCTEST_CHECK(d.q == numbers{1.5, 0, 3.5, 1});
  DOCTEST_CHECK(d.k == numbers{6, 1.5, 3, -1});
  DOCTEST_CHECK(d.v == numbers{2, 2, 2.5, 2.5});
}

DOCTEST_TEST_CASE_TEMPLATE("P-G2: the delta rule's beta has the right gradient", M,
                           recurrence<states::delta_rule, gates::none>,
                           recurrence_in_form<recurrence_form::sequential, states::delta_rule, gates::none>,
                           recurrence<testing::delta_rule, gates::none>) {
  auto const s = one_head(sequences::batch(1, 2), 2, 1);
  mixer_numbers<double> const x{{1, 1, 1, -1}, {1, 0, .6, .8}, {2, 1}, {}, {}, {.5, .25}};
  mixer_machine<M, double> machine(s);
  mixer_memory<M, double> after(s);
  DOCTEST_CHECK(near(machine.forward(x, nullptr, &after), {1, 0.98}, 1e-14));
  DOCTEST_CHECK(near(after.numbers(), {1.06, 0.08}, 1e-14));
  auto const d = machine.backward(x, {1, 1});
  DOCTEST_CHECK(near(d.beta, {4.06, -0.08}, 1e-14));
  DOCTEST_CHECK(near(d.k, {2.03, 0.04, 0.15, -0.1}, 1e-14));
  DOCTEST_CHECK(near(d.v, {1.015, -0.05}, 1e-14));
  DOCTEST_CHECK(near(d.q, {1, 0, 1.06, 0.08}, 1e-14));
}

DOCTEST_TEST_CASE_TEMPLATE("P-C2: the gated delta rule does not depend on how its sequence is cut", M,
                           recurrence<states::delta_rule, token_gate>,
                           recurrence_in_form<recurrence_form::sequential, states::delta_rule, token_gate>,
                           recurrence<testing::delta_rule, token_gate>) {
  auto s = one_head(sequences::batch(1, 5), 2, 2);
  mixer_numbers<double> x{{1, 0, 0, 1, .6, .8, .8, .6, 0, 1},
                          {.6, .8, .8, -.6, 1, 0, 0, 1, .6, .8},
                          {1, 2, 3, -1, 0, 1, 2, 2, -1, .5},
                          {1, .9, .5, .8, 1},
                          {},
                          {1, .5, .5, 1, .25}};
  for (auto& g : x.g) g = std::log(g);
  numbers const expected{.6, 1.2, -.18, 1.74, .189, 1.098, 1.4784, 1.6288, 1.43824, 1.71568};
  numbers const S{-0.07332, 0.32276, 1.43824, 1.71568};  // K x V
  for (index_t chunk : {1, 2, 3, 4, 5, 8, 64})
    for (auto const& cut : std::vector<std::vector<index_t>>{{5}, {4, 1}, {1, 1, 1, 1, 1}}) {
      s.chunk = chunk;
      mixer_memory<M, double> carried(s);
      numbers o;
      index_t begin = 0;
      for (index_t count : cut) {
        auto const part = mixer_machine<M, double>(with_sequences(s, sequences::batch(1, count)))
                              .forward(rows_of<M>(s, x, begin, count), &carried, &carried);
        o.insert(o.end(), part.begin(), part.end());
        begin += count;
      }
      DOCTEST_CHECK(near(o, expected, 1e-12));
      DOCTEST_CHECK(near(carried.numbers(), S, 1e-12));
    }
}

DOCTEST_TEST_CASE(
    "the laws hold for a delta rule written by a user, with decays per head and per channel (P-C3, P-S2)") {
  check_laws<recurrence<testing::delta_rule, token_gate>>();
  check_laws<recurrence<testing::delta_rule, channel_gate>>();
}

DOCTEST_TEST_CASE_TEMPLATE("P-G1: a scalar recurrence in both directions, any chunk, any length", M,
                           chunkwise<token_gate>, sequential<token_gate>) {
  // h_t = a_t h_{t-1} + b_t with a in (0, 1]: decays are exponentials, so the case's negative a stays outside.
  for (index_t length : {1, 2, 3, 31, 32, 33, 1023, 1025})
    for (index_t chunk : {1, 7, 32, 64}) {
      auto const s = one_head(sequences::batch(1, length), 1, 1, chunk);
      random_numbers random(51);
      mixer_numbers<double> x;
      for (index_t t = 0; t < length; ++t) {
        x.q.push_back(1), x.k.push_back(1), x.v.push_back(random.normal());
        x.g.push_back(std::log(random.uniform(0.2, 1.0)));
      }
      numbers h, db(std::size_t(length), 0.0), dg(db);
      double state = 0.5, back = 0;
      for (std::size_t t = 0; t < x.v.size(); ++t) h.push_back(state = std::exp(x.g[t]) * state + x.v[t]);
      for (std::size_t t = x.v.size(); t-- > 0;) {
        back += 1;  // d loss / d h_t for the loss sum of h
        db[t] = back;
        dg[t] = back * std::exp(x.g[t]) * (t > 0 ? h[t - 1] : 0.5);
        back *= std::exp(x.g[t]);
      }
      mixer_machine<M, double> machine(s);
      mixer_memory<M, double> before(s), d_before(s);
      before.each([](double& e) { e = 0.5; });
      DOCTEST_CHECK(relative_difference(machine.forward(x, &before), h) <= 1e-13);
      auto const d = machine.backward(x, numbers(h.size(), 1.0), &before, nullptr, &d_before);
      DOCTEST_CHECK(relative_difference(d.v, db) <= 1e-13);
      DOCTEST_CHECK(relative_difference(d.g, dg) <= 1e-12);
      DOCTEST_CHECK(relative_difference(d_before.numbers(), numbers{back}) <= 1e-13);
    }
}

DOCTEST_TEST_CASE_TEMPLATE("P-S2: an empty sequence hands its state and its derivative through untouched", M,
                           chunkwise<gates::none>, sequential<gates::none>) {
  std::array<index_t, 4> const offsets{0, 2, 2, 5};
  auto const s = one_head(sequences::packed(offsets), 1, 1);
  mixer_numbers<double> const x{numbers(5, 1.0), numbers(5, 1.0), {1, 2, 3, 4, 5}, {}, {}, {}};
  mixer_machine<M, double> machine(s);
  mixer_memory<M, double> before(s), after(s), d_after(s), d_before(s);
  DOCTEST_CHECK(machine.forward(x, nullptr, &after) == numbers{1, 3, 3, 7, 12});
  DOCTEST_CHECK(after.numbers() == numbers{3, 0, 12});
  before.state.S_nhkv(1, 0, 0, 0) = 0.7;
  d_after.state.S_nhkv(1, 0, 0, 0) = 0.3;
  machine.forward(x, &before, &after);
  DOCTEST_CHECK(after.numbers() == numbers{3, 0.7, 12});
  machine.backward(x, numbers(5, 0.0), &before, &d_after, &d_before);
  DOCTEST_CHECK(d_before.numbers() == numbers{0, 0.3, 0});

  std::array<index_t, 2> const nothing{0, 0};
  auto const empty = one_head(sequences::packed(nothing), 1, 1);
  mixer_memory<M, double> kept(empty);
  kept.state.S_nhkv(0, 0, 0, 0) = 4;
  mixer_machine<M, double>(empty).forward({}, &kept, &kept);
  DOCTEST_CHECK(kept.numbers() == numbers{4});
}

DOCTEST_TEST_CASE("P-S4: any size gives the numbers of the plain recurrence") {
  using M = chunkwise<given_decays<axis::head, true>>;
  using P = sequential<given_decays<axis::head, true>>;
  for (index_t keys : {1, 5, 257})
    for (index_t heads : {1, 3})
      for (index_t length : {1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64, 65})
        for (index_t chunk : {1, 3, 5, 64}) {
          if (keys == 257 && length > 9 && length != 65) continue;
          DOCTEST_CAPTURE(keys);
          DOCTEST_CAPTURE(length);
          DOCTEST_CAPTURE(chunk);
          auto s = one_head(sequences::batch(1 + length % 3, length), keys, 3, chunk);
          s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = heads;
          auto const x = random_mixer_numbers<M>(s, 61);
          auto const plain = reference_mixer<P, double>(s, x);
          DOCTEST_CHECK(relative_difference(mixer_machine<M, double>(s).forward(x), plain) <= 1e-12);
          DOCTEST_CHECK(relative_difference(mixer_machine<P, double>(s).forward(x), plain) <= 1e-12);
        }
}

DOCTEST_TEST_CASE_TEMPLATE(
    "P-S4: any size gives the numbers of the plain recurrence where states erase", M,
    recurrence_in_form<recurrence_form::chunkwise, states::delta_rule, token_gate>,
    recurrence_in_form<recurrence_form::chunkwise, states::diagonal_plus_low_rank, channel_gate>) {
  for (index_t keys : {1, 5, 33})
    for (index_t values : {3, 17})
      for (index_t length : {1, 7, 8, 9, 17, 65})
        for (index_t chunk : {3, 16, 64}) {
          DOCTEST_CAPTURE(keys);
          DOCTEST_CAPTURE(values);
          DOCTEST_CAPTURE(length);
          DOCTEST_CAPTURE(chunk);
          auto s = one_head(sequences::batch(1 + length % 3, length), keys, values, chunk);
          s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = 1 + length % 2;
          auto const x = random_mixer_numbers<M>(s, 62);
          DOCTEST_CHECK(relative_difference(mixer_machine<M, double>(s).forward(x),
                                            reference_mixer<M, double>(s, x)) <= 1e-12);
        }
}

DOCTEST_TEST_CASE("P-S5: a state holds sequences x heads x K x V numbers, whatever the length") {
  using M = recurrence<outer_product, gates::none>;
  for (index_t length : {1, 2, 5, 500}) {
    auto s = one_head(sequences::batch(2, length), 3, 4);
    s.heads = 2;
    DOCTEST_CHECK(M::state<double>::elements(s) == 2 * 2 * 3 * 4);
    mixer_memory<M, double> memory(s);
    DOCTEST_CHECK(index_t(memory.numbers().size()) == M::state<double>::elements(s));
  }
}

DOCTEST_TEST_CASE("P-G3: an exclusive read has the scale too, and sees what was there before its token") {
  using M = recurrence<states::exclusive<outer_product>, gates::none>;
  auto s = one_head(sequences::batch(1, 2), 2, 2);
  s.scale = 0.5;
  mixer_numbers<double> const x{{1, 2, 3, -1}, {1, 0, 2, 1}, {1, 2, -1, 3}, {}, {}, {}};
  mixer_machine<M, double> machine(s);
  DOCTEST_CHECK(machine.forward(x) == numbers{0, 0, 1.5, 3});
  auto const d = machine.backward(x, {1, 1, 1, 1});
  DOCTEST_CHECK(d.q == numbers{0, 0, 1.5, 0});
  DOCTEST_CHECK(d.k == numbers{4.5, -1.5, 0, 0});
  DOCTEST_CHECK(d.v == numbers{1.5, 1.5, 0, 0});
}

DOCTEST_TEST_CASE("decays that are steps times rates: the bound acts on the product and stops its derivative") {
  using M = recurrence<states::delta_rule, factored_decays>;
  auto const s = one_head(sequences::batch(1, 2), 2, 1);
  // S = [1, 1] after the first token, then decays e^-0.5 and e^-bound; the second token writes nothing.
  mixer_numbers<double> x{{1, 1, 1, 1}, {1, 1, 0, 0}, {1, 0}, {0, -0.5}, {1, 1}, {1, 1}};
  x.rate = {1, 1e6};
  mixer_machine<M, double> machine(s);
  mixer_memory<M, double> after(s);
  double const left = std::exp(-0.5);
  DOCTEST_CHECK(near(machine.forward(x, nullptr, &after), {2, left}));
  DOCTEST_CHECK(near(after.numbers(), {left, 0}));
  auto const d = machine.backward(x, {0, 1});
  DOCTEST_CHECK(near(d.g, {0, left}));
  DOCTEST_CHECK(near(d.rate, {-0.5 * left, 0}));
}

DOCTEST_TEST_CASE("P-S6, P-U2: a recurrence refuses what its state or its form cannot read, in one sentence") {
  using doctest::Contains;
  auto const s = one_head(sequences::batch(1, 3), 2, 2);
  auto const refuse = [&]<class M>(std::type_identity<M>, auto const& change, char const* text) {
    auto const x = random_mixer_numbers<M>(s, 71);
    auto in = input_of<M>(s, x);
    change(in);
    std::vector<double> o(6);
    auto ws = arena::growing();
    typename M::template saved<double> const* const unsaved = nullptr;
    DOCTEST_CHECK_THROWS_WITH_AS(
        M::forward(device::cpu{}, s, in, view3<double>(o.data(), {3, 1, 2}), nullptr, nullptr, unsaved, ws),
        Contains(text), shape_error);
  };
  auto const nothing = [](auto&) {};
  refuse(
      std::type_identity<
          recurrence_in_form<recurrence_form::chunkwise_per_channel, states::delta_rule, token_gate>>{},
      [](auto& in) {
        in.rate_hk = {in.k_rhk.data, {1, 3}};
      },
      "recurrence decay rate: expected [1,2], got [1,3]");
  refuse(
      std::type_identity<recurrence<states::diagonal_plus_low_rank, token_gate>>{}, [](auto& in) { in.b_rhk = {}; },
      "recurrence erasing vector b: expected [3,1,2], got [0,0,0]");
  refuse(
      std::type_identity<recurrence<states::delta_rule, token_gate>>{}, [](auto& in) { in.g_rhk = in.k_rhk; },
      "recurrence log-decay g: expected one per head, got one per key channel; take the form "
      "chunkwise_per_channel");
  refuse(std::type_identity<recurrence<states::elementwise, token_gate>>{}, nothing,
         "recurrence: an elementwise state has key_dim 1, got 2");
}
