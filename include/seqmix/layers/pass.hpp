#pragma once

#include <seqmix/concepts/selector.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/sequences.hpp>

namespace seqmix::inline v0 {

/// What one run through a model has in common for all layers.
template <class Device, class T>
struct pass {
  Device device;
  T const* parameters;
  sequences seq;
  bool training = false;  ///< a backward will follow
  selector_knobs knobs{};
  index_t capacity = 0;               ///< tokens that the states of this run can hold
  index_t const* position = nullptr;  ///< [N] tokens before each sequence, nullptr: none
  /// A value that one layer writes and later ones read (RWKV-7's first value), as wide as the layers'
  /// `stream_width()` asks. On the way back its derivative starts at zero, readers add to it, the writer takes it.
  view2<T> stream_rc{}, d_stream_rc{};

  index_t rows() const noexcept { return seq.rows(); }
};

}  // namespace seqmix::inline v0
