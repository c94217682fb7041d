#pragma once

#include <seqmix/concepts/selector.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/sequences.hpp>

namespace seqmix::inline v0 {

/// Numbers that may change during a run, handed in beside the parameters and saved in checkpoints: those of the
/// selectors, and of the gates.
struct run_knobs : selector_knobs {
  double decay_offset = 0.0;  ///< delta: every gate's decay rate is multiplied by e^delta; 0: as trained
};

/// What one run through a model has in common for all layers.
template <class Device, class T>
struct pass {
  Device device;
  T const* parameters;
  sequences seq;
  bool training = false;  ///< a backward will follow
  run_knobs knobs{};
  index_t capacity = 0;               ///< tokens that the states of this run can hold
  index_t const* position = nullptr;  ///< [N] tokens before each sequence, nullptr: none
  /// A value that one layer writes and later ones read (RWKV-7's first value), as wide as the layers'
  /// `stream_width()` asks. On the way back its derivative starts at zero, readers add to it, the writer takes it.
  view2<T> stream_rc{}, d_stream_rc{};

  index_t rows() const noexcept { return seq.rows(); }
  /// Whether row r is the first token of its sequence, carried tokens counted.
  bool starts(index_t r) const noexcept {
    index_t const n = seq.holder(r);
    return r == seq.begin(n) && (!position || position[n] == 0);
  }
};

}  // namespace seqmix::inline v0
