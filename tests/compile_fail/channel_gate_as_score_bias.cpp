// EXPECT: seqmix pairing: a per-channel gate is no score bias; take a per-head gate or outer_product
#include <seqmix/mixers/mixer.hpp>

using namespace seqmix;

struct channel_gate {
  static constexpr std::string_view name = "channel_gate";
  static constexpr gate_spec spec{.raw = axis::head_key, .raws = 1, .decay = axis::head_key, .from = feed::linear};
  static constexpr std::array<gate_parameter, 0> parameters{};
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {log_sigmoid(raw[0]), T(1)};
  }
};
#ifdef SEQMIX_TWIN
auto const name =
    recurrence<states::outer_product, channel_gate>::name() + attention<selectors::linear, channel_gate>::name();
#else
auto const name = attention<selectors::softmax, channel_gate>::name();
#endif
