#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

/// The speeds that the library promises, and whether a run reached them.
namespace seqmix::benchmarks {

/// Prints runs as usual and keeps the counters of every repetition.
class collecting_reporter : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(std::vector<Run> const& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (auto const& run : runs)
      if (run.run_type == Run::RT_Iteration && !run.error_occurred)
        for (auto const& [name, counter] : run.counters)
          values_[run.run_name.function_name + " " + name].push_back(counter.value);
  }
  /// The middle one of all repetitions; 0 when there were none.
  double median(std::string const& benchmark, std::string const& counter) const {
    auto const found = values_.find(benchmark + " " + counter);
    if (found == values_.end()) return 0.0;
    auto values = found->second;
    auto const middle = values.begin() + std::ptrdiff_t(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

 private:
  std::map<std::string, std::vector<double>> values_;
};

/// One line a bar; nothing for what was not run.
class bar_table {
 public:
  void at_least(char const* what, double value, double bound) { line(what, ">=", value, bound, value >= bound); }
  void at_most(char const* what, double value, double bound) { line(what, "<=", value, bound, value <= bound); }
  int missed() const { return missed_; }

 private:
  void line(char const* what, char const* sign, double value, double bound, bool reached) {
    if (!(value > 0.0)) return;
    std::printf("| %-72s | %s %.2f | %6.2f | %s |\n", what, sign, bound, value, reached ? "reached" : "missed ");
    missed_ += !reached;
  }
  int missed_ = 0;
};

/// The bars of a training step, from medians of one run; returns how many were missed.
inline int print_training_bars(collecting_reporter const& runs) {
  auto const median = [&](char const* variant, int tokens, int threads, char const* counter) {
    return runs.median("train_step/cpu/f32/" + std::string(variant) + "/T:" + std::to_string(tokens) +
                           "/threads:" + std::to_string(threads),
                       counter);
  };
  auto const ratio = [&](char const* above, int above_threads, char const* below, int tokens) {
    double const divisor = median(below, tokens, 1, "tokens/s");
    return divisor > 0.0 ? median(above, tokens, above_threads, "tokens/s") / divisor : 0.0;
  };
  char const *const base = "transformer_pp", *const mamba2 = "mamba2", *const retnet = "retnet";
  std::printf("\n| %-72s | bar     | median |         |\n|---|---|---|---|\n",
              "training step, one thread unless said");
  bar_table bars;
  bars.at_least("Transformer++, T = 256: FLOP/s over the FMA peak", median(base, 256, 1, "FMA share"), 0.45);
  bars.at_least("Transformer++, T = 256: tokens/s with two threads over one", ratio(base, 2, base, 256), 1.7);
  bars.at_most("Mamba-2, T = 256: time per token over Transformer++", ratio(base, 1, mamba2, 256), 1.3);
  bars.at_most("RetNet, T = 256: time per token over Transformer++", ratio(base, 1, retnet, 256), 1.3);
  bars.at_least("Mamba-2, T = 2048: tokens/s over Transformer++", ratio(mamba2, 1, base, 2048), 1.3);
  bars.at_least("RetNet, T = 2048: tokens/s over Transformer++", ratio(retnet, 1, base, 2048), 1.3);
  return bars.missed();
}

/// The bars of the attention kernels, one thread unless said; returns how many were missed.
inline int print_attention_bars(collecting_reporter const& runs) {
  auto const name = [](char const* what, char const* variant, int tokens) {
    return std::string("attention_") + what + "/cpu/f32/" + variant + "/T:" + std::to_string(tokens);
  };
  auto const seconds = [&](char const* what, char const* variant, int tokens) {
    return runs.median(name(what, variant, tokens), "seconds");
  };
  auto const both = [&](char const* variant, int tokens) {
    double const forward = seconds("forward", variant, tokens), backward = seconds("backward", variant, tokens);
    return forward > 0.0 && backward > 0.0 ? forward + backward : 0.0;
  };
  auto const over = [](double above, double below) { return below > 0.0 ? above / below : 0.0; };
  std::string const softmax = name("forward", "softmax", 2048);
  double const flops = runs.median(softmax, "FLOP/s") * seconds("forward", "softmax", 2048);
  double const peak = over(runs.median(softmax, "FLOP/s"), runs.median(softmax, "FMA share"));
  std::printf("\n| %-72s | bar     | median |         |\n|---|---|---|---|\n",
              "attention, T = 2048, 8 heads of 64");
  bar_table bars;
  bars.at_least("softmax forward: FLOP/s over the FMA peak", runs.median(softmax, "FMA share"), 0.75);
  bars.at_least("softmax forward + backward: FLOP/s over the FMA peak",
                over(over(3.0 * flops, both("softmax", 2048)), peak), 0.60);
  bars.at_most("Top-1 element without a backward: time over softmax forward",
               over(seconds("inference", "top1_element", 2048), seconds("forward", "softmax", 2048)), 0.55);
  bars.at_most("Top-1 element, straight-through: forward + backward over softmax",
               over(both("top1_element", 2048), both("softmax", 2048)), 0.95);
  for (auto const& [tokens, bound] : {std::pair{2048, 3.0}, {8192, 10.0}})
    for (char const* what : {"forward", "backward"})
      bars.at_least(
          ("softmax over Top-1 chunk (128), " + std::string(what) + ", T = " + std::to_string(tokens)).c_str(),
          over(seconds(what, "softmax", tokens), seconds(what, "top1_chunk", tokens)), bound);
  for (char const* variant : {"softmax", "top1_element", "top1_chunk"})
    bars.at_least((std::string(variant) + " forward: one thread's time over two threads'").c_str(),
                  over(seconds("forward", variant, 2048),
                       runs.median(name("forward", variant, 2048) + "/threads:2", "seconds")),
                  1.8);
  return bars.missed();
}

/// The bars of recurrences, one thread unless said. Times are promised for a peak of 117.3 GFLOP/s and scale with
/// the machine's; returns how many were missed.
inline int print_recurrence_bars(collecting_reporter const& runs) {
  auto const name = [](char const* what, std::string const& variant, int tokens) {
    return std::string("recurrence_") + what + "/cpu/f32/" + variant + "/T:" + std::to_string(tokens);
  };
  auto const forward = [&](std::string const& variant, int tokens) {
    return runs.median(name("forward", variant, tokens), "seconds");
  };
  auto const over = [](double above, double below) { return below > 0.0 ? above / below : 0.0; };
  auto const scaled = [&](std::string const& variant) {  // to the peak that the promises are for
    auto const benchmark = name("forward", variant, 2048);
    return 1e3 * forward(variant, 2048) *
           over(runs.median(benchmark, "FLOP/s"), runs.median(benchmark, "FMA share")) / 117.3e9;
  };
  struct promise {
    char const* variant;
    double milliseconds;  // 0: none
    double backward = 4.5;
  };
  constexpr promise promises[] = {{"retnet", 0.0}, {"mamba2", 8.0},      {"gla", 5.5},
                                  {"rwkv6", 6.5},  {"rwkv7", 11.0},      {"gated_deltanet", 9.5},
                                  {"kda", 9.5},    {"mamba1", 0.0, 4.0}, {"min_gru", 0.0}};
  std::printf("\n| %-72s | bar     | median |         |\n|---|---|---|---|\n", "recurrences");
  bar_table bars;
  for (auto const& [variant, milliseconds, backward] : promises) {
    std::string const of = variant;
    if (milliseconds > 0.0)
      bars.at_most((of + " forward, T = 2048: ms at a peak of 117.3 GFLOP/s").c_str(), scaled(of), milliseconds);
    double const back = runs.median(name("backward", of, 2048), "seconds");
    if (back > 0.0)
      bars.at_most((of + ": forward + backward over forward, T = 2048").c_str(),
                   over(forward(of, 2048) + back, forward(of, 2048)), backward);
    bars.at_most((of + " forward: time per token at T = 16,384 over 2,048").c_str(),
                 over(forward(of, 16384) / 8.0, forward(of, 2048)), 1.15);
    bars.at_least((of + " forward, T = 512: one thread's time over two threads'").c_str(),
                  over(forward(of, 512), runs.median(name("forward", of, 512) + "/threads:2", "seconds")), 1.8);
  }
  bars.at_least("mamba1 forward, T = 2048: exponentials a nanosecond",
                1e-9 * runs.median(name("forward", "mamba1", 2048), "exp/s"), 4.0);
  return bars.missed();
}

/// The bars of decoding: behind a long context bounded states are as fast as behind a short one.
inline int print_decode_bars(collecting_reporter const& runs) {
  auto const rate = [&](std::string const& variant, int context) {
    return runs.median("decode/cpu/f32/" + variant + "/context:" + std::to_string(context), "tokens/s");
  };
  std::printf("\n| %-72s | bar     | median |         |\n|---|---|---|---|\n", "decoding, one thread");
  bar_table bars;
  for (std::string const variant : {"mamba2", "retnet"})
    if (double const near = rate(variant, 2048); near > 0.0)
      bars.at_least((variant + ": tokens/s behind 16,384 tokens over 2,048").c_str(), rate(variant, 16384) / near,
                    0.85);
  return bars.missed();
}

}  // namespace seqmix::benchmarks
