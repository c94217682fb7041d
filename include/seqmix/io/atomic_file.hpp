#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <seqmix/io/posix_file.hpp>

namespace seqmix::inline v0::io {

namespace detail {

/// Removes a half-written file unless it was renamed.
class temporary_name {
 public:
  explicit temporary_name(std::filesystem::path name) : name_(std::move(name)) {}
  temporary_name(temporary_name const&) = delete;
  temporary_name& operator=(temporary_name const&) = delete;
  ~temporary_name() {
    if (!name_.empty()) ::unlink(name_.c_str());
  }
  std::filesystem::path const& path() const noexcept { return name_; }
  void release() noexcept { name_.clear(); }

 private:
  std::filesystem::path name_;
};

/// Follows symbolic links, so that the file they point to is replaced and not the link.
inline std::filesystem::path resolve_links(std::filesystem::path const& path) {
  std::error_code code;
  if (!std::filesystem::is_symlink(path, code)) return path;
  auto target = std::filesystem::canonical(path, code);
  if (code) fail_errno(code.value(), "write", path, "its symbolic link leads nowhere");
  return target;
}

/// Creates "<path>.<process>-<count>.tmp", a name nobody else has.
inline descriptor create_beside(std::filesystem::path const& path, std::filesystem::path& name) {
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    name = path;
    name += text(".", ::getpid(), "-", counter++, ".tmp");
    auto file = open_file(name, O_WRONLY | O_CREAT | O_EXCL);
    if (file || errno != EEXIST) return file;
  }
  errno = EEXIST;
  return {};
}

}  // namespace detail

/// Replaces a file by the concatenated pieces, completely or not at all, and on the disk when it returns: a
/// temporary file in the same folder is written, synced and renamed, then the folder is synced. A reader or a crash
/// at any moment sees the earlier file or the new one. Keeps the permissions of an earlier file and follows
/// symbolic links. Errors: file_error with path, system text and bytes; the temporary file is removed, an earlier
/// file is as it was.
inline void write_file_atomically(std::filesystem::path const& path,
                                  std::span<std::span<std::byte const> const> pieces) {
  auto const target = detail::resolve_links(path);
  auto const folder_path = detail::folder_of(target);
  std::size_t total = 0;
  for (auto piece : pieces) total += piece.size();

  struct stat earlier {};
  bool const replaces = ::stat(target.c_str(), &earlier) == 0;
  if (replaces && !S_ISREG(earlier.st_mode)) detail::fail("write", path, "is there already and not a regular file");
  // A rename would go past the write protection of the file it replaces.
  if (replaces && ::access(target.c_str(), W_OK) != 0)
    detail::fail_errno(errno, "write", path, "cannot be replaced");
  auto const folder = detail::open_file(folder_path, O_RDONLY | O_DIRECTORY);
  if (!folder) detail::fail_errno(errno, "write", path, "its folder cannot be opened");

  std::filesystem::path name;
  auto file = detail::create_beside(target, name);
  if (!file) detail::fail_errno(errno, "write", path, "no file can be created in its folder");
  detail::temporary_name temporary(name);

  // Best effort: some file systems have no permissions to keep.
  if (replaces) (void)::fchmod(file.get(), earlier.st_mode & mode_t(0777));

  std::size_t done = 0;
  auto const require = [&](char const* step, int code) {
    if (code == 0) return;
    detail::fail_errno(code, "write", path, step, " after ", done, " of ", total, " bytes");
  };
  for (auto piece : pieces) require("failed", detail::write_all(file.get(), piece, done));
  require("sync failed", ::fsync(file.get()) == 0 ? 0 : errno);
  require("close failed", file.close() ? 0 : errno);
  require("rename failed", std::rename(name.c_str(), target.c_str()) == 0 ? 0 : errno);
  temporary.release();
  require("the new file is in place, but the sync of its folder failed", detail::sync_folder(folder.get()));
}

/// The same for a short text.
inline void write_file_atomically(std::filesystem::path const& path, std::string_view text) {
  std::span<std::byte const> const piece = std::as_bytes(std::span(text));
  write_file_atomically(path, std::span(&piece, 1));
}

}  // namespace seqmix::inline v0::io
