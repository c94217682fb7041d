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
/// Independent chains of multiply-adds on the widest vectors; how many operations that were.
template <int Chains>
[[gnu::noinline]] double multiply_adds(index_t rounds) {
  using isa = device::cpu::isa;
  simd::vec<isa, float> x[std::size_t(Chains)];
  auto factor = simd::broadcast<isa, float>(0.999f), term = simd::broadcast<isa, float>(1e-3f);
  benchmark::DoNotOptimize(factor);
  benchmark::DoNotOptimize(term);
  for (int c = 0; c < Chains; ++c) {  // equal chains might be computed once
    x[c] = simd::broadcast<isa, float>(1.0f + 0.01f * float(c));
    benchmark::DoNotOptimize(x[c]);
  }
  for (index_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < Chains; ++c) x[c] = x[c] * factor + term;
  for (auto& e : x) benchmark::DoNotOptimize(e);
  return 2.0 * Chains * isa::lanes<float> * double(rounds);
}
/// The best rate of work(), which returns how much it did, of many short trials, so that one of them is
/// undisturbed.
template <class Work>
double best_rate(int trials, Work const& work) {
  using clock = std::chrono::steady_clock;
  double best = 0.0;
  while (trials-- > 0) {
    auto const begin = clock::now();
    double const done = work();
    best = std::max(best, done / std::chrono::duration<double>(clock::now() - begin).count());
  }
  return best;
}
}  // namespace detail

/// FLOP/s of single-precision multiply-adds with this many threads at once. Of three numbers of chains, each more
/// than latency times units of the processors so far, the middle one: how the compiler lays out a loop moves one of
/// them now and then.
inline double fma_peak(int threads) {
  constexpr index_t rounds = 40'000;
  constexpr int trials = 20;
  std::vector<double> rate(std::size_t(threads), 0.0);
  parallel_for(device::cpu{threads}, threads, [&](index_t thread, int) {
    double rates[] = {detail::best_rate(trials, [] { return detail::multiply_adds<10>(rounds); }),
                      detail::best_rate(trials, [] { return detail::multiply_adds<12>(rounds); }),
                      detail::best_rate(trials, [] { return detail::multiply_adds<16>(rounds); })};
    std::sort(std::begin(rates), std::end(rates));
    rate[std::size_t(thread)] = rates[1];
  });
  return std::accumulate(rate.begin(), rate.end(), 0.0);
}

/// Bytes a second of a copy between two arrays of this many bytes together, read and written ones counted alike.
inline double copy_peak(index_t bytes) {
  index_t const n = std::max(index_t(64), bytes / 2 / index_t(sizeof(float)));
  std::vector<float> from(std::size_t(n), 1.0f), to(std::size_t(n), 0.0f);
  index_t const repeats = std::max(index_t(1), (index_t(1) << 22) / bytes);
  return detail::best_rate(20, [&] {
    for (index_t i = 0; i < repeats; ++i) {
      simd::map<device::cpu::isa>(
          n, [](auto const& x) { return x; }, to.data(), from.data());
      benchmark::ClobberMemory();
    }
    return double(repeats) * double(n) * 2.0 * double(sizeof(float));
  });
}

/// Exponentials a second of the library's own function on numbers in the first cache.
inline double exp_peak() {
  constexpr index_t n = 2048, repeats = 20;
  std::vector<float> from(std::size_t(n), -1.5f), to(std::size_t(n), 0.0f);
  return detail::best_rate(40, [&] {
    for (index_t i = 0; i < repeats; ++i) {
      simd::map<device::cpu::isa>(
          n, [](auto const& x) { return simd::exp_of_weight<device::cpu::isa, float>(x); }, to.data(), from.data());
      benchmark::ClobberMemory();
    }
    return double(n * repeats);
  });
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
