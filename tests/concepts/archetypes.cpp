#include "../support/laws.hpp"
#include "../support/models.hpp"
#include <seqmix/layers/layer.hpp>
#include <seqmix/mixers/mixer.hpp>

// The least that a user's own policy must be: each type here satisfies its concept and has nothing more, and is
// then run through the laws, a whole model and both gradient oracles.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// A formula alone: dual numbers differentiate it. One raw value a head, a bias, a parameter, and a write scale.
struct my_gate {
  static constexpr std::string_view name = "my_gate";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear, .bias = true, .writes = true};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "rate", .weight_decay = true}}};
  static double initial(std::size_t, gate_element const& e) { return 0.1 * double(e.head) - 0.3; }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]) * sigmoid(raw[0]), T(1) + tanh(raw[0]) * T(0.5)};
  }
};
static_assert(explain_gate<my_gate>());

/// A decay per key channel from two raw values and a parameter that lives on a coarser axis.
struct my_channel_gate {
  static constexpr std::string_view name = "my_channel_gate";
  static constexpr gate_spec spec{.raw = axis::head_key, .raws = 2, .decay = axis::head_key, .from = feed::linear};
  static constexpr std::array<gate_parameter, 2> parameters{
      {{.name = "offset", .on = axis::head}, {.name = "slope", .on = axis::head_key}}};
  static double initial(std::size_t parameter, gate_element const& e) {
    return parameter == 0 ? 1.0 : 0.5 + 0.1 * double(e.key);
  }
  template <class T>
  static gate_value<T> forward(std::array<T, 2> const& raw, std::array<T, 2> const& p) noexcept {
    return {log_sigmoid(raw[0] * p[1] + p[0]) * sigmoid(raw[1]), T(1)};
  }
};
static_assert(explain_gate<my_channel_gate>());

/// S = e^g S - k (k' e^g S) / n + (write k / n) v', n = 1 + k.k: erases what the key finds before it writes.
struct my_state {
  static constexpr std::string_view name = "my_state";
  static constexpr state_spec spec{.low_rank = true};
  template <class T>
  static T size(state_token<T> const& token) noexcept {
    T n(1);
    for (index_t i = 0; i < token.keys; ++i) n += token.key[i] * token.key[i];
    return n;
  }
  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    T const n = size(token);
    for (index_t i = 0; i < token.keys; ++i) {
      out.a[i] = -token.factor[i] * token.key[i];
      out.b[i] = token.key[i] / n;
      out.w[i] = token.write * token.key[i] / n;
    }
  }
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    T const n = size(token);
    T d_n(0);
    for (index_t i = 0; i < token.keys; ++i) {
      T const d_unit = d.b[i] + token.write * d.w[i];  // of k_i / n
      out.factor[i] -= token.key[i] * d.a[i];
      out.key[i] += d_unit / n - token.factor[i] * d.a[i];
      out.write += token.key[i] / n * d.w[i];
      d_n -= token.key[i] * d_unit / (n * n);
    }
    for (index_t i = 0; i < token.keys; ++i) out.key[i] += T(2) * token.key[i] * d_n;
  }
};
static_assert(state<my_state>);

/// The first two tokens and the last three.
struct my_which {
  static constexpr std::string_view name = "my_which";
  static constexpr which_spec spec{.full_sequence = false};
  static constexpr key_ranges blocks(index_t query, index_t, selection const&) noexcept {
    key_ranges seen;
    seen.add({0, query < 2 ? query + 1 : 2});
    seen.add({query - 2 > 2 ? query - 2 : 2, query + 1});
    return seen;
  }
};
static_assert(which<my_which>);

/// Weights sigmoid(score), not normalised.
struct my_how {
  static constexpr std::string_view name = "my_how";
  static constexpr how_spec spec{};
  template <scalar T>
  static void weights(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values,
                      T* on_stopped) noexcept {
    for (index_t j = 0; j < n; ++j) {
      on_values[j] = sigmoid(raw[j] / T(knobs.temperature) + (bias ? bias[j] : T(0)));
      on_stopped[j] = T(0);
    }
  }
  template <class T>
  struct row {};
  template <class T>
  struct saved {};
  static constexpr bool soft(selector_knobs const&, bool) noexcept { return true; }
  template <class Isa, class T>
  static T absorb(row<T>&, T* score, T const*, index_t n, index_t, bool) noexcept {
    for (index_t j = 0; j < n; ++j) score[j] = sigmoid(score[j]);
    return T(1);
  }
  template <class T>
  static how_output<T> finish(row<T> const&, selector_knobs const&, saved<T>&) noexcept {
    return {T(1), T(0), -1, T(1)};
  }
  template <class Isa, class T>
  static void pullback(saved<T> const&, row_gradient<T> const&, T* score, T const* gv, T* d_score, index_t n,
                       index_t, selector_knobs const&) noexcept {
    for (index_t j = 0; j < n; ++j) {
      score[j] = sigmoid(score[j]);
      d_score[j] = gv[j] * score[j] * (T(1) - score[j]);
    }
  }
};
static_assert(how<my_how>);

using my_attention = attention<seqmix::select<my_which, my_how>, my_gate>;
using my_recurrence = recurrence<my_state, my_gate>;
using my_channels = recurrence<states::outer_product, my_channel_gate>;
static_assert(mixer_on<my_attention, device::cpu> && mixer_on<my_recurrence, device::cpu, double> &&
              mixer_on<my_channels, device::cpu>);

layer_options sizes() { return {.heads = 2, .key_dim = 4, .value_dim = 5, .recurrence_chunk = 4}; }

template <class Mixer>
void check_everything() {
  using my_layer = layer<Mixer, extras{.head_norm = output_norm::per_head, .output_gate = true}>;
  check_laws<Mixer>();
  check_model_gradients<my_layer>(sizes());
  check_model_difference<my_layer>(sizes());
  check_model_laws<my_layer, double>(sizes());
}

}  // namespace

DOCTEST_TEST_CASE("a user's which and how with a user's gate: laws, a model, both gradient oracles") {
  check_everything<my_attention>();
}

DOCTEST_TEST_CASE("each half of a user's selector with the library's other half") {
  check_laws<attention<my_which>>();
  check_laws<attention<my_how>>();
}

DOCTEST_TEST_CASE("a user's state with a user's gate: laws, a model, both gradient oracles") {
  check_everything<my_recurrence>();
}

DOCTEST_TEST_CASE("a user's gate per key channel, by its formula alone: laws, a model, both gradient oracles") {
  check_everything<my_channels>();
}

DOCTEST_TEST_CASE("a user's policies stand in the name of what they make") {
  DOCTEST_CHECK(my_attention::name().find("my_which") != std::string::npos);
  DOCTEST_CHECK(my_attention::name().find("my_how") != std::string::npos);
  DOCTEST_CHECK(my_attention::name().find("my_gate") != std::string::npos);
  DOCTEST_CHECK(my_recurrence::name().find("my_state") != std::string::npos);
}
