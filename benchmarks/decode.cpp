// Generating one token at a time with the demo's models, behind a context.
//   decode/cpu/f32/<variant>/context:<tokens>
// Counters: tokens/s of one sequence with one thread; bytes of the state that is carried. Behind the runs: whether
// bounded states are as fast behind a long context as behind a short one.

#include <cstdint>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "support/bars.hpp"
#include "support/machine.hpp"
#include <seqmix/models/variants.hpp>
#include <seqmix/tensor/philox.hpp>

namespace {

using namespace seqmix;

constexpr index_t d_model = 128, vocabulary = 256, steps = 256;

template <class Layer>
void decode(benchmark::State& bench, typename Layer::options const& options, index_t layers, index_t context) {
  using model_type = language_model<pattern<Layer>>;
  typename model_type::options o{.vocabulary = vocabulary, .d_model = d_model, .layers = layers};
  std::get<0>(o.layer) = options;
  model_type const model(o);
  buffer<float> parameters(model.parameters().size());
  model.parameters().initialise(1, parameters.data());
  index_t const capacity = context + steps + 1;
  auto state = model.template make_state<float>(1, capacity);

  // Prompts in pieces: what matters here is the state they leave.
  random_stream const random(1, "tokens");
  constexpr index_t piece = 1024;
  std::vector<std::int32_t> tokens(piece);
  for (index_t i = 0; i < piece; ++i)
    tokens[std::size_t(i)] = std::int32_t(random.below(std::uint64_t(i), vocabulary));
  auto prefill =
      model.template make_memory<float>(device::cpu{1}, sequences::batch(1, piece), {.capacity = capacity});
  for (index_t at = 0; at < context; at += piece)
    model.forward(prefill, parameters.data(), tokens.data(), &state, &state);

  auto step = model.template make_memory<float>(device::cpu{1}, sequences::batch(1, 1), {.capacity = capacity});
  benchmarks::stopwatch watch(1);
  for (auto _ : bench) {
    watch.start();
    model.forward(step, parameters.data(), tokens.data(), &state, &state);
    watch.stop();
  }
  bench.counters["tokens/s"] = double(bench.iterations()) / watch.seconds();
  bench.counters["state bytes"] = double(model.state_elements(1, context)) * sizeof(float);
}

template <class Layer>
void add(char const* name, typename Layer::options const& options, index_t layers) {
  for (index_t context : {2048, 16384})
    benchmark::RegisterBenchmark(
        ("decode/cpu/f32/" + std::string(name) + "/context:" + std::to_string(context)).c_str(),
        [=](benchmark::State& s) { decode<Layer>(s, options, layers, context); })
        ->Iterations(steps)
        ->Unit(benchmark::kMicrosecond);
}

void add_all() {
  using namespace variants;
  add<transformer_pp>("transformer_pp", attention_options(d_model, 4), 4);
  add<top1_element>("top1_element", attention_options(d_model, 4), 4);
  add<top1_chunk>("top1_chunk", attention_options(d_model, 4, 0, 0, 16), 4);
  add<mamba2>("mamba2", mamba2_options({.heads = 4, .state = 48, .head_dim = 64}), 7);
  add<retnet>("retnet", retnet_options(d_model, 4), 6);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_all();
  benchmarks::collecting_reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmarks::print_decode_bars(reporter);
  return 0;
}
