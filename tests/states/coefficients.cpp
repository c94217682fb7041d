#include <array>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../support/random_numbers.hpp"
#include <seqmix/states/delta_rule.hpp>
#include <seqmix/states/diagonal_plus_low_rank.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/exclusive.hpp>
#include <seqmix/states/outer_product.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using numbers = std::vector<double>;

constexpr index_t keys = 21;  // more than one vector and a tail

/// All that a token offers, as one array: key, factor, a, b, then write and beta.
template <class T>
struct offered {
  std::vector<T> x = std::vector<T>(std::size_t(4 * keys + 2), T(0));
  T* part(index_t i) { return x.data() + i * keys; }
  state_token<T> token() { return {part(0), part(1), keys, x[4 * keys], x[4 * keys + 1], part(2), part(3)}; }
};

/// pullback against dual numbers through the coefficients, in random directions.
template <class State>
void check_pullback() {
  DOCTEST_CAPTURE(std::string(State::name));
  random_numbers random(5);
  auto const draw = [&](std::vector<double>& x) {
    for (auto& e : x) e = random.normal();
  };
  offered<double> at, gradient;
  draw(at.x);
  numbers da(keys), db(keys), dw(keys);
  draw(da), draw(db), draw(dw);
  // What is there already is added to.
  double const begun = 0.25;
  for (auto& e : gradient.x) e = begun;
  state_token_gradient<double> out{gradient.part(0), gradient.part(1), begun, begun,
                                   gradient.part(2), gradient.part(3)};
  State::template pullback<double>(at.token(), state_update<double const>{da.data(), db.data(), dw.data()}, out);
  gradient.x[4 * keys] = out.write, gradient.x[4 * keys + 1] = out.beta;
  for (int direction = 0; direction < 5; ++direction) {
    using number = dual<double, 1>;
    offered<number> y;
    double found = 0, expected = 0;
    for (std::size_t i = 0; i < y.x.size(); ++i) {
      y.x[i] = number(at.x[i]);
      y.x[i].slope[0] = random.normal();
      found += (gradient.x[i] - begun) * y.x[i].slope[0];
    }
    std::vector<number> a(keys, number(0)), b(a), w(a);
    State::template coefficients<number>(y.token(), state_update<number>{a.data(), b.data(), w.data()});
    for (std::size_t i = 0; i < std::size_t(keys); ++i)
      expected += da[i] * a[i].slope[0] + db[i] * b[i].slope[0] + dw[i] * w[i].slope[0];
    DOCTEST_CHECK(std::abs(found - expected) <= 1e-12 * (1 + std::abs(expected)));
  }
}

}  // namespace

DOCTEST_TEST_CASE("every state's pullback is the derivative of its coefficients") {
  check_pullback<states::outer_product>();
  check_pullback<states::delta_rule>();
  check_pullback<states::diagonal_plus_low_rank>();
  check_pullback<states::elementwise>();
  check_pullback<states::exclusive<states::diagonal_plus_low_rank>>();
}

DOCTEST_TEST_CASE("the delta rule's coefficients are a = -e^g k and w = beta k") {
  numbers const key{1, -2}, factor{0.5, 0.25};
  numbers a(2), b(2), w(2);
  states::delta_rule::coefficients<double>({key.data(), factor.data(), 2, 1.0, 0.75},
                                           {a.data(), b.data(), w.data()});
  DOCTEST_CHECK(a == numbers{-0.5, 0.5});
  DOCTEST_CHECK(w == numbers{0.75, -1.5});
}

DOCTEST_TEST_CASE("an exclusive state is the same state with another read and a name of its own") {
  using plain = states::delta_rule;
  using read_before = states::exclusive<plain>;
  DOCTEST_CHECK(read_before::name == "exclusive_delta_rule");
  DOCTEST_CHECK(read_before::spec.read == read_order::exclusive);
  DOCTEST_CHECK(plain::spec.read == read_order::inclusive);
  DOCTEST_CHECK(read_before::spec.low_rank);
  DOCTEST_CHECK(read_before::spec.reads_beta);
  DOCTEST_CHECK(read_before::spec.shares_write);
  static_assert(state<read_before>);
}
