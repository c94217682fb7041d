#pragma once

#include <limits>
#include <span>
#include <string>

#include "law_mixer.hpp"

/// The laws of a mixer, for any mixer: `check_laws<my_mixer>(law_shape<my_mixer>(...))` checks a user's own policy
/// with the library's own suite.
namespace seqmix::testing {

/// Sizes that share heads wherever the mixer can, with odd widths.
template <class M>
mixer_shape law_shape(sequences seq, index_t capacity = 0) {
  mixer_shape s;
  s.seq = seq;
  s.heads = s.query_heads = s.gate_heads = 4;
  s.key_heads = 2;
  s.value_heads = 2;
  if (!mixer_needs<M>::history) s.query_heads = 1, s.gate_heads = 2, s.value_heads = 4;
  if (mixer_needs<M>::history && mixer_needs<M>::write) s.value_heads = 4;
  s.key_dim = mixer_needs<M>::keyed ? 5 : 1;
  s.value_dim = 3;
  s.scale = 0.7;
  s.chunk = 4;
  s.capacity = capacity > 0 ? capacity : seq.longest();
  s.select.window = 5;
  s.select.chunk = 4;
  return s;
}

/// Rows [begin, begin + count) of everything that has rows.
template <class M, class T>
mixer_numbers<T> rows_of(mixer_shape const& s, mixer_numbers<T> const& x, index_t begin, index_t count) {
  index_t const R = s.seq.rows();
  mixer_numbers<T> to;
  each_array(
      [&](std::vector<T>& part, std::vector<T> const& from) {
        index_t const width = R > 0 ? index_t(from.size()) / R : 0;
        if (!x.has_rows(from, !mixer_needs<M>::constant))
          part = from;
        else
          part.assign(from.begin() + begin * width, from.begin() + (begin + count) * width);
      },
      to, x);
  return to;
}
/// Rows of the second behind those of the first.
template <class M, class T>
void append_rows(mixer_numbers<T>& to, mixer_numbers<T> const& x) {
  each_array(
      [&](std::vector<T>& part, std::vector<T> const& from) {
        if (x.has_rows(from, !mixer_needs<M>::constant))
          part.insert(part.end(), from.begin(), from.end());
        else if (!from.empty())
          part = from;
      },
      to, x);
}
/// What has no rows, from the second.
template <class M, class T>
void take_constants(mixer_numbers<T>& to, mixer_numbers<T> const& x) {
  each_array(
      [&](std::vector<T>& part, std::vector<T> const& from) {
        if (!x.has_rows(from, !mixer_needs<M>::constant)) part = from;
      },
      to, x);
}
template <class T>
std::vector<T> rows_of(std::vector<T> const& x, index_t width, index_t begin, index_t count) {
  return {x.begin() + begin * width, x.begin() + (begin + count) * width};
}
inline mixer_shape with_sequences(mixer_shape s, sequences seq) {
  s.seq = seq;
  return s;
}
template <class T = double>
std::vector<T> random_vector(std::size_t n, std::uint64_t seed) {
  random_numbers random(seed);
  std::vector<T> x(n);
  for (auto& e : x) e = T(random.normal());
  return x;
}

/// Changing tokens from t on never changes an output before t, to the bit.
template <class M, class T>
void check_causality(mixer_shape const& s) {
  DOCTEST_CAPTURE(M::name());
  DOCTEST_REQUIRE(s.seq.count() == 1);
  index_t const width = s.heads * s.value_dim, R = s.seq.rows();
  auto const x = random_mixer_numbers<M>(s, 1), other = random_mixer_numbers<M>(s, 2);
  auto const before = mixer_machine<M, T>(s).forward(x.template as<T>());
  // What neither queries nor the own token reach feels a token one output later.
  constexpr bool later =
      !mixer_needs<M>::keyed && M::state_type::spec.read == read_order::exclusive && !mixer_needs<M>::stabilised;
  index_t felt = 0;
  for (index_t t = 0; t < R; t += t < 8 ? 1 : R / 5) {
    auto changed = rows_of<M>(s, x, 0, t);
    append_rows<M>(changed, rows_of<M>(s, other, t, R - t));
    take_constants<M>(changed, x);
    auto const after = mixer_machine<M, T>(s).forward(changed.template as<T>());
    DOCTEST_CHECK_MESSAGE(same_bits(rows_of(before, width, 0, t), rows_of(after, width, 0, t)), "changing token ",
                          t, " changed an earlier output");
    index_t const row = std::min(R - 1, t + later);
    felt += same_bits(rows_of(before, width, row, 1), rows_of(after, width, row, 1)) ? 0 : 1;
  }
  DOCTEST_CHECK_MESSAGE(felt > 1, "tokens have no influence on their own outputs");
}

/// Not even a value or a key that is infinite or NaN reaches an output before its token: a weight of 0 would let it
/// through.
template <class M, class T>
void check_spoilt(mixer_shape const& s, bool keys) {
  DOCTEST_CAPTURE(M::name());
  index_t const width = s.heads * s.value_dim, R = s.seq.rows(),
                row = keys ? s.key_heads * s.key_dim : s.value_heads * s.value_dim;
  auto const x = random_mixer_numbers<M>(s, 1);
  auto const before = mixer_machine<M, T>(s).forward(x.template as<T>());
  for (double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    for (index_t t : {R / 5, R / 2, R - 1}) {
      auto spoilt = x;
      (keys ? spoilt.k : spoilt.v)[std::size_t(t * row)] = bad;
      auto const after = mixer_machine<M, T>(s).forward(spoilt.template as<T>());
      DOCTEST_CHECK_MESSAGE(relative_difference(rows_of(after, width, 0, t), rows_of(before, width, 0, t)) <=
                                64 * double(std::numeric_limits<T>::epsilon()),
                            std::string(keys ? "a key " : "a value "), bad, " of token ", t,
                            " reached an earlier output");
    }
}

/// However sequences are cut into pieces, with the state carried from piece to piece and its derivative handed
/// back, outputs, final state and gradients are those of one pass.
template <class M, class T>
void check_cut(mixer_shape const& whole, std::vector<index_t> const& pieces, double tolerance) {
  DOCTEST_CAPTURE(M::name());
  using memory = mixer_memory<M, T>;
  index_t const N = whole.seq.count(), length = whole.seq.length(0), width = whole.heads * whole.value_dim;
  auto const x = random_mixer_numbers<M>(whole, 3).template as<T>();
  memory final(whole), d_final(whole);
  mixer_machine<M, T> machine(whole);
  auto const o = machine.forward(x, nullptr, &final);
  auto const d_o = random_vector<T>(o.size(), 4);
  d_final.randomise(final, 5);
  auto const d = machine.backward(x, d_o, nullptr, &d_final);

  struct piece {
    index_t begin, count;
    mixer_shape s;
    mixer_numbers<T> x;
    memory before;
    mixer_machine<M, T> machine;
  };
  std::vector<piece> done;
  std::vector<T> joined(o.size());
  memory carried(whole);
  for (index_t begin = 0; index_t count : pieces) {
    auto const s = with_sequences(whole, sequences::batch(N, count));
    piece p{begin, count, s, {}, memory(whole), mixer_machine<M, T>(s)};
    for (index_t n = 0; n < N; ++n) append_rows<M>(p.x, rows_of<M>(whole, x, n * length + begin, count));
    p.before.assign(carried);
    auto const part = p.machine.forward(p.x, &p.before, &carried);
    for (index_t n = 0; n < N; ++n)
      std::copy_n(part.begin() + n * count * width, count * width, joined.begin() + (n * length + begin) * width);
    done.push_back(std::move(p));
    begin += count;
  }
  DOCTEST_CHECK(relative_difference(joined, o) <= tolerance);
  DOCTEST_CHECK(relative_difference(carried.numbers(), final.numbers()) <= tolerance);

  auto joined_d = x.template map<T>([](T const&) { return T(0); });
  memory d_after(whole);
  d_after.assign(d_final);
  for (std::size_t i = done.size(); i-- > 0;) {
    auto& p = done[i];
    std::vector<T> d_rows;
    for (index_t n = 0; n < N; ++n) {
      auto const rows = rows_of(d_o, width, n * length + p.begin, p.count);
      d_rows.insert(d_rows.end(), rows.begin(), rows.end());
    }
    memory d_before(whole);
    d_before.take_lengths(p.before);
    auto const part = p.machine.backward(p.x, d_rows, &p.before, &d_after, &d_before);
    d_after = std::move(d_before);
    auto const join = [&](std::vector<T>& to, std::vector<T> const& from) {
      if (!joined_d.has_rows(to, !mixer_needs<M>::constant)) {
        for (std::size_t e = 0; e < from.size(); ++e) to[e] += from[e];
        return;
      }
      index_t const columns = index_t(to.size()) / (N * length);
      for (index_t n = 0; n < N; ++n)
        std::copy_n(from.begin() + n * p.count * columns, p.count * columns,
                    to.begin() + (n * length + p.begin) * columns);
    };
    each_array(join, joined_d, part);
  }
  DOCTEST_CHECK(relative_difference(joined_d, d) <= tolerance);
}

/// The cuts of seven tokens, one sequence and two.
template <class M, class T = double>
void check_cuts(double tolerance = 1e-12) {
  std::vector<std::vector<index_t>> const cuts{
      {7}, {1, 1, 1, 1, 1, 1, 1}, {3, 4}, {4, 3}, {2, 2, 3}, {1, 6}, {6, 1}, {0, 7}};
  for (index_t batch : {1, 2})
    for (auto const& cut : cuts) {
      DOCTEST_CAPTURE(batch);
      DOCTEST_CAPTURE(cut.size());
      DOCTEST_CAPTURE(cut[0]);
      check_cut<M, T>(law_shape<M>(sequences::batch(batch, 7)), cut, tolerance);
    }
}

/// Sequences packed behind one another, empty ones among them, give to the bit what each gives alone.
template <class M, class T>
void check_packed(std::vector<index_t> const& offsets) {
  DOCTEST_CAPTURE(M::name());
  auto const s = law_shape<M>(sequences::packed(offsets));
  index_t const width = s.heads * s.value_dim;
  auto const x = random_mixer_numbers<M>(s, 6).template as<T>();
  mixer_machine<M, T> machine(s);
  auto const o = machine.forward(x);
  auto const d_o = random_vector<T>(o.size(), 7);
  auto const d = machine.backward(x, d_o);
  for (index_t n = 0; n < s.seq.count(); ++n) {
    DOCTEST_CAPTURE(n);
    index_t const begin = s.seq.begin(n), count = s.seq.length(n);
    auto const part = rows_of<M>(s, x, begin, count);
    mixer_machine<M, T> single(with_sequences(s, sequences::batch(1, count)));
    DOCTEST_CHECK(same_bits(single.forward(part), rows_of(o, width, begin, count)));
    auto d_part = single.backward(part, rows_of(d_o, width, begin, count));
    take_constants<M>(d_part, d);  // one derivative for all sequences together
    DOCTEST_CHECK(same_bits(d_part, rows_of<M>(s, d, begin, count)));
  }
}

/// Exchanging the sequences of a batch exchanges the results, to the bit.
template <class M, class T>
void check_permutation() {
  DOCTEST_CAPTURE(M::name());
  index_t const length = 9;
  auto const s = law_shape<M>(sequences::batch(3, length));
  index_t const width = s.heads * s.value_dim;
  auto const x = random_mixer_numbers<M>(s, 9).template as<T>();
  std::array<index_t, 3> const order{2, 0, 1};
  mixer_numbers<T> shuffled;
  for (index_t n : order) append_rows<M>(shuffled, rows_of<M>(s, x, n * length, length));
  auto const o = mixer_machine<M, T>(s).forward(x), moved = mixer_machine<M, T>(s).forward(shuffled);
  for (index_t n = 0; n < 3; ++n)
    DOCTEST_CHECK(same_bits(rows_of(moved, width, n * length, length),
                            rows_of(o, width, order[std::size_t(n)] * length, length)));
}

/// One, two and three threads give the same bits, forward and backward.
template <class M, class T>
void check_threads(sequences const& seq) {
  DOCTEST_CAPTURE(M::name());
  auto const s = law_shape<M>(seq);
  auto const x = random_mixer_numbers<M>(s, 10).template as<T>();
  std::vector<T> o, state;
  mixer_numbers<T> d;
  for (int threads : {1, 2, 3}) {
    DOCTEST_CAPTURE(threads);
    mixer_machine<M, T> machine(s, threads);
    mixer_memory<M, T> after(s);
    auto const o_now = machine.forward(x, nullptr, &after);
    auto const d_now = machine.backward(x, random_vector<T>(o_now.size(), 11));
    if (threads > 1) {
      DOCTEST_CHECK(same_bits(o, o_now));
      DOCTEST_CHECK(same_bits(state, after.numbers()));
      DOCTEST_CHECK(same_bits(d, d_now));
    }
    o = o_now;
    d = d_now;
    state = after.numbers();
  }
}

/// The number type of the oracle: one direction at a time.
using oracle = dual<double, 1>;

/// Backward against dual numbers through the reference, in random directions over all inputs and the initial state,
/// for a loss on the outputs and the final state; forward against the reference's values on the way.
template <class M>
void check_gradients(mixer_shape const& s, mixer_numbers<double> const& x, int directions = 5,
                     double tolerance = 1e-10) {
  DOCTEST_CAPTURE(M::name());
  index_t const N = s.seq.count();
  random_numbers random(12);
  mixer_memory<M, double> before(s), after(s), d_after(s), d_before(s);
  if constexpr (mixer_needs<M>::history) {
    // The past of every sequence: what a first call left behind.
    auto const first = with_sequences(s, sequences::batch(N, std::min(index_t(3), before.state.capacity())));
    mixer_machine<M, double>(first).forward(random_mixer_numbers<M>(first, 13), nullptr, &before);
  } else {
    before.randomise(before, 17);
  }
  mixer_machine<M, double> machine(s);
  auto const o = machine.forward(x, &before, &after);
  auto const d_o = random_vector(o.size(), 14);
  d_after.randomise(after, 16);
  d_before.take_lengths(before);
  auto const d = machine.backward(x, d_o, &before, &d_after, &d_before);

  for (int direction = 0; direction < directions; ++direction) {
    double got = 0, absolute = 0;
    auto const tangent_of = [&](double value, double slope, double gradient) {
      got += slope * gradient;
      absolute += std::abs(slope * gradient);
      oracle y(value);
      y.slope[0] = slope;
      return y;
    };
    mixer_numbers<oracle> y;
    each_array(
        [&](std::vector<double> const& value, std::vector<double> const& gradient, std::vector<oracle>& to) {
          for (std::size_t i = 0; i < value.size(); ++i)
            to.push_back(tangent_of(value[i], random.normal(), gradient[i]));
        },
        x, d, y);
    mixer_memory<M, oracle> before_dual(s), after_dual(s);
    before_dual.take_lengths(before);
    std::vector<double> value, gradient;
    before.each([&](double& e) { value.push_back(e); });
    d_before.each([&](double& e) { gradient.push_back(e); });
    std::size_t i = 0;
    before_dual.each([&](oracle& e) { e = tangent_of(value[i], random.normal(), gradient[i]), ++i; });

    auto const reference = reference_mixer<M, oracle>(s, y, &before_dual, &after_dual);
    double expected = 0;
    std::vector<double> reference_o, reference_state;
    for (std::size_t r = 0; r < o.size(); ++r) {
      expected += d_o[r] * reference[r].slope[0];
      absolute += std::abs(d_o[r] * reference[r].slope[0]);
      reference_o.push_back(reference[r].value);
    }
    std::vector<double> cotangent;
    d_after.each([&](double& e) { cotangent.push_back(e); });
    auto const state = after_dual.numbers();
    DOCTEST_REQUIRE(state.size() == cotangent.size());
    for (std::size_t r = 0; r < state.size(); ++r) {
      expected += cotangent[r] * state[r].slope[0];
      absolute += std::abs(cotangent[r] * state[r].slope[0]);
      reference_state.push_back(state[r].value);
    }
    DOCTEST_CHECK(relative_difference(o, reference_o) <= 1e-12);
    DOCTEST_CHECK(relative_difference(after.numbers(), reference_state) <= 1e-12);
    DOCTEST_CHECK_MESSAGE(std::abs(got - expected) <= tolerance * absolute, "direction ", direction,
                          ": backward gives ", got, ", the reference ", expected, ", terms ", absolute);
  }
}

/// All laws of one mixer that need no partner.
template <class M>
void check_laws() {
  check_causality<M, double>(law_shape<M>(sequences::batch(1, 9)));
  check_causality<M, float>(law_shape<M>(sequences::batch(1, 150)));
  for (bool keys : {false, mixer_needs<M>::keyed}) {
    check_spoilt<M, double>(law_shape<M>(sequences::batch(1, 80)), keys);
    check_spoilt<M, float>(law_shape<M>(sequences::batch(1, 80)), keys);
  }
  check_cuts<M>();
  check_cut<M, double>(law_shape<M>(sequences::batch(2, 80)), {1, 1, 70, 1, 7}, 1e-12);
  for (auto const& offsets :
       {std::vector<index_t>{0, 2, 2, 5}, {0, 0, 5}, {0, 5, 5}, {0, 0}, {0, 70, 70, 139, 140}}) {
    check_packed<M, double>(offsets);
    check_packed<M, float>(offsets);
  }
  check_permutation<M, double>();
  check_permutation<M, float>();
  constexpr std::array<index_t, 5> packed{0, 3, 3, 40, 91};
  for (auto const& seq :
       {sequences::packed(packed), sequences::batch(1, 40)}) {  // more threads than sequences, too
    check_threads<M, double>(seq);
    check_threads<M, float>(seq);
  }
  std::array<index_t, 6> const offsets{0, 0, 1, 10, 10, 43};
  auto const s = law_shape<M>(sequences::packed(offsets), 40);
  check_gradients<M>(s, random_mixer_numbers<M>(s, 15));
}

}  // namespace seqmix::testing
