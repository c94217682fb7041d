#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/data/windows.hpp>

namespace {

using namespace seqmix;

std::vector<std::uint8_t> counting(std::size_t count) {
  std::vector<std::uint8_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), std::uint8_t(0));
  return tokens;
}

std::vector<std::uint8_t> bytes_of(std::span<std::uint8_t const> tokens) { return {tokens.begin(), tokens.end()}; }

void check_shifted(std::span<std::uint8_t const> tokens, data::window const& drawn, index_t block) {
  auto const start = drawn.x.data() - tokens.data();
  DOCTEST_CHECK(index_t(drawn.x.size()) == block);
  DOCTEST_CHECK(index_t(drawn.y.size()) == block);
  DOCTEST_CHECK(drawn.y.data() - tokens.data() == start + 1);
  DOCTEST_CHECK(start >= 0);
  DOCTEST_CHECK(start + block + 1 <= index_t(tokens.size()));
}

DOCTEST_TEST_CASE("P-T4: nine tokens and a block of eight give exactly one window") {
  auto const tokens = counting(9);
  DOCTEST_CHECK(data::window_count(tokens, 8) == 1);
  auto const only = data::window_at(tokens, 8, 0);
  DOCTEST_CHECK(bytes_of(only.x) == std::vector<std::uint8_t>{0, 1, 2, 3, 4, 5, 6, 7});
  DOCTEST_CHECK(bytes_of(only.y) == std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 8});
  DOCTEST_CHECK_THROWS_AS(data::window_at(tokens, 8, 1), value_error);
  DOCTEST_CHECK_THROWS_AS(data::window_at(tokens, 8, -1), value_error);
  data::window_sampler const sampler(tokens, 8, 3);
  for (std::uint64_t step = 0; step < 50; ++step) DOCTEST_CHECK(sampler.start(step, 0) == 0);
  DOCTEST_CHECK(data::sequential_windows(tokens, 8).size() == 1);
  DOCTEST_CHECK(data::evaluation_windows(tokens, 8, 64).size() == 1);
}

DOCTEST_TEST_CASE("P-T4: eight tokens and a block of eight are a clear error, and so is no token") {
  auto const eight = counting(8);
  auto const message = "seqmix: windows: a block of 8 tokens needs at least 9 tokens, got 8";
  DOCTEST_CHECK_THROWS_WITH_AS(data::window_count(eight, 8), message, value_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::window_sampler(eight, 8, 0), message, value_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::sequential_windows(eight, 8), message, value_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::evaluation_windows(eight, 8, 8), message, value_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::window_count({}, 8),
                               "seqmix: windows: a block of 8 tokens needs at least 9 tokens, got 0", value_error);
  DOCTEST_CHECK_THROWS_WITH_AS(data::window_count(eight, 0),
                               "seqmix: windows: the block must be at least 1 token, got 0", value_error);
}

DOCTEST_TEST_CASE("P-T4: every start from 0 to N-block-1 is drawn, none beyond") {
  auto const tokens = counting(20);
  data::window_sampler const sampler(tokens, 8, 1);
  std::set<index_t> starts;
  for (std::uint64_t step = 0; step < 400; ++step) {
    starts.insert(sampler.start(step, 0));
    check_shifted(tokens, sampler(step, 0), 8);
  }
  DOCTEST_CHECK(starts.size() == 12);
  DOCTEST_CHECK(*starts.begin() == 0);
  DOCTEST_CHECK(*starts.rbegin() == 20 - 8 - 1);
}

DOCTEST_TEST_CASE("P-T4: sequential reading gives floor((N-1)/block) windows and skips nothing") {
  for (std::size_t count = 9; count < 60; ++count) {
    auto const tokens = counting(count);
    auto const windows = data::sequential_windows(tokens, 8);
    DOCTEST_REQUIRE(windows.size() == (count - 1) / 8);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      check_shifted(tokens, windows[i], 8);
      DOCTEST_CHECK(windows[i].x.front() == 8 * i);
    }
  }
}

