#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// Every buffer and every piece of an arena starts on such a boundary: one cache line, one AVX-512 register.
inline constexpr std::size_t alignment = 64;

/// Owns numbers on a 64-byte boundary. Moves, never copies by accident; zero at construction.
template <class T>
class buffer {
 public:
  buffer() = default;
  explicit buffer(index_t size)
      : data_(size > 0 ? static_cast<T*>(::operator new(std::size_t(size) * sizeof(T), std::align_val_t(alignment)))
                       : nullptr),
        size_(size) {
    for (index_t i = 0; i < size_; ++i) ::new (static_cast<void*>(data_ + i)) T{};
  }
  buffer(buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  buffer(buffer const&) = delete;
  buffer& operator=(buffer const&) = delete;
  ~buffer() {
    if (data_) ::operator delete(data_, std::align_val_t(alignment));
  }

  T* data() noexcept { return data_; }
  T const* data() const noexcept { return data_; }
  index_t size() const noexcept { return size_; }
  T* begin() noexcept { return data_; }
  T* end() noexcept { return data_ + size_; }
  T const* begin() const noexcept { return data_; }
  T const* end() const noexcept { return data_ + size_; }
  T& operator[](index_t i) noexcept { return data_[i]; }
  T const& operator[](index_t i) const noexcept { return data_[i]; }

  void fill(T const& value) { std::fill(begin(), end(), value); }

 private:
  T* data_ = nullptr;
  index_t size_ = 0;
};

}  // namespace seqmix::inline v0
