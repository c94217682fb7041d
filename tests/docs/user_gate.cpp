#include "../support/laws.hpp"
#include "../support/models.hpp"
#include <seqmix/mixers/mixer.hpp>

// The gates of docs/adding-a-policy.md.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

// [doc:gate]
/// g = -softplus(raw + offset): the log-decay of one head at one token.
struct soft_forget {
  static constexpr std::string_view name = "soft_forget";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "offset"}}};

  static double initial(std::size_t, gate_element const& e) { return -2.0 - double(e.head); }

  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-softplus(raw[0] + p[0])};
  }
};
static_assert(explain_gate<soft_forget>());
// [/doc:gate]

// [doc:channel-gate]
/// A decay per key channel, from a raw value per channel and an offset per head; the offset is shared by the head's
/// keys.
struct soft_forget_channels {
  static constexpr std::string_view name = "soft_forget_channels";
  static constexpr gate_spec spec{.raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::linear};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "offset", .on = axis::head}}};
  static double initial(std::size_t, gate_element const&) { return -2.0; }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-softplus(raw[0] + p[0])};
  }
};
// [/doc:channel-gate]

// [doc:pullback]
/// The same gate with its derivatives by hand.
struct soft_forget_by_hand : soft_forget {
  template <class T>
  static void pullback(std::array<T, 1> const& raw, std::array<T, 1> const& p, T d_log_decay, T /*d_write*/,
                       std::array<T, 1>& d_raw, std::array<T, 1>& d_p) noexcept {
    bool const bounded = -softplus(raw[0] + p[0]) < log_decay_bound<T>;
    d_raw[0] = d_p[0] = bounded ? T(0) : -d_log_decay * sigmoid(raw[0] + p[0]);
  }
};
// [/doc:pullback]

layer_options sizes() { return {.heads = 2, .key_dim = 4, .value_dim = 5, .recurrence_chunk = 4}; }

}  // namespace

// [doc:gate-test]
DOCTEST_TEST_CASE("a user's gate decays a recurrence, and biases the scores of softmax and of Top-1 selection") {
  check_laws<recurrence<states::outer_product, soft_forget>>();
  using softmax_layer = layer<attention<selectors::softmax, soft_forget>, extras{.output_gate = true}>;
  check_model_gradients<softmax_layer>(sizes());   // dual numbers, through two layers
  check_model_difference<softmax_layer>(sizes());  // central differences
  check_model_gradients<layer<attention<selectors::top1_element<>, soft_forget>, extras{.rope = true}>>(sizes());
}
// [/doc:gate-test]

DOCTEST_TEST_CASE("a user's gate per key channel in a model has the gradients of both oracles") {
  using channels =
      layer<recurrence<states::outer_product, soft_forget_channels>, extras{.head_norm = output_norm::per_head}>;
  check_model_gradients<channels>(sizes());
  check_model_difference<channels>(sizes());
}

DOCTEST_TEST_CASE("a pullback by hand gives what dual numbers give, the bound included") {
  static_assert(gate_detail::has_pullback<soft_forget_by_hand, double> &&
                !gate_detail::has_pullback<soft_forget, double>);
  for (double raw : {-40.0, -3.0, 0.0, 0.7, 900.0, 2000.0}) {
    std::array<double, 1> d_raw{}, d_p{}, d_raw_dual{}, d_p_dual{};
    gate_pullback<soft_forget_by_hand, double>({raw}, {0.4}, 1.5, 0.0, d_raw, d_p);
    gate_pullback<soft_forget, double>({raw}, {0.4}, 1.5, 0.0, d_raw_dual, d_p_dual);
    DOCTEST_CHECK(d_raw == d_raw_dual);
    DOCTEST_CHECK(d_p == d_p_dual);
  }
}
