#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0::data {

/// The text of one domain as byte tokens (0xFF is token 255), in three parts: models train on
/// `train`, are tuned on `validation` and compared on `test`.
struct byte_corpus {
  std::string name;
  std::vector<std::uint8_t> train, validation, test;
};

namespace detail {

struct close_file {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};
using file_handle = std::unique_ptr<std::FILE, close_file>;

inline file_handle open_for_reading(std::string const& where, std::string const& path) {
  file_handle file(std::fopen(path.c_str(), "rb"));
  if (!file) throw file_error("seqmix: " + where + ": cannot open " + path + ": " + std::strerror(errno));
  return file;
}

}  // namespace detail

/// The bytes of a file, at most `most` of them.
/// Throws file_error, naming the path, the expected and the actual size, when the file cannot be read or holds
/// fewer than `least` bytes.
inline std::vector<std::uint8_t> read_bytes(std::string const& path, std::size_t least = 1,
                                            std::size_t most = (std::numeric_limits<std::size_t>::max)()) {
  auto const file = detail::open_for_reading("byte corpus", path);
  std::vector<std::uint8_t> bytes;
  std::size_t constexpr step = std::size_t(1) << 20;
  while (bytes.size() < most) {
    auto const held = bytes.size();
    auto const want = most - held < step ? most - held : step;
    bytes.resize(held + want);
    auto const got = std::fread(bytes.data() + held, 1, want, file.get());
    bytes.resize(held + got);
    if (got == want) continue;
    if (std::ferror(file.get()) != 0)
      throw file_error("seqmix: byte corpus: cannot read " + path + ": " + std::strerror(errno));
    break;
  }
  if (bytes.size() < least)
    throw file_error("seqmix: byte corpus: " + path + " is " + (bytes.empty() ? "empty" : "too short") +
                     ": expected at least " + std::to_string(least) + " bytes, got " +
                     std::to_string(bytes.size()));
  return bytes;
}

/// Which parts `load_corpus` reads: the domains outside the training domain need their test part only.
enum class corpus_parts { all, test_only };

/// Loads `folder`/train.txt, validation.txt and test.txt under the given name.
/// `least` is the smallest size of each part that is read, in bytes: a block of T tokens needs T + 1.
/// Throws file_error naming the path, the expected and the actual size.
inline byte_corpus load_corpus(std::string const& folder, std::string name, std::size_t least,
                               corpus_parts parts = corpus_parts::all) {
  byte_corpus corpus;
  corpus.name = std::move(name);
  corpus.test = read_bytes(folder + "/test.txt", least);
  if (parts == corpus_parts::test_only) return corpus;
  corpus.validation = read_bytes(folder + "/validation.txt", least);
  corpus.train = read_bytes(folder + "/train.txt", least);
  return corpus;
}

}  // namespace seqmix::inline v0::data
