/// A gate of one's own by its formula alone: no base class, no registration, no derivative. Its layer trains at
/// once.
#include <cstdio>

#include <seqmix/models/language_model.hpp>

using namespace seqmix;

/// Forgets by a leaky step: the log-decay falls linearly with the raw value, by a rate that each head learns.
struct ramp {
  static constexpr std::string_view name = "ramp";
  static constexpr gate_spec spec{.raws = 1, .from = feed::linear};
  static constexpr std::array<gate_parameter, 1> parameters{{{.name = "log_rate"}}};
  static double initial(std::size_t, gate_element const& e) { return -1.0 - double(e.head); }
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 1> const& p) noexcept {
    return {-exp(p[0]) * (raw[0] > T(0) ? raw[0] : T(-0.1) * raw[0]), T(1)};
  }
};

int main() {
  using model =
      language_model<pattern<layer<recurrence<states::outer_product, ramp>, extras{.output_gate = true}>>>;
  model const m(
      {.vocabulary = 8, .d_model = 32, .layers = 2, .layer = {{.heads = 2, .key_dim = 8, .value_dim = 16}}});
  buffer<float> weights(m.parameters().size()), slope(m.parameters().size());
  m.parameters().initialise(1, weights.data());
  auto memory = m.make_memory<float>(device::cpu{}, sequences::batch(1, 8), {.training = true});
  std::int32_t const text[] = {0, 1, 2, 3, 4, 5, 6, 7, 0};
  for (int step = 0; step < 60; ++step) {
    m.forward(memory, weights.data(), text);
    auto const sum = m.loss(memory, text + 1, 1.0 / 8);
    if (step % 20 == 0 || step == 59) std::printf("step %2d: %.4f nats a token\n", step, sum.loss / 8);
    slope.fill(0);
    m.backward(memory, weights.data(), text, slope.data());
    for (index_t i = 0; i < weights.size(); ++i) weights[i] -= 0.1f * slope[i];
  }
}
