#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <seqmix/tensor/error.hpp>
#include <seqmix/tensor/philox.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::data {

/// One training example over borrowed tokens: y is x shifted by one, both [T].
struct window {
  std::span<std::uint8_t const> x, y;
};

/// How many places a window of `block` tokens can start at: N - block, the last of them at N - block - 1.
/// Throws value_error when there are fewer than block + 1 tokens, or block is not positive.
inline index_t window_count(std::span<std::uint8_t const> tokens, index_t block) {
  auto const count = index_t(tokens.size());
  if (block < 1)
    throw value_error("seqmix: windows: the block must be at least 1 token, got " + std::to_string(block));
  if (count <= block)
    throw value_error("seqmix: windows: a block of " + std::to_string(block) + " tokens needs at least " +
                      std::to_string(block + 1) + " tokens, got " + std::to_string(count));
  return count - block;
}

/// x = tokens [start, start + block), y = tokens [start + 1, start + block + 1).
/// Throws value_error when the window does not fit.
inline window window_at(std::span<std::uint8_t const> tokens, index_t block, index_t start) {
  auto const count = window_count(tokens, block);
  if (start < 0 || start >= count)
    throw value_error("seqmix: windows: the start must be in 0.." + std::to_string(count - 1) + ", got " +
                      std::to_string(start));
  return {tokens.subspan(std::size_t(start), std::size_t(block)),
          tokens.subspan(std::size_t(start) + 1, std::size_t(block))};
}

/// Every full window in reading order, floor((N - 1) / block) of them: each token is predicted once, none is
/// skipped but the rest at the end that fills no window.
inline std::vector<window> sequential_windows(std::span<std::uint8_t const> tokens, index_t block) {
  auto const last = window_count(tokens, block);
  std::vector<window> windows;
  for (index_t start = 0; start < last; start += block) windows.push_back(window_at(tokens, block, start));
  return windows;
}

/// Fixed windows for evaluation, the same for every model: about `bytes` tokens in windows that do not overlap,
/// evenly spaced from the first token to the last. A shorter text gives as many windows as fit. Throws value_error
/// when no window fits the text or `bytes` is less than a block.
inline std::vector<window> evaluation_windows(std::span<std::uint8_t const> tokens, index_t block, index_t bytes) {
  auto const last_start = window_count(tokens, block) - 1;
  if (bytes < block)
    throw value_error("seqmix: windows: an evaluation needs at least one block of " + std::to_string(block) +
                      " bytes, got " + std::to_string(bytes));
  auto const fit = (index_t(tokens.size()) - 1) / block;
  auto const count = bytes / block < fit ? bytes / block : fit;
  std::vector<window> windows;
  for (index_t i = 0; i < count; ++i)
    windows.push_back(window_at(tokens, block, count == 1 ? 0 : i * last_start / (count - 1)));
  return windows;
}

/// Draws training windows uniformly over all starts. The start is a pure function of (seed, step, row), with the
/// row counted over the whole step: a resumed run, another architecture and another split of the step into
/// micro-batches all read the same tokens in the same order. Does not own the tokens.
class window_sampler {
 public:
  /// Rows a step may have.
  static constexpr std::uint64_t most_rows = std::uint64_t(1) << 20;

  window_sampler(std::span<std::uint8_t const> tokens, index_t block, std::uint64_t seed)
      : tokens_(tokens), block_(block), count_(window_count(tokens, block)), stream_(seed, "data/windows") {}

  index_t block() const noexcept { return block_; }

  /// Where the window of this row of this step starts, in 0..N-block-1.
  index_t start(std::uint64_t step, std::uint64_t row) const {
    if (row >= most_rows)
      throw value_error("seqmix: windows: a step has at most " + std::to_string(most_rows) + " rows, got row " +
                        std::to_string(row));
    return index_t(stream_.below(step * most_rows + row, std::uint64_t(count_)));
  }

  window operator()(std::uint64_t step, std::uint64_t row) const {
    return window_at(tokens_, block_, start(step, row));
  }

  /// Copies the windows of rows first_row.. into x and y, [rows * block] each, as whatever integer the model takes.
  /// Micro-batch m of B rows starts at first_row = m * B. Throws shape_error unless both hold the same number of
  /// whole blocks.
  template <class Token>
  void fill(std::uint64_t step, std::uint64_t first_row, std::span<Token> x, std::span<Token> y) const {
    auto const block = std::size_t(block_);
    if (x.size() != y.size() || x.size() % block != 0)
      throw shape_error("seqmix: windows: x and y must hold the same whole number of blocks of " +
                        std::to_string(block_) + " tokens, got " + std::to_string(x.size()) + " and " +
                        std::to_string(y.size()));
    for (std::size_t row = 0; row < x.size() / block; ++row) {
      auto const drawn = (*this)(step, first_row + row);
      for (std::size_t t = 0; t < block; ++t) {
        x[row * block + t] = Token(drawn.x[t]);
        y[row * block + t] = Token(drawn.y[t]);
      }
    }
  }

 private:
  std::span<std::uint8_t const> tokens_;
  index_t block_;
  index_t count_;
  random_stream stream_;
};

}  // namespace seqmix::inline v0::data
