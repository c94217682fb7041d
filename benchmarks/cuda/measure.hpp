#pragma once

#include <algorithm>
#include <cstdio>
#include <cuda_runtime_api.h>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/error.hpp>

/// Times on the device's own clock, and what they mean.
namespace seqmix::benchmarks {

inline void expect(cudaError_t status, char const* what) {
  if (status != cudaSuccess)
    throw device_error(std::string("benchmark: ") + what + ": " + cudaGetErrorString(status));
}

/// Device memory that lives as long as this.
class device_block {
 public:
  explicit device_block(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) expect(cudaMalloc(&memory_, bytes), "cudaMalloc");
  }
  device_block(device_block const&) = delete;
  device_block& operator=(device_block const&) = delete;
  ~device_block() { cudaFree(memory_); }
  template <class T>
  T* at(std::size_t byte) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_) + byte);
  }
  arena pieces() const { return {static_cast<std::byte*>(memory_), bytes_}; }

 private:
  std::size_t bytes_;
  void* memory_ = nullptr;
};

class stopwatch {
 public:
  stopwatch() {
    expect(cudaEventCreate(&begin_), "cudaEventCreate");
    expect(cudaEventCreate(&end_), "cudaEventCreate");
  }
  stopwatch(stopwatch const&) = delete;
  stopwatch& operator=(stopwatch const&) = delete;
  ~stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Seconds that one of `repeats` runs takes, started one behind the other.
  template <class Body>
  double seconds(int repeats, Body const& body) {
    expect(cudaEventRecord(begin_, nullptr), "cudaEventRecord");
    for (int i = 0; i < repeats; ++i) body();
    expect(cudaEventRecord(end_, nullptr), "cudaEventRecord");
    expect(cudaEventSynchronize(end_), "what is measured");
    float milliseconds = 0;
    expect(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return double(milliseconds) * 1e-3 / repeats;
  }

 private:
  cudaEvent_t begin_{}, end_{};
};

/// The shortest of many runs, behind one that does not count.
template <class Body>
double best_seconds(int repetitions, Body const& body) {
  stopwatch watch;
  watch.seconds(1, body);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repetitions; ++i) best = std::min(best, watch.seconds(1, body));
  return best;
}

/// What the device can do a second: bytes read and written by a copy, operations of bfloat16 matrix products and of
/// float multiply-adds, exponentials. 0: not measured.
struct ceilings {
  double bytes = 0, matrix = 0, multiply_add = 0, exponentials = 0;
};

