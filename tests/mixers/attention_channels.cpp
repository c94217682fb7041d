#include "../support/law_recurrence.hpp"
#include <seqmix/mixers/attention.hpp>

// Attention with linear weights under a gate per key channel, over blocks and tiles of 32 tokens, against the
// reference on numbers and on dual numbers.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using numbers = std::vector<double>;

/// The same decays at every token, handed in: one per channel, or a step with a rate per channel.
template <bool Factored>
struct constant_decays : given_decays<axis::head_key, false, Factored> {
  static constexpr gate_spec spec{.decay = axis::head_key, .factored = Factored};
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 0> const&) noexcept {
    return {T(-1), T(1)};
  }
  template <class T>
  static T log_step(std::array<T, 0> const&, std::array<T, 0> const&) noexcept {
    return T(0);
  }
};
using token_channels = attention<selectors::linear, decay_per_channel>;
using token_factors = attention<selectors::linear, factored_decays>;
using constant_channels = attention<selectors::linear, constant_decays<false>>;
using constant_factors = attention<selectors::linear, constant_decays<true>>;
using windowed_channels = attention<seqmix::select<selectors::window, selectors::linear>, decay_per_channel>;

/// Sequences of several tiles and of parts of them, an empty one and single tokens, in the order of a ragged batch.
constexpr std::array<index_t, 7> tile_offsets{0, 97, 97, 98, 130, 163, 164};

/// Heads that share gates and values.
template <class M>
mixer_shape shared_shape() {
  auto s = law_shape<M>(sequences::packed(tile_offsets), 110);
  s.gate_heads = s.value_heads = 2;
  s.key_heads = 1;
  s.select.window = 40;
  return s;
}
/// Decays that leave something over a few tiles, a share of them replaced by everything from nothing to beyond the
/// bound.
template <class M>
mixer_numbers<double> mixed_numbers(mixer_shape const& s, std::uint64_t seed, double share) {
  auto x = random_mixer_numbers<M>(s, seed, 0.02);
  random_numbers random(seed + 1);
  std::array<double, 7> const choices{0.0, -1e-3, -1.0, -30.0, -128.0, log_decay_bound<double>, -5000.0};
  for (auto& g : x.g)
    if (random.uniform(0, 1) < share) g = choices[std::size_t(random.below(7))];
  return x;
}
template <class M>
void check_tiles() {
  DOCTEST_CAPTURE(M::name());
  for (double share : {0.0, 0.1, 1.0}) {
    DOCTEST_CAPTURE(share);
    auto const s = shared_shape<M>();
    check_gradients<M>(s, mixed_numbers<M>(s, 81, share), 2);
  }
}

}  // namespace

DOCTEST_TEST_CASE("a gate per channel over several tiles, shared by heads, has the numbers and gradients of its "
                  "definition, down to the bound and beyond") {
  check_tiles<token_channels>();
  check_tiles<token_factors>();
  check_tiles<constant_channels>();
  check_tiles<constant_factors>();
  check_tiles<windowed_channels>();
}

DOCTEST_TEST_CASE("where the bound acts on a decay per channel, its derivative is 0") {
  auto const s = law_shape<token_channels>(sequences::batch(1, 50));
  auto x = random_mixer_numbers<token_channels>(s, 82);
  std::vector<std::size_t> const beyond{0, 21, 7 * 20 + 3, 40 * 20 + 19};
  for (auto i : beyond) x.g[i] = -1025;
  mixer_machine<token_channels, double> machine(s);
  auto const o = machine.forward(x);
  auto const d = machine.backward(x, random_vector(o.size(), 83));
  for (auto i : beyond) DOCTEST_CHECK(d.g[i] == 0.0);
  DOCTEST_CHECK(d.g[22] != 0.0);
}

DOCTEST_TEST_CASE("decays per channel stay finite in float and near the double result, forward and backward") {
  auto const s = shared_shape<token_channels>();
  for (double share : {0.0, 0.1, 1.0}) {
    DOCTEST_CAPTURE(share);
    auto x = mixed_numbers<token_channels>(s, 84, share).as<float>().as<double>();
    for (auto& g : x.g) g = std::max(g, double(log_decay_bound<float>));
    mixer_machine<token_channels, double> exact(s);
    mixer_machine<token_channels, float> rounded(s);
    auto const o = exact.forward(x);
    DOCTEST_CHECK(relative_difference(rounded.forward(x.as<float>()), o) <= 1e-5);
    auto const d_o = random_vector<float>(o.size(), 85);
    auto const d = exact.backward(x, numbers(d_o.begin(), d_o.end()));
    DOCTEST_CHECK(relative_difference(rounded.backward(x.as<float>(), d_o), d) <= 1e-5);
  }
}

