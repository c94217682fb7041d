// EXPECT: it must take dual numbers too
#include <seqmix/concepts/gate.hpp>

using namespace seqmix;

struct my_gate {
  static constexpr std::string_view name = "my_gate";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear};
  static constexpr std::array<gate_parameter, 0> parameters{};
#ifdef SEQMIX_TWIN
  template <class T>
#else
  template <std::floating_point T>
#endif
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {log_sigmoid(raw[0]), T(1)};
  }
};
static_assert(explain_gate<my_gate>());