/// Sizes of a run that is only to show that everything works are tiny.
inline ceilings measure_ceilings(bool smoke) {
  ceilings most;
  int const repetitions = smoke ? 1 : 10, rounds = smoke ? 4 : 4096;
  int processors = 0;
  expect(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  index_t const blocks = index_t(processors) * (smoke ? 1 : 16);
  {
    std::size_t const bytes = smoke ? 4096 : std::size_t(2) << 30;
    device_block memory(2 * bytes);
    expect(cudaMemset(memory.at<char>(0), 0, bytes), "cudaMemset");
    double const own = best_seconds(
        repetitions, [&] { copy_vectors(memory.at<char>(0), memory.at<char>(bytes), index_t(bytes / 16)); });
    double const runtime = best_seconds(repetitions, [&] {
      expect(cudaMemcpyAsync(memory.at<char>(bytes), memory.at<char>(0), bytes, cudaMemcpyDeviceToDevice, nullptr),
             "cudaMemcpyAsync");
    });
    most.bytes = 2.0 * double(bytes) / std::min(own, runtime);
  }
  device_block sink(std::size_t(blocks) * 256 * sizeof(float));
  double steps = 0;
  double seconds = best_seconds(repetitions, [&] { steps = run_multiply_adds(blocks, rounds, sink.at<float>(0)); });
  most.multiply_add = 2.0 * steps / seconds;
  seconds = best_seconds(repetitions, [&] { steps = run_exponentials(blocks, rounds, sink.at<float>(0)); });
  most.exponentials = steps / seconds;
  most.matrix = matrix_peak(smoke ? 256 : 8192, smoke ? 1 : 10);
  return most;
}

/// What a shape needs at least, in the units of the ceilings.
struct work {
  double bytes = 0, matrix = 0, multiply_add = 0, exponentials = 0;
};

/// Measures one thing after the other and prints a line for each.
class measurements {
 public:
  measurements(ceilings const& most, bool smoke) : most_(most), smoke_(smoke) {
    std::printf("| %-55s | %9s | %9s | %-5s | %5s | %6s | %5s | %8s | %5s |\n", "name", "ms", "floor, ms", "bound",
                "share", "GB/s", "copy", "TFLOP/s", "peak");
    std::printf("|---|---|---|---|---|---|---|---|---|\n");
  }

  /// A case is something that
  ///   takes its memory from an arena where it is made, in a dry run too,
  ///   fill()                  writes its inputs,
  ///   need(backward)          says what it needs at least,
  ///   run(backward, dev, ws)  does it,
  ///   check(backward, look)   has look(pointer, numbers) look at its results.
  /// Directions: forward, and backward where there is one.
  template <class Case, class... Arguments>
  void add(std::string const& kernel, std::string const& what, std::vector<bool> const& directions,
           Arguments const&... arguments) {
    auto const name = [&](bool backward) {
      return kernel + (Case::has_directions ? backward ? "_backward" : "_forward" : "") + "/cuda/" +
             Case::type_name() + "/" + what;
    };
    auto plan = arena::measure();
    {
      Case dry(plan, arguments...);
      for (bool backward : directions) dry.run(backward, device::cuda{.dry = true}, plan);
    }
    std::size_t free = 0, total = 0;
    expect(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (std::size_t(plan.peak()) > free / 20 * 19) {
      std::printf("| %-55s | not run: needs %.1f GiB of device memory, %.1f are free |\n", name(false).c_str(),
                  double(plan.peak()) * 0x1p-30, double(free) * 0x1p-30);
      return;
    }
    device_block memory(std::size_t(plan.peak()));
    auto pieces = memory.pieces();
    Case measured(pieces, arguments...);
    measured.fill();
    for (bool backward : directions) {
      double const seconds = median_seconds([&] { measured.run(backward, device::cuda{}, pieces); });
      print(name(backward), seconds, measured.need(backward));
      measured.check(backward, [&](auto const* x, index_t numbers) { look(x, numbers); });
    }
  }

  /// How many times faster a case was than another of this run; 0 where one of them was not measured.
  double ratio(std::string const& slow, std::string const& fast) const {
    auto const a = seconds_.find(slow), b = seconds_.find(fast);
    return a == seconds_.end() || b == seconds_.end() ? 0.0 : a->second / b->second;
  }
  /// How many results were infinite or NaN, by name.
  std::map<std::string, unsigned long long> const& broken() const { return broken_; }

 private:
  /// Short runs are timed many at once. The first one loads the code and does not count.
  template <class Body>
  double median_seconds(Body const& body) {
    stopwatch watch;
    watch.seconds(1, body);
    if (smoke_) return watch.seconds(1, body);
    double const once = watch.seconds(1, body);
    int const repeats = std::clamp(int(2e-3 / once), 1, 20);
    std::vector<double> samples;
    for (double spent = 0; samples.size() < 15 && (samples.size() < 3 || spent < 0.5);) {
      samples.push_back(watch.seconds(repeats, body));
      spent += samples.back() * repeats;
    }
    auto const middle = samples.begin() + std::ptrdiff_t(samples.size() / 2);
    std::nth_element(samples.begin(), middle, samples.end());
    return *middle;
  }

  void print(std::string const& name, double seconds, work const& need) {
    last_ = name;
    seconds_[name] = seconds;
    // What is not measured bounds nothing.
    auto const at_least = [](double amount, double ceiling) { return ceiling > 0 ? amount / ceiling : 0.0; };
    std::pair<double, char const*> const bounds[] = {{at_least(need.bytes, most_.bytes), "bytes"},
                                                     {at_least(need.matrix, most_.matrix), "mma"},
                                                     {at_least(need.multiply_add, most_.multiply_add), "fma"},
                                                     {at_least(need.exponentials, most_.exponentials), "exp"}};
    auto const [floor, bound] = *std::max_element(std::begin(bounds), std::end(bounds),
                                                  [](auto const& a, auto const& b) { return a.first < b.first; });
    double const flops = need.matrix + need.multiply_add;
    double const peak = need.matrix > 0 ? most_.matrix : most_.multiply_add;
    char share_of_peak[16] = "-";
    if (peak > 0 && flops > 0) std::snprintf(share_of_peak, sizeof share_of_peak, "%.2f", flops / seconds / peak);
    std::printf("| %-55s | %9.4f | %9.4f | %-5s | %5.2f | %6.0f | %5.2f | %8.1f | %5s |\n", name.c_str(),
                seconds * 1e3, floor * 1e3, bound, floor / seconds, need.bytes / seconds * 1e-9,
                need.bytes / seconds / most_.bytes, flops / seconds * 1e-12, share_of_peak);
    std::fflush(stdout);
  }

  template <class T>
  void look(T const* x, index_t numbers) {
    device_block counter(sizeof(unsigned long long));
    auto* const on_device = counter.at<unsigned long long>(0);
    unsigned long long count = 0;
    expect(cudaMemset(on_device, 0, sizeof count), "cudaMemset");
    add_not_finite(x, numbers, on_device);
    expect(cudaMemcpy(&count, on_device, sizeof count, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (count > 0) broken_[last_] += count;
  }

  ceilings most_;
  bool smoke_;
  std::string last_;
  std::map<std::string, double> seconds_;
  std::map<std::string, unsigned long long> broken_;
};

}  // namespace seqmix::benchmarks
