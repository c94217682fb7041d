// EXPECT: seqmix gate: raw values need a feed, and a feed needs raw values; set spec.raws and spec.from together
#include <seqmix/layers/gate_room.hpp>

using namespace seqmix;

struct my_gate {
  static constexpr std::string_view name = "my_gate";
#ifdef SEQMIX_TWIN
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear};
#else
  static constexpr gate_spec spec{.raws = 1};
#endif
  static constexpr std::array<gate_parameter, 0> parameters{};
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {log_sigmoid(raw[0]), T(1)};
  }
};
gate_room<my_gate> const room;
