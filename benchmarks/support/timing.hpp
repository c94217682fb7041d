#pragma once

#include <string>
#include <thread>

#include <benchmark/benchmark.h>

#include "machine.hpp"
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/philox.hpp>

/// What the benchmarks of kernels share: numbers to work on, a plan of memory, a clock.
namespace seqmix::benchmarks {

/// Standard normal numbers times a factor.
inline buffer<float> normals(index_t n, std::uint64_t seed, double factor = 1.0) {
  buffer<float> x(n);
  random_stream const random(seed, "benchmark");
  for (index_t i = 0; i < n; ++i) x[i] = float(factor * random.normal(std::uint64_t(i)));
  return x;
}
/// Uniform numbers between two bounds.
inline buffer<float> uniform(index_t n, std::uint64_t seed, double low, double high) {
  buffer<float> x(n);
  random_stream const random(seed, "benchmark");
  for (index_t i = 0; i < n; ++i) x[i] = float(low + (high - low) * random.uniform(std::uint64_t(i)));
  return x;
}

/// Seconds of all iterations of body(device, workspace), whose workspace is planned by a dry run; the first call is
/// not counted.
template <class Body>
double time_kernel(benchmark::State& state, Body const& body, int threads = 1) {
  auto plan = arena::measure();
  body(device::cpu{threads, true}, plan);
  buffer<std::byte> block(plan.peak());
  arena ws(block);
  body(device::cpu{threads}, ws);
  stopwatch watch(threads);
  for (auto _ : state) {
    watch.start();
    body(device::cpu{threads}, ws);
    benchmark::ClobberMemory();
    watch.stop();
  }
  return watch.seconds();
}

/// <what>/cpu/f32/<variant>/T:<tokens>[/threads:<n>]
inline std::string benchmark_name(std::string const& what, std::string const& variant, index_t T, int threads = 1) {
  return what + "/cpu/f32/" + variant + "/T:" + std::to_string(T) +
         (threads == 1 ? "" : "/threads:" + std::to_string(threads));
}
inline bool machine_has_threads(int threads) { return threads <= int(std::thread::hardware_concurrency()); }

}  // namespace seqmix::benchmarks
