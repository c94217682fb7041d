#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/data/windows.hpp>
#include <seqmix/models/variants.hpp>
#include <seqmix/train/trainer.hpp>

/// What the tests of this room train: two layers of width 16 over bytes.
namespace small {

using namespace seqmix;

using transformer = language_model<pattern<variants::transformer_pp>>;
using mamba = language_model<pattern<variants::mamba2>>;

template <class Model>
typename Model::options options();
template <>
inline transformer::options options<transformer>() {
  return {.d_model = 16, .layers = 2, .layer = {variants::attention_options(16, 2)}};
}
template <>
inline mamba::options options<mamba>() {
  return {.d_model = 16,
          .layers = 2,
          .layer = {layer_options{.heads = 2, .query_heads = 1, .key_heads = 1, .key_dim = 8, .value_dim = 16}}};
}
template <class Model>
Model model() {
  return Model(options<Model>());
}

inline std::vector<std::uint8_t> text(index_t size) {
  std::string_view constexpr words = "the quick brown fox jumps over a lazy dog, ";
  std::vector<std::uint8_t> bytes;
  for (index_t i = 0; i < size; ++i) bytes.push_back(std::uint8_t(words[std::size_t(i) % words.size()]));
  return bytes;
}

inline constexpr index_t block = 24;
inline train::trainer_options run_options(index_t steps, int threads = 1) {
  return {.steps = steps, .batch = 3, .block = block, .seed = 7, .learning_rate = 1e-2, .threads = threads};
}

/// The numbers of a buffer, to compare bit by bit.
template <class T>
std::string bits(buffer<T> const& numbers) {
  std::string all(std::size_t(numbers.size()) * sizeof(T), '\0');
  std::memcpy(all.data(), numbers.data(), all.size());
  return all;
}
template <class Trainer>
std::string bits_of(Trainer const& t) {
  return bits(t.parameters()) + bits(t.optimiser().first_moment()) + bits(t.optimiser().second_moment());
}

/// Rows of another source with some labels ignored.
template <class Source>
struct ignoring {
  Source const& source;
  index_t every;  ///< keeps labels whose place is a multiple of it; 0 keeps none
  void fill(std::uint64_t step, std::uint64_t row, std::span<std::int32_t> x, std::span<std::int32_t> y) const {
    source.fill(step, row, x, y);
    for (std::size_t i = 0; i < y.size(); ++i)
      if (every == 0 || index_t(i) % every != 0) y[i] = -100;
  }
};

/// Calls of operator new in this program so far.
long allocations() noexcept;

struct folder {
  std::filesystem::path path;
  folder() {
    auto name = (std::filesystem::temp_directory_path() / "seqmix-train-XXXXXX").string();
    DOCTEST_REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  folder(folder const&) = delete;
  folder& operator=(folder const&) = delete;
  ~folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace small