DOCTEST_TEST_CASE("the sampler's window is a function of seed, step and row alone") {
  std::vector<std::uint8_t> tokens(5000);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = std::uint8_t(i * 37 % 251);
  data::window_sampler const sampler(tokens, 16, 7), again(tokens, 16, 7), other(tokens, 16, 8);
  std::size_t same_as_other = 0, same_as_next = 0;
  for (std::uint64_t step = 20; step-- > 0;)
    for (std::uint64_t row = 0; row < 8; ++row) {
      DOCTEST_CHECK(sampler.start(step, row) == again.start(step, row));
      same_as_other += std::size_t(sampler.start(step, row) == other.start(step, row));
      same_as_next += std::size_t(sampler.start(step, row) == sampler.start(step + 1, row));
    }
  DOCTEST_CHECK(same_as_other < 5);
  DOCTEST_CHECK(same_as_next < 5);
  // Pinned: a change of the numbers would give resumed runs other tokens.
  DOCTEST_CHECK(sampler.start(0, 0) == 785);
  DOCTEST_CHECK(sampler.start(0, 1) == 4788);
  DOCTEST_CHECK(sampler.start(1, 0) == 4773);
}

DOCTEST_TEST_CASE("micro-batches of a step together are the whole step's batch") {
  auto const tokens = counting(200);
  index_t constexpr block = 4;
  data::window_sampler const sampler(tokens, block, 5);
  std::vector<std::int32_t> x(8 * block), y(8 * block), part_x(x.size()), part_y(x.size());
  sampler.fill(3, 0, std::span(x), std::span(y));
  for (std::size_t micro = 0; micro < 4; ++micro)
    sampler.fill(3, micro * 2, std::span(part_x).subspan(micro * 8, 8), std::span(part_y).subspan(micro * 8, 8));
  DOCTEST_CHECK(part_x == x);
  DOCTEST_CHECK(part_y == y);
  for (std::size_t i = 0; i < x.size(); ++i) DOCTEST_CHECK(y[i] == x[i] + 1);
  std::vector<std::int32_t> odd(7);
  DOCTEST_CHECK_THROWS_AS(sampler.fill(0, 0, std::span(odd), std::span(odd)), shape_error);
  DOCTEST_CHECK_THROWS_AS(sampler.fill(0, 0, std::span(x), std::span(odd)), shape_error);
  DOCTEST_CHECK_THROWS_AS(sampler.start(0, data::window_sampler::most_rows), value_error);
}

DOCTEST_TEST_CASE("byte 255 is token 255 in a batch") {
  std::vector<std::uint8_t> const tokens(9, 0xFF);
  data::window_sampler const sampler(tokens, 8, 0);
  std::vector<std::int32_t> x(8), y(8);
  sampler.fill(0, 0, std::span(x), std::span(y));
  DOCTEST_CHECK(x == std::vector<std::int32_t>(8, 255));
  DOCTEST_CHECK(y == std::vector<std::int32_t>(8, 255));
}

DOCTEST_TEST_CASE("evaluation windows are evenly spaced from the first token to the last and do not overlap") {
  for (index_t count : {9, 17, 18, 40, 100, 1000})
    for (index_t bytes : {8, 15, 16, 24, 80, 5000}) {
      std::vector<std::uint8_t> const tokens(std::size_t(count), std::uint8_t(1));
      auto const windows = data::evaluation_windows(tokens, 8, bytes);
      auto const fit = (count - 1) / 8, wanted = bytes / 8;
      DOCTEST_REQUIRE(index_t(windows.size()) == (wanted < fit ? wanted : fit));
      DOCTEST_CHECK(windows.front().x.data() == tokens.data());
      index_t least = count, most = 0;
      for (std::size_t i = 0; i < windows.size(); ++i) {
        check_shifted(tokens, windows[i], 8);
        if (i == 0) continue;
        auto const gap = windows[i].x.data() - windows[i - 1].x.data();
        least = gap < least ? gap : least;
        most = gap > most ? gap : most;
      }
      if (windows.size() < 2) continue;
      DOCTEST_CHECK(least >= 8);
      DOCTEST_CHECK(most - least <= 1);
      DOCTEST_CHECK(windows.back().y.data() + 8 == tokens.data() + count);
    }
  DOCTEST_CHECK_THROWS_AS(data::evaluation_windows(counting(100), 8, 7), value_error);
}

}  // namespace
