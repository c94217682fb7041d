// EXPECT: seqmix gate: a factored gate needs template <class T> static T log_rate(p) noexcept and T log_step(raw,
// p) noexcept, with log_decay = -exp(log_rate + log_step)
#include <seqmix/concepts/gate.hpp>

using namespace seqmix;

struct product_of_rate_and_step {
  static constexpr std::string_view name = "product_of_rate_and_step";
  static constexpr gate_spec spec{.raws = 1, .decay = axis::head_key, .from = feed::linear, .factored = true};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "rate", .on = axis::head_key}}};
  static double initial(std::size_t, gate_element const&) { return 0.0; }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0] + raw[0])};
  }
#ifdef SEQMIX_TWIN
  template <class T>
  static T log_rate(std::array<T, 1> const& p) noexcept {
    return p[0];
  }
  template <class T>
  static T log_step(std::array<T, 1> const& raw, std::array<T, 1> const&) noexcept {
    return raw[0];
  }
#endif
};
static_assert(explain_gate<product_of_rate_and_step>());
