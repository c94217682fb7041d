#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/tensor/parallel_for.hpp>
#include <seqmix/tensor/view.hpp>

using namespace seqmix;

DOCTEST_TEST_CASE("parallel_for: every block runs once, on a thread the device has") {
  for (int threads : {0, 1, 2, 3})
    for (index_t count : {index_t(0), index_t(1), index_t(2), index_t(101)}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      std::atomic<int> outside{0};
      device::cpu const dev{threads};
      parallel_for(dev, count, [&](index_t block, int thread) {
        ++runs[std::size_t(block)];
        if (thread < 0 || thread >= thread_count(dev)) ++outside;
      });
      int wrong = 0;
      for (auto const& r : runs) wrong += r == 1 ? 0 : 1;
      DOCTEST_CHECK(wrong == 0);
      DOCTEST_CHECK(outside == 0);
    }
}

DOCTEST_TEST_CASE("parallel_for: blocks of one thread never overlap, so scratch by thread is safe") {
  device::cpu const dev{3};
  std::array<std::atomic<int>, 3> busy{};
  std::atomic<int> shared{0};
  parallel_for(dev, 200, [&](index_t, int thread) {
    auto& mine = busy[std::size_t(thread)];
    if (mine.fetch_add(1) != 0) ++shared;
    double x = 1;
    for (int i = 0; i < 1000; ++i) x = std::sqrt(x + 1);
    if (x < 0) ++shared;  // keeps the work
    mine.fetch_sub(1);
  });
  DOCTEST_CHECK(shared == 0);
}

DOCTEST_TEST_CASE("parallel_for: an exception reaches the caller, and the loop can be used again") {
  for (int threads : {1, 2, 3}) {
    device::cpu const dev{threads};
    DOCTEST_CHECK_THROWS_WITH_AS(parallel_for(dev, 50,
                                              [](index_t block, int) {
                                                if (block == 17) throw value_error("block 17");
                                              }),
                                 "block 17", value_error);
    std::atomic<int> runs{0};
    parallel_for(dev, 50, [&](index_t, int) { ++runs; });
    DOCTEST_CHECK(runs == 50);
  }
}

DOCTEST_TEST_CASE("parallel_for: a loop inside a loop runs its blocks in order on the outer thread") {
#if defined(_OPENMP)
  omp_set_max_active_levels(2);  // OpenMP alone would open a second team
#endif
  std::vector<std::vector<index_t>> order(4);
  std::atomic<int> other{0};
  parallel_for(device::cpu{2}, 4, [&](index_t outer, int) {
    parallel_for(device::cpu{2}, 5, [&](index_t inner, int thread) {
      order[std::size_t(outer)].push_back(inner);
      if (thread != 0) ++other;
    });
  });
  for (auto const& inner : order) DOCTEST_CHECK(inner == std::vector<index_t>{0, 1, 2, 3, 4});
  DOCTEST_CHECK(other == 0);
#if defined(_OPENMP)
  omp_set_max_active_levels(1);
#endif
}

DOCTEST_TEST_CASE("parallel_for: partial sums over fixed blocks have the same bits for 1, 2 and 3 threads") {
  index_t const count = 10007, block_size = 64, blocks = (count + block_size - 1) / block_size;
  auto const sum = [&](auto dev) {
    std::vector<float> partial(std::size_t(blocks), 0.0f);
    parallel_for(dev, blocks, [&](index_t block, int) {
      for (index_t i = block * block_size; i < count && i < (block + 1) * block_size; ++i)
        partial[std::size_t(block)] += std::sin(float(i));
    });
    float total = 0;
    for (float p : partial) total += p;
    return total;
  };
  float const one = sum(device::cpu{1});
  DOCTEST_CHECK(sum(device::cpu{2}) == one);
  DOCTEST_CHECK(sum(device::cpu{3}) == one);
  DOCTEST_CHECK(sum(device::reference{}) == one);
}
