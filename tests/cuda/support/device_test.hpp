#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <cuda_runtime_api.h>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/storage.hpp>
#include <seqmix/tensor/view.hpp>

/// A small frame for tests of device code, so that a machine with a GPU needs nothing but the CUDA toolkit. Every
/// program prints its cases, and a digest of all bits that came back from the device: equal digests of several runs
/// mean equal bits.
namespace seqmix::testing {

struct device_test {
  char const* name;
  void (*body)();
};
struct device_report {
  std::vector<device_test> tests;
  long checks = 0, failures = 0;
  unsigned long long digest = 14695981039346656037ULL;  // FNV-1a

  static device_report& get() {
    static device_report report;
    return report;
  }
  void absorb(void const* data, std::size_t bytes) {
    auto const* const p = static_cast<unsigned char const*>(data);
    for (std::size_t i = 0; i < bytes; ++i) digest = (digest ^ p[i]) * 1099511628211ULL;
  }
};
struct device_registration {
  device_registration(char const* name, void (*body)()) { device_report::get().tests.push_back({name, body}); }
};

inline bool check(bool good, std::string const& what) {
  auto& report = device_report::get();
  ++report.checks;
  if (!good && ++report.failures <= 40) std::printf("  FAILED: %s\n", what.c_str());
  return good;
}

/// max |got - want| <= tolerance max |want|; NaN only where it is wanted.
template <class T>
void check_close(std::string const& what, std::vector<T> const& got, std::vector<double> const& want,
                 double tolerance) {
  if (!check(got.size() == want.size(),
             what + ": " + std::to_string(got.size()) + " numbers, wanted " + std::to_string(want.size())))
    return;
  double most = 0, worst = 0;
  std::size_t where = 0;
  for (double x : want)
    if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
  for (std::size_t i = 0; i < got.size(); ++i) {
    auto const x = double(static_cast<accumulator_t<T>>(got[i]));
    bool const same = x == want[i] || (x != x && want[i] != want[i]);
    double const off = same ? 0 : std::fabs(x - want[i]);
    if (!std::isnan(worst) && !(off <= worst)) worst = off, where = i;  // a NaN stays
  }
  check(worst <= tolerance * most,
        what + ": off by " + std::to_string(worst) + " of " + std::to_string(most) + " at " +
            std::to_string(where) +
            (where < got.size() ? ", got " + std::to_string(double(static_cast<accumulator_t<T>>(got[where]))) +
                                      ", wanted " + std::to_string(want[where])
                                : std::string()));
}

inline void expect_success(cudaError_t status, char const* what) {
  if (status != cudaSuccess) throw device_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Device memory that lives as long as this.
template <class T>
class device_array {
 public:
  explicit device_array(std::size_t count) : count_(count) {
    if (count > 0) expect_success(cudaMalloc(&memory_, count * sizeof(T)), "cudaMalloc");
  }
  explicit device_array(std::vector<T> const& host) : device_array(host.size()) { upload(host); }
  device_array(device_array&& other) noexcept
      : count_(other.count_), memory_(std::exchange(other.memory_, nullptr)) {}
  device_array(device_array const&) = delete;
  device_array& operator=(device_array const&) = delete;
  ~device_array() { cudaFree(memory_); }

  T* data() const { return static_cast<T*>(memory_); }
  std::size_t size() const { return count_; }
  void upload(std::vector<T> const& host) {
    if (!host.empty())
      expect_success(cudaMemcpy(memory_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  /// What lies there, after all work is done.
  std::vector<T> download() const {
    std::vector<T> host(count_);
    expect_success(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (count_ > 0)
      expect_success(cudaMemcpy(host.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    device_report::get().absorb(host.data(), count_ * sizeof(T));
    return host;
  }
  template <std::size_t Rank>
  view<T, Rank> as(std::array<index_t, Rank> extent) const {
    return {data(), extent};
  }

 private:
  std::size_t count_;
  void* memory_ = nullptr;
};

/// Room in device memory for what `plan` takes from an arena, and that arena.
class device_arena {
 public:
  template <class Plan>
  explicit device_arena(Plan const& plan) : memory_(planned(plan)), pieces_(memory_.data(), memory_.size()) {}
  arena& pieces() { return pieces_; }

 private:
  template <class Plan>
  static std::size_t planned(Plan const& plan) {
    arena measuring = arena::measure();
    plan(measuring);
    return std::size_t(measuring.peak());
  }
  device_array<std::byte> memory_;
  arena pieces_;
};

/// Numbers as they are stored: what a device and the oracle both read.
template <class T>
std::vector<T> stored(std::vector<double> const& x) {
  std::vector<T> result;
  for (double v : x) result.push_back(T(accumulator_t<T>(v)));
  return result;
}
template <class T>
std::vector<double> as_double(std::vector<T> const& x) {
  std::vector<double> result;
  for (T v : x) result.push_back(double(static_cast<accumulator_t<T>>(v)));
  return result;
}

/// Runs all cases; 77 when there is no device.
inline int run_device_tests() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("not run: no CUDA device\n");
    return 77;
  }
  auto& report = device_report::get();
  for (auto const& test : report.tests) {
    long const before = report.failures;
    std::printf("%s\n", test.name);
    try {
      test.body();
    } catch (std::exception const& e) {
      check(false, e.what());
    }
    if (report.failures > before) std::printf("  -> FAILED\n");
    std::fflush(stdout);
  }
  std::printf("%zu cases, %ld checks, %ld failed; bits %016llx\n", report.tests.size(), report.checks,
              report.failures, report.digest);
  return report.failures == 0 ? 0 : 1;
}

}  // namespace seqmix::testing

#define SEQMIX_JOIN_(a, b) a##b
#define SEQMIX_JOIN(a, b) SEQMIX_JOIN_(a, b)
/// DEVICE_TEST("a sentence") { ... }
#define DEVICE_TEST(name)                                                                                          \
  static void SEQMIX_JOIN(device_test_, __LINE__)();                                                               \
  static seqmix::testing::device_registration const SEQMIX_JOIN(registration_, __LINE__)(                          \
      name, &SEQMIX_JOIN(device_test_, __LINE__));                                                                 \
  static void SEQMIX_JOIN(device_test_, __LINE__)()
