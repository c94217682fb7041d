#pragma once

#include <algorithm>
#include <span>
#include <string>

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// How the rows of an activation [R, ...] divide into N sequences: a batch of equal lengths, or one packed row of
/// tokens cut by offsets [N+1] (empty sequences allowed). Everything counted from a sequence's start (state,
/// convolution, positions, chunk grid, window, loss targets) restarts at each boundary.
/// Does not own the offsets.
class sequences {
 public:
  sequences() = default;
  static sequences batch(index_t count, index_t length) {
    if (count < 0 || length < 0)
      throw shape_error("seqmix: sequences: count and length must not be negative, got " + std::to_string(count) +
                        " and " + std::to_string(length));
    return sequences(count, length, nullptr);
  }
  static sequences packed(std::span<index_t const> offsets) {
    if (offsets.empty() || offsets.front() != 0) throw shape_error("seqmix: sequences: offsets must start with 0");
    for (std::size_t i = 1; i < offsets.size(); ++i)
      if (offsets[i] < offsets[i - 1])
        throw shape_error("seqmix: sequences: offset " + std::to_string(i) + " is " + std::to_string(offsets[i]) +
                          ", less than the one before, " + std::to_string(offsets[i - 1]));
    return sequences(index_t(offsets.size()) - 1, 0, offsets.data());
  }

  /// Equal lengths, so that no offsets are needed.
  bool is_batch() const noexcept { return offsets_ == nullptr; }
  index_t count() const noexcept { return count_; }
  index_t rows() const noexcept { return begin(count_); }
  index_t begin(index_t n) const noexcept { return offsets_ ? offsets_[n] : n * length_; }
  index_t end(index_t n) const noexcept { return begin(n + 1); }
  index_t length(index_t n) const noexcept { return end(n) - begin(n); }
  /// The sequence that holds row r of [0, rows()).
  index_t holder(index_t r) const noexcept {
    if (!offsets_) return r / length_;
    return index_t(std::upper_bound(offsets_, offsets_ + count_ + 1, r) - offsets_) - 1;
  }
  index_t longest() const noexcept {
    if (!offsets_) return count_ > 0 ? length_ : 0;
    index_t most = 0;
    for (index_t n = 0; n < count_; ++n) most = length(n) > most ? length(n) : most;
    return most;
  }

 private:
  sequences(index_t count, index_t length, index_t const* offsets)
      : count_(count), length_(length), offsets_(offsets) {}
  index_t count_ = 0;
  index_t length_ = 0;
  index_t const* offsets_ = nullptr;
};

}  // namespace seqmix::inline v0
