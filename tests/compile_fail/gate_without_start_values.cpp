// EXPECT: seqmix gate: add static double initial(std::size_t parameter, gate_element const&)
#include <seqmix/concepts/gate.hpp>

using namespace seqmix;

struct my_gate {
  static constexpr std::string_view name = "my_gate";
  static constexpr gate_spec spec{};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "rate"}}};
#ifdef SEQMIX_TWIN
  static double initial(std::size_t, gate_element const&) { return 0.0; }
#endif
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]), T(1)};
  }
};
static_assert(explain_gate<my_gate>());