DOCTEST_TEST_CASE("one token after another over a long past gives what one pass gives") {
  index_t const length = 70;
  auto const s = law_shape<token_channels>(sequences::batch(1, length));
  auto const x = mixed_numbers<token_channels>(s, 86, 0.1);
  auto const whole = mixer_machine<token_channels, double>(s).forward(x);
  mixer_memory<token_channels, double> carried(s);
  numbers steps;
  for (index_t t = 0; t < length; ++t) {
    auto const o = mixer_machine<token_channels, double>(with_sequences(s, sequences::batch(1, 1)))
                       .forward(rows_of<token_channels>(s, x, t, 1), &carried, &carried, false);
    steps.insert(steps.end(), o.begin(), o.end());
  }
  DOCTEST_CHECK(relative_difference(steps, whole) <= 1e-13);
}

DOCTEST_TEST_CASE("a history under a gate per channel holds a decay per channel, under a factored one a step") {
  auto s = law_shape<token_channels>(sequences::batch(3, 5), 7);
  index_t const keys_and_values = 2 * 5 + 2 * 3;
  DOCTEST_CHECK(token_channels::state<double>::elements(s) == 3 * 7 * (keys_and_values + 4 * 5));
  DOCTEST_CHECK(token_factors::state<double>::elements(s) == 3 * 7 * (keys_and_values + 4));
  DOCTEST_CHECK(constant_channels::state<double>::elements(s) == 3 * 7 * keys_and_values);
}

DOCTEST_TEST_CASE("a NaN decay makes NaN of the rows that look across its token, and of no other") {
  auto const s = law_shape<token_channels>(sequences::batch(1, 90));
  index_t const row = s.heads * s.value_dim, at = 37;
  auto x = random_mixer_numbers<token_channels>(s, 87);
  auto const clean = mixer_machine<token_channels, double>(s).forward(x);
  x.g[std::size_t(at * s.gate_heads * s.key_dim + 2)] = std::numeric_limits<double>::quiet_NaN();
  auto const o = mixer_machine<token_channels, double>(s).forward(x);
  for (std::size_t i = 0; i < o.size(); ++i) {
    bool const touched = index_t(i) / row >= at && index_t(i) % row < s.value_dim;
    DOCTEST_CHECK((touched ? o[i] != o[i] : o[i] == clean[i]));
  }
}

DOCTEST_TEST_CASE("decays of another shape than the gate's are refused by name") {
  auto const s = law_shape<token_channels>(sequences::batch(1, 3));
  auto const x = random_mixer_numbers<token_factors>(s, 88);
  auto in = input_of<token_factors>(s, x);
  attention_shape const shape{s.seq, s.heads, s.key_heads, s.value_heads, s.gate_heads, s.key_dim, s.value_dim};
  attention_input<double> const given{in.q_rhk, in.k_rhk, in.v_rhv, in.g_rhk};
  auto rated = given;
  rated.rate_hk = in.rate_hk;
  auto ws = arena::growing();
  numbers o(std::size_t(3 * s.heads * s.value_dim));
  view3<double> const o_rhv(o.data(), {3, s.heads, s.value_dim});
  auto const run = [&](attention_input<double> const& input) {
    kernels::channel_attention_forward<selectors::all, selectors::linear>(device::cpu{1}, shape, input, o_rhv,
                                                                          nullptr, {}, ws);
  };
  DOCTEST_CHECK_NOTHROW(run(rated));
  DOCTEST_CHECK_THROWS_WITH_AS(run(given), "seqmix: attention log-decay g: expected [-1,4,5], got [3,4,1]",
                               shape_error);
  rated.rate_hk.extent[0] = 3;
  DOCTEST_CHECK_THROWS_WITH_AS(run(rated), "seqmix: attention decay rate: expected [4,5], got [3,5]", shape_error);
  rated.queries_alone = true;
  DOCTEST_CHECK_THROWS_WITH_AS(
      run(rated), "seqmix: attention: under a gate per key channel rows bring their own keys", value_error);
}
