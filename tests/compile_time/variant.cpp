// What one architecture costs a compiler: forward, backward and a single step of a model of SEQMIX_VARIANT, in float.
#if defined(SEQMIX_UNIT_PRECOMPILED)
#include <seqmix/precompiled.hpp>
#endif
#include <seqmix/models/variants.hpp>

using namespace seqmix;

template <class Layer>
struct repeated {
  using type = pattern<Layer>;
};
template <class... Layers>
struct repeated<pattern<Layers...>> {
  using type = pattern<Layers...>;
};
using model = language_model<repeated<variants::SEQMIX_VARIANT>::type>;

struct run_of_a_variant {
  model const& m;
  index_t batch, length;
  float const* parameters;
  float* gradients;
  std::int32_t const *tokens, *labels;

  double forward_and_backward() const {
    auto memory = m.make_memory<float>(device::cpu{}, sequences::batch(batch, length), {.training = true});
    m.forward(memory, parameters, tokens);
    auto const sum = m.loss(memory, labels, 1.0);
    m.backward(memory, parameters, tokens, gradients);
    return sum.loss;
  }
  void step(model::state<float>& carried) const {
    auto memory = m.make_memory<float>(device::cpu{}, sequences::batch(batch, 1), {.capacity = carried.capacity()});
    m.forward(memory, parameters, tokens, &carried, &carried);
  }
};

double train(run_of_a_variant const& run) { return run.forward_and_backward(); }
void generate(run_of_a_variant const& run) {
  auto carried = run.m.make_state<float>(run.batch, run.length);
  run.step(carried);
}
