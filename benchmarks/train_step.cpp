// A training step of the demo's models: forward, loss, backward, clipping and AdamW over 4096 byte tokens.
//   train_step/cpu/f32/<variant>/T:<tokens of a sequence>/threads:<n>
// Counters: tokens/s; FLOP/s counted from shapes (support/flops.hpp); their share of the FMA peak of as many
// threads, measured in the same process; peak memory in bytes. Behind the runs: the bars of docs/performance.md.

#include <cstdint>
#include <span>
#include <string>
#include <thread>

#include <benchmark/benchmark.h>

#include "support/bars.hpp"
#include "support/flops.hpp"
#include "support/machine.hpp"
#include <seqmix/models/variants.hpp>
#include <seqmix/train/trainer.hpp>

namespace {

using namespace seqmix;

constexpr index_t tokens_per_step = 4096, d_model = 128, vocabulary = 256;

/// Bytes without meaning: speed does not depend on them.
struct any_tokens {
  void fill(std::uint64_t step, std::uint64_t, std::span<std::int32_t> x, std::span<std::int32_t> y) const {
    random_stream const random(step, "tokens");
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = std::int32_t(random.below(i, vocabulary));
      y[i] = std::int32_t(random.below(i + 1, vocabulary));
    }
  }
};

/// One architecture of the demo. `mixing` counts the forward operations of one layer's mixer over one sequence.
template <class Layer>
struct variant {
  std::string name;
  typename Layer::options options;
  index_t layers;
  double (*mixing)(index_t tokens);

  void run(benchmark::State& state, index_t block, int threads) const {
    using model_type = language_model<pattern<Layer>>;
    typename model_type::options o{.vocabulary = vocabulary, .d_model = d_model, .layers = layers};
    std::get<0>(o.layer) = options;
    index_t const batch = tokens_per_step / block;
    benchmarks::reset_peak_memory();
    train::trainer<model_type> trainer(model_type(o),
                                       {.steps = 1'000'000, .batch = batch, .block = block, .threads = threads});
    trainer.step(any_tokens{});  // touches all memory once
    benchmarks::stopwatch watch(threads);
    for (auto _ : state) {
      watch.start();
      trainer.step(any_tokens{});
      watch.stop();
    }
    double const steps = double(state.iterations());
    double const flops = benchmarks::training_flops(trainer.model().parameters(), tokens_per_step,
                                                    double(layers * batch) * mixing(block));
    state.counters["tokens/s"] = steps * double(tokens_per_step) / watch.seconds();
    benchmarks::report_flops(state, steps * flops, watch.seconds(), threads);
    state.counters["peak memory"] = benchmark::Counter(benchmarks::peak_memory(), benchmark::Counter::kDefaults,
                                                       benchmark::Counter::OneK::kIs1024);
  }
};

template <class Layer>
void add(variant<Layer> const& v) {
  for (index_t block : {256, 2048})
    for (int threads : {1, 2})
      if (threads <= int(std::thread::hardware_concurrency()))
        benchmark::RegisterBenchmark(
            ("train_step/cpu/f32/" + v.name + "/T:" + std::to_string(block) + "/threads:" + std::to_string(threads))
                .c_str(),
            [=](benchmark::State& state) { v.run(state, block, threads); })
            ->Unit(benchmark::kMillisecond);
}

void add_all() {
  using namespace benchmarks;
  add<variants::transformer_pp>({"transformer_pp", variants::attention_options(d_model, 4), 4,
                                 [](index_t T) { return attention_flops(causal_pairs(T), 4, 32, 32); }});
  add<variants::mamba2>(
      {"mamba2", variants::mamba2_options({.heads = 4, .state = 48, .head_dim = 64}), 7,
       [](index_t T) { return recurrence_flops(T, 4, 48, 64) + convolution_flops(T, 4 * 64 + 2 * 48, 4); }});
  add<variants::retnet>({"retnet", variants::retnet_options(d_model, 4), 6,
                         [](index_t T) { return recurrence_flops(T, 4, 32, 64); }});
  // Training computes the surrogate's softmax and its output too.
  add<variants::top1_element>({"top1_element", variants::attention_options(d_model, 4), 4,
                               [](index_t T) { return attention_flops(causal_pairs(T), 4, 32, 32); }});
  add<variants::top1_chunk>({"top1_chunk", variants::attention_options(d_model, 4, 0, 0, 16), 4,
                             [](index_t T) { return attention_flops(chunk_pairs(T, 16), 4, 32, 32); }});
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_all();
  benchmarks::collecting_reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmarks::print_training_bars(reporter);
  return 0;
}
