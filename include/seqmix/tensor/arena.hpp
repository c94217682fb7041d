#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <seqmix/tensor/buffer.hpp>

namespace seqmix::inline v0 {

/// Memory planned before it is used. The same carving code runs twice: on `arena::measure()` it only counts
/// (every pointer is null), on a real block it hands out the pieces, each on a 64-byte boundary.
///
///     arena plan = arena::measure();   carve(plan);            // how many bytes?
///     buffer<std::byte> block(plan.used());
///     arena pieces(block);             carve(pieces);          // the same pieces, now real
///
/// `arena::growing()` allocates as it goes, for the reference kernels, which plan nothing.
class arena {
 public:
  static arena measure() { return arena(nullptr, 0, mode::measuring); }
  static arena growing() { return arena(nullptr, 0, mode::growing); }
  explicit arena(buffer<std::byte>& block) : arena(block.data(), std::size_t(block.size()), mode::planned) {}
  arena(std::byte* data, std::size_t bytes) : arena(data, bytes, mode::planned) {}

  bool measuring() const noexcept { return mode_ == mode::measuring; }
  index_t used() const noexcept { return index_t(used_); }
  /// The largest `used()` so far, also after a rewind: what the block must hold.
  index_t peak() const noexcept { return index_t(peak_); }

  /// Uninitialised room for `count` elements; throws shape_error when the plan was for less.
  template <class T>
  T* take(index_t count) {
    auto const bytes = (std::size_t(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    auto const at = used_;
    if (mode_ == mode::planned && at + bytes > bytes_)
      throw shape_error("seqmix: arena: planned " + std::to_string(bytes_) + " bytes, needs " +
                        std::to_string(at + bytes) + "; plan again for this shape");
    used_ += bytes;
    peak_ = used_ > peak_ ? used_ : peak_;
    if (measuring()) return nullptr;
    if (mode_ == mode::planned) return reinterpret_cast<T*>(data_ + at);
    blocks_.emplace_back(index_t(bytes));
    return reinterpret_cast<T*>(blocks_.back().data());
  }

  template <class T, std::size_t Rank>
  view<T, Rank> take_view(std::array<index_t, Rank> extent) {
    index_t n = 1;
    for (auto e : extent) n *= e;
    return view<T, Rank>(take<T>(n), extent);
  }

  /// Returns to an earlier `used()`: scratch of one layer makes room for the next one's.
  void rewind(index_t mark) noexcept { used_ = std::size_t(mark); }

 private:
  enum class mode { planned, measuring, growing };
  arena(std::byte* data, std::size_t bytes, mode m) : data_(data), bytes_(bytes), mode_(m) {}
  std::byte* data_;
  std::size_t bytes_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  mode mode_;
  std::vector<buffer<std::byte>> blocks_;
};

/// Gives back what was taken from an arena within a scope.
class arena_scope {
 public:
  explicit arena_scope(arena& a) : arena_(a), mark_(a.used()) {}
  ~arena_scope() { arena_.rewind(mark_); }
  arena_scope(arena_scope const&) = delete;
  arena_scope& operator=(arena_scope const&) = delete;

 private:
  arena& arena_;
  index_t mark_;
};

}  // namespace seqmix::inline v0
