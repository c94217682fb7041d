#pragma once

#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <type_traits>
#include <unistd.h>
#include <utility>

#include <seqmix/tensor/buffer.hpp>
#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0::io::detail {

/// Owns an open file of the operating system; -1 is none.
class descriptor {
 public:
  descriptor() = default;
  explicit descriptor(int fd) noexcept : fd_(fd) {}
  descriptor(descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  descriptor(descriptor const&) = delete;
  descriptor& operator=(descriptor const&) = delete;
  ~descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  /// False, with errno set, if the system reports a late write error (network file systems do).
  bool close() noexcept { return ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_ = -1;
};

/// Texts and whole numbers in one string.
template <class... Parts>
std::string text(Parts const&... parts) {
  std::string all;
  auto const add = [&all](auto const& part) {
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(part)>>)
      all += std::to_string(part);
    else
      all += part;
  };
  (add(parts), ...);
  return all;
}

/// Throws file_error "seqmix: <action> <path>: <what>".
template <class... What>
[[noreturn]] void fail(std::string_view action, std::filesystem::path const& path, What const&... what) {
  throw file_error(text("seqmix: ", action, " ", path.string(), ": ", what...));
}

/// The same with the system's text for an errno.
template <class... What>
[[noreturn]] void fail_errno(int code, std::string_view action, std::filesystem::path const& path,
                             What const&... what) {
  fail(action, path, what..., ": ", std::error_code(code, std::generic_category()).message());
}

inline descriptor open_file(std::filesystem::path const& path, int flags) {
  int fd = -1;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, mode_t(0666));
  while (fd < 0 && errno == EINTR);
  return descriptor(fd);
}

/// Reads up to `into.size()` bytes and returns how many there were; a file that ends early gives fewer.
inline std::size_t read_some(int fd, std::span<std::byte> into, std::filesystem::path const& path) {
  std::size_t done = 0;
  while (done < into.size()) {
    auto const got = ::read(fd, into.data() + done, into.size() - done);
    int const code = errno;
    if (got < 0 && code == EINTR) continue;
    if (got < 0) fail_errno(code, "read", path, "failed after ", done, " of ", into.size(), " bytes");
    if (got == 0) break;
    done += std::size_t(got);
  }
  return done;
}

/// Writes everything; returns 0 or the errno, and in `done` how many bytes the system took in any case.
inline int write_all(int fd, std::span<std::byte const> from, std::size_t& done) noexcept {
  while (!from.empty()) {
    auto const put = ::write(fd, from.data(), from.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    if (put == 0) return ENOSPC;
    done += std::size_t(put);
    from = from.subspan(std::size_t(put));
  }
  return 0;
}

/// A whole regular file on a 64-byte boundary: allocates exactly the size the system reports, no more.
inline buffer<std::byte> read_file(std::filesystem::path const& path) {
  // O_NONBLOCK: a named pipe must give an error and not wait for a writer.
  auto file = open_file(path, O_RDONLY | O_NONBLOCK);
  if (!file) fail_errno(errno, "read", path, "cannot be opened");
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail_errno(errno, "read", path, "has no readable size");
  if (!S_ISREG(info.st_mode)) fail("read", path, "is not a regular file");
  try {
    buffer<std::byte> bytes{index_t(info.st_size)};
    auto const size = std::size_t(bytes.size());
    auto const got = read_some(file.get(), {bytes.data(), size}, path);
    if (got != size)
      fail("read", path, "ended after ", got, " bytes, expected ", size, "; it was shortened while being read");
    return bytes;
  } catch (std::bad_alloc const&) {
    fail("read", path, "its ", info.st_size, " bytes do not fit in memory");
  }
}

/// The folder a path lies in; "." for a bare name.
inline std::filesystem::path folder_of(std::filesystem::path const& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// Makes new and renamed names in a folder survive a power loss. File systems that cannot are left alone.
inline int sync_folder(int folder) noexcept {
  if (::fsync(folder) == 0 || errno == EINVAL || errno == ENOTSUP) return 0;
  return errno;
}

}  // namespace seqmix::inline v0::io::detail
