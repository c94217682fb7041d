#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

/// The speeds that the library promises for training steps, and whether a run reached them.
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

}  // namespace seqmix::benchmarks
