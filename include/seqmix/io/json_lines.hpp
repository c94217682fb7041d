#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <seqmix/io/atomic_file.hpp>
#include <seqmix/io/posix_file.hpp>
#include <seqmix/tensor/error.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::io {

namespace detail {

/// Calls `visit(json const&, text)` for every complete line, `text` with its newline. A torn last line (no newline,
/// or not JSON) is passed over; every other bad line throws file_error with its number.
template <class Visit>
void for_each_json_line(std::filesystem::path const& path, std::string_view rest, Visit&& visit) {
  std::size_t number = 0;
  while (!rest.empty()) {
    ++number;
    auto const newline = rest.find('\n');
    if (newline == rest.npos) return;
    auto const line = rest.substr(0, newline + 1);
    rest.remove_prefix(newline + 1);
    // The JSON parser would take a zero byte for the end of the line.
    bool const zero = line.find('\0') != line.npos;
    auto const value = zero ? nlohmann::json(nlohmann::json::value_t::discarded)
                            : nlohmann::json::parse(line.begin(), line.end(), nullptr, false);
    if (!value.is_discarded())
      visit(value, line);
    else if (!rest.empty())
      fail("read", path, "line ", number, " is not JSON");
  }
}

inline std::string_view as_text(buffer<std::byte> const& bytes) noexcept {
  return {reinterpret_cast<char const*>(bytes.data()), std::size_t(bytes.size())};
}

}  // namespace detail

/// All complete lines of a log. A torn last line, which a crash can leave, is passed over.
/// Errors: file_error if the file cannot be read, or naming the first other line that is not JSON.
inline std::vector<nlohmann::json> read_json_lines(std::filesystem::path const& path) {
  auto const bytes = detail::read_file(path);
  std::vector<nlohmann::json> lines;
  detail::for_each_json_line(path, detail::as_text(bytes),
                             [&](nlohmann::json const& value, std::string_view) { lines.push_back(value); });
  return lines;
}

/// An append-only log of one JSON value per line that stays exact across crashes: a line is handed to the system in
/// one piece when it is appended, and a resumed run first drops what it will write again. Errors: file_error naming
/// the path and the system's reason. Threads: one at a time.
class json_lines_log {
 public:
  /// Opens a log to append, or creates it. What is there stays as it is until the first append or truncation.
  explicit json_lines_log(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code ignored;  // open() says what is wrong with the path
    bool const is_new = !std::filesystem::exists(path_, ignored);
    open();
    if (is_new) sync_name();
  }

  std::filesystem::path const& path() const noexcept { return path_; }

  /// Adds one line and hands it to the system. If that fails, the log is as it was.
  /// Numbers keep all their bits; NaN and infinity, which JSON lacks, become null.
  void append(nlohmann::json const& value) {
    if (torn_) detail::fail("append to", path_, "its last line is torn; call keep_if or truncate_after first");
    auto const line = text_of(value);
    std::size_t done = 0;
    int const code = detail::write_all(file_.get(), std::as_bytes(std::span(line)), done);
    if (code == 0) {
      size_ += off_t(done);
      return;
    }
    // A part of a line must not stay: the next line would be glued to it.
    torn_ = done > 0 && ::ftruncate(file_.get(), size_) != 0;
    detail::fail_errno(code, "append to", path_, "failed after ", done, " of ", line.size(), " bytes");
  }

  /// Returns when all lines are on the disk; call it before a checkpoint that counts on them.
  void sync() {
    if (is_regular_ && ::fsync(file_.get()) != 0) detail::fail_errno(errno, "sync", path_, "failed");
  }

  /// Keeps the complete lines for which `keep(json const&)` is true, byte by byte, and drops the others and a torn
  /// last line. The log is rewritten atomically, and not at all if nothing is to be dropped.
  template <class Predicate>
  void keep_if(Predicate&& keep) {
    auto const bytes = detail::read_file(path_);
    std::vector<std::span<std::byte const>> kept;
    std::size_t size = 0;
    detail::for_each_json_line(path_, detail::as_text(bytes),
                               [&](nlohmann::json const& value, std::string_view line) {
                                 if (!keep(value)) return;
                                 kept.push_back(std::as_bytes(std::span(line)));
                                 size += line.size();
                               });
    if (size == std::size_t(bytes.size())) return;
    write_file_atomically(path_, kept);
    open();
  }

  /// For a run that resumes after `step`: drops every line whose "step" is greater, and a torn last line. Lines
  /// without a number under "step" stay.
  void truncate_after(index_t step) {
    keep_if([step](nlohmann::json const& line) {
      auto const at = line.is_object() ? line.find("step") : line.end();
      if (at == line.end() || !at->is_number()) return true;
      return *at <= std::int64_t(step);
    });
  }

 private:
  void open() {
    file_ = detail::open_file(path_, O_RDWR | O_APPEND | O_CREAT);
    if (!file_) detail::fail_errno(errno, "open", path_, "cannot be opened or created");
    struct stat info {};
    if (::fstat(file_.get(), &info) != 0) detail::fail_errno(errno, "open", path_, "has no readable size");
    is_regular_ = S_ISREG(info.st_mode);
    size_ = is_regular_ ? info.st_size : 0;
    char last = '\n';
    if (size_ > 0 && ::pread(file_.get(), &last, 1, size_ - 1) != 1)
      detail::fail_errno(errno, "open", path_, "cannot be read");
    torn_ = last != '\n';
  }

  void sync_name() const {
    auto const folder = detail::open_file(detail::folder_of(path_), O_RDONLY | O_DIRECTORY);
    int const code = folder ? detail::sync_folder(folder.get()) : errno;
    if (code != 0) detail::fail_errno(code, "open", path_, "its folder cannot be synced");
  }

  std::string text_of(nlohmann::json const& value) const {
    try {
      return value.dump() + "\n";
    } catch (nlohmann::json::exception const&) {
      throw value_error(detail::text("seqmix: append to ", path_.string(), ": a string of the line is not UTF-8"));
    }
  }

  std::filesystem::path path_;
  detail::descriptor file_;
  off_t size_ = 0;
  bool is_regular_ = false;
  bool torn_ = false;
};

}  // namespace seqmix::inline v0::io
