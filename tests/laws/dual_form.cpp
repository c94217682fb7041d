#include "../support/law_recurrence.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/gates/rwkv5.hpp>
#include <seqmix/mixers/attention.hpp>

// history x gate x linear = outer_product x gate: the quadratic form and the recurrence are the same function.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

mixer_shape plain_shape(sequences seq) {
  mixer_shape s;
  s.seq = seq;
  s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = 3;
  s.key_dim = 5;
  s.value_dim = 4;
  s.scale = 0.7;
  s.chunk = 6;
  s.capacity = s.key_dim + seq.longest();
  return s;
}

/// One problem through both forms, with an initial state: for the history key_dim tokens of unit keys whose values
/// are the rows of the state.
template <class Gate>
struct both_forms {
  using quadratic = attention<selectors::linear, Gate>;
  using bounded = recurrence<states::outer_product, Gate>;
  mixer_shape s;
  mixer_numbers<double> x;
  mixer_memory<bounded, double> S;
  mixer_memory<quadratic, double> past;
  mixer_machine<quadratic, double> history;
  mixer_machine<bounded, double> recurrent;

  both_forms(mixer_shape const& shape, mixer_numbers<double> numbers, bool with_state)
      : s(shape), x(std::move(numbers)), S(s), past(s), history(s), recurrent(s) {
    if (!with_state) return;
    S.randomise(S, 41);
    auto const& p = past.state;
    for (index_t n = 0; n < s.seq.count(); ++n) {
      p.length[n] = s.key_dim;
      for (index_t j = 0; j < s.key_dim; ++j)
        for (index_t h = 0; h < s.heads; ++h) {
          for (index_t c = 0; c < s.key_dim; ++c) p.k_nlhk(n, j, h, c) = j == c ? 1.0 : 0.0;
          for (index_t c = 0; c < s.value_dim; ++c)
            p.v_nlhv(n, j, h, c) = decayed(n, j, h) * S.state.S_nhkv(n, h, j, c);
          for (index_t c = 0; c < p.g_nlhk.extent[3]; ++c) p.g_nlhk(n, j, h, c) = 0.0;
        }
    }
  }
  /// A constant gate decays past tokens too: row j, of key channel j, stands key_dim - 1 - j tokens before the
  /// state.
  double decayed(index_t, index_t j, index_t h) const {
    index_t const channels = mixer_needs<bounded>::gate_channels(s), at = h * channels + (channels > 1 ? j : 0);
    return mixer_needs<bounded>::constant ? std::exp(-x.g[std::size_t(at)] * double(s.key_dim - 1 - j)) : 1.0;
  }
};

template <class Gate>
void check_dual(sequences seq, bool with_state) {
  DOCTEST_CAPTURE(Gate::name);
  auto const s = plain_shape(seq);
  using forms = both_forms<Gate>;
  forms f(s, random_mixer_numbers<typename forms::bounded>(s, 42), with_state);
  auto const o = f.recurrent.forward(f.x, &f.S), quadratic = f.history.forward(f.x, &f.past);
  DOCTEST_CHECK(relative_difference(quadratic, o) <= 1e-12);
  auto const d_o = random_vector(o.size(), 43);
  mixer_memory<typename forms::bounded, double> dS(s);
  mixer_memory<typename forms::quadratic, double> d_past(s);
  d_past.take_lengths(f.past);
  auto d = f.recurrent.backward(f.x, d_o, &f.S, nullptr, &dS);
  auto const d_quadratic = f.history.backward(f.x, d_o, &f.past, nullptr, &d_past);
  if (mixer_needs<typename forms::bounded>::constant && with_state)
    d.g = d_quadratic.g;  // the past's values depend on it
  DOCTEST_CHECK(relative_difference(d_quadratic, d) <= 1e-12);
  if (!with_state) return;
  std::vector<double> rows;
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h)
      for (index_t j = 0; j < s.key_dim; ++j)
        for (index_t c = 0; c < s.value_dim; ++c)
          rows.push_back(f.decayed(n, j, h) * d_past.state.v_nlhv(n, j, h, c));
  DOCTEST_CHECK(relative_difference(rows, dS.numbers()) <= 1e-12);
}

}  // namespace

DOCTEST_TEST_CASE(
    "attention with linear weights equals the recurrence, forward and backward, initial state included") {
  std::array<index_t, 5> const offsets{0, 0, 5, 6, 29};
  for (auto seq : {sequences::batch(2, 7), sequences::packed(offsets), sequences::batch(1, 90)})
    for (bool with_state : {false, true}) {
      check_dual<gates::none>(seq, with_state);
      check_dual<gates::constant>(seq, with_state);
      check_dual<gates::mamba2>(seq, with_state);
      check_dual<given_decays<axis::head, false>>(seq, with_state);
      check_dual<gates::gla>(seq, with_state);
      check_dual<gates::rwkv5>(seq, with_state);
      check_dual<gates::mamba1>(seq, with_state);
    }
}

DOCTEST_TEST_CASE_TEMPLATE("both forms agree where decays reach from nothing to the bound", Gate, decay_per_head,
                           decay_per_channel) {
  using forms = both_forms<Gate>;
  auto const s = plain_shape(sequences::batch(2, 70));
  auto x = random_mixer_numbers<typename forms::bounded>(s, 44);
  draw_extreme_decays<double>(x.g, 45);
  forms f(s, x, true);
  auto const o = f.recurrent.forward(f.x, &f.S), quadratic = f.history.forward(f.x, &f.past);
  DOCTEST_CHECK(relative_difference(quadratic, o) <= 1e-12);
  auto const d_o = random_vector(o.size(), 46);
  DOCTEST_CHECK(relative_difference(f.history.backward(f.x, d_o, &f.past), f.recurrent.backward(f.x, d_o, &f.S)) <=
                1e-12);
}
