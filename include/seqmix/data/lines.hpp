#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <seqmix/data/byte_corpus.hpp>
#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0::data {

/// The bytes of a plain file, piece by piece.
class file_source {
 public:
  explicit file_source(std::string path)
      : path_(std::move(path)), file_(detail::open_for_reading("lines", path_)) {}

  std::string const& path() const noexcept { return path_; }

  /// Fills the front of `into` and returns how much, 0 at the end. Throws file_error when reading fails.
  std::size_t read(std::span<char> into) {
    auto const got = std::fread(into.data(), 1, into.size(), file_.get());
    if (got < into.size() && std::ferror(file_.get()) != 0)
      throw file_error("seqmix: lines: cannot read " + path_ + ": " + std::strerror(errno));
    return got;
  }

 private:
  std::string path_;
  detail::file_handle file_;
};

/// The lines of a source (file_source, zstd_source), in constant memory but for the longest line.
template <class Source>
class line_reader {
 public:
  /// Longer lines than `longest_line` bytes are refused, so that a damaged file cannot fill the memory.
  explicit line_reader(Source source, std::size_t longest_line = std::size_t(1) << 28)
      : source_(std::move(source)), longest_line_(longest_line), block_(std::size_t(1) << 18) {}

  std::string const& path() const noexcept { return source_.path(); }
  /// The number of the line that `next` gave last, from 1.
  std::uint64_t number() const noexcept { return number_; }

  /// Sets `line` (valid until the next call) without its line end; false after the last line.
  /// A last line without a line end is a line. Throws file_error naming path and line.
  bool next(std::string_view& line) {
    line_.clear();
    while (true) {
      if (at_ == end_ && !refill()) break;
      auto const* const from = block_.data() + at_;
      auto const* const stop = static_cast<char const*>(std::memchr(from, '\n', end_ - at_));
      auto const length = stop != nullptr ? std::size_t(stop - from) : end_ - at_;
      if (line_.size() + length > longest_line_)
        throw file_error("seqmix: lines: " + path() + " line " + std::to_string(number_ + 1) + " has more than " +
                         std::to_string(longest_line_) + " bytes");
      line_.append(from, length);
      at_ += length + (stop != nullptr ? 1 : 0);
      if (stop != nullptr) return give(line);
    }
    return !line_.empty() && give(line);
  }

 private:
  bool refill() {
    at_ = 0;
    end_ = source_.read(block_);
    return end_ > 0;
  }
  bool give(std::string_view& line) {
    ++number_;
    line = line_;
    return true;
  }

  Source source_;
  std::size_t longest_line_;
  std::vector<char> block_;
  std::size_t at_ = 0, end_ = 0;
  std::string line_;
  std::uint64_t number_ = 0;
};

}  // namespace seqmix::inline v0::data
