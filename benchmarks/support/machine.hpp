#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <limits>
#include <numeric>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <benchmark/benchmark.h>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// What the machine can do and what a run took of it.
namespace seqmix::benchmarks {

/// Seconds that a piece of work takes: processor time with one thread, since other programs on the machine disturb
/// it less, time on the clock with more.
class stopwatch {
 public:
  explicit stopwatch(int threads) : threads_(threads) {}
  void start() { begin_ = now(); }
  void stop() { seconds_ += now() - begin_; }
  double seconds() const { return seconds_; }

 private:
  double now() const {
    if (threads_ == 1) return double(std::clock()) / double(CLOCKS_PER_SEC);
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  int threads_;
  double begin_ = 0.0, seconds_ = 0.0;
};

namespace detail {
/// Independent chains of multiply-adds on the widest vectors: more than latency times units on any processor so
/// far.
inline double multiply_adds(index_t rounds) {
  using isa = device::cpu::isa;
  constexpr int chains = 12;
  simd::vec<isa, float> x[chains];
  auto factor = simd::broadcast<isa, float>(0.999f), term = simd::broadcast<isa, float>(1e-3f);
  benchmark::DoNotOptimize(factor);
  benchmark::DoNotOptimize(term);
  for (auto& e : x) e = simd::broadcast<isa, float>(1.0f);
  for (index_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) x[c] = x[c] * factor + term;
  for (auto& e : x) benchmark::DoNotOptimize(e);
  return 2.0 * chains * isa::lanes<float> * double(rounds);
}
}  // namespace detail

/// FLOP/s of single-precision multiply-adds with this many threads at once: of each thread the best of many short
/// trials, so that one of them is undisturbed.
inline double fma_peak(int threads) {
  using clock = std::chrono::steady_clock;
  constexpr index_t rounds = 50'000;
  std::vector<double> best(std::size_t(threads), 0.0);
  parallel_for(device::cpu{threads}, threads, [&](index_t thread, int) {
    for (int trial = 0; trial < 40; ++trial) {
      auto const begin = clock::now();
      double const flops = detail::multiply_adds(rounds);
      double const rate = flops / std::chrono::duration<double>(clock::now() - begin).count();
      best[std::size_t(thread)] = std::max(best[std::size_t(thread)], rate);
    }
  });
  return std::accumulate(best.begin(), best.end(), 0.0);
}

/// Starts the count of peak_memory again, from what the process still holds. Linux only; elsewhere nothing happens.
inline void reset_peak_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);  // what earlier runs gave back would count otherwise
#endif
  if (std::FILE* const f = std::fopen("/proc/self/clear_refs", "w")) {
    std::fputs("5", f);
    std::fclose(f);
  }
}
/// The most memory the process has held since, in bytes; 0 where the system does not tell.
inline double peak_memory() {
  double kilobytes = 0.0;
  if (std::FILE* const f = std::fopen("/proc/self/status", "r")) {
    char line[256];
    while (std::fgets(line, sizeof line, f))
      if (std::sscanf(line, "VmHWM: %lf", &kilobytes) == 1) break;
    std::fclose(f);
  }
  return kilobytes * 1024.0;
}

/// Seconds an iteration, FLOP/s and their share of the peak that is measured now, under the same clock.
inline void report_flops(benchmark::State& state, double flops, double seconds, int threads) {
  double const rate = flops / std::max(seconds, std::numeric_limits<double>::min());
  state.counters["seconds"] = seconds / double(state.iterations());
  state.counters["FLOP/s"] = rate;
  state.counters["FMA share"] = rate / fma_peak(threads);
}

}  // namespace seqmix::benchmarks
