#pragma once

#include <exception>

#include <seqmix/tensor/device.hpp>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace seqmix::inline v0 {

namespace detail {
template <class Body>
void run_blocks(serial_threads, int, index_t count, Body const& body) {
  for (index_t i = 0; i < count; ++i) body(i, 0);
}
#if defined(_OPENMP)
template <class Body>
void run_blocks(openmp_threads, int threads, index_t count, Body const& body) {
  if (threads <= 1 || count <= 1 || omp_in_parallel()) return run_blocks(serial_threads{}, 1, count, body);
  std::exception_ptr failure;
  int const team = count < threads ? int(count) : threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (index_t i = 0; i < count; ++i) {
    try {
      body(i, omp_get_thread_num());
    } catch (...) {
#pragma omp critical(seqmix_failure)
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}
#endif
}  // namespace detail

/// Calls body(block, thread) for every block in [0, count), `thread` in [0, device.threads). The blocks are cut by
/// the caller from the shape alone; which thread runs one must not change what it computes. Never nests.
template <class Isa, class Threads, class Body>
void parallel_for(device::basic_cpu<Isa, Threads> dev, index_t count, Body const& body) {
  if (!dev.dry) detail::run_blocks(Threads{}, dev.threads, count, body);
}
template <class Body>
void parallel_for(device::reference, index_t count, Body const& body) {
  detail::run_blocks(serial_threads{}, 1, count, body);
}

/// How many threads may run at once on a device: what per-thread scratch is planned for.
template <class Device>
int thread_count(Device dev) noexcept {
  return dev.threads < 1 ? 1 : dev.threads;
}

}  // namespace seqmix::inline v0
