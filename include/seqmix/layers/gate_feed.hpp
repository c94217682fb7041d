#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/kernels/cpu/block_diagonal.hpp>
#include <seqmix/layers/low_rank.hpp>

namespace seqmix::inline v0 {

/// What makes a gate's raw values of a projection's columns (low rank) or of whole rows (block diagonal); a linear
/// feed is a projection of the layer and needs nothing here.
template <gate G>
class gate_feed {
 public:
  static constexpr bool from_low_rank = G::spec.from == feed::low_rank,
                        blocks = G::spec.from == feed::block_diagonal;

  gate_feed() = default;
  /// `width` raw values of rows of `source` channels; `rank` and `count` of blocks as the feed asks.
  gate_feed(parameter_room& room, index_t width, index_t source, index_t rank, index_t count, initialiser initial)
      : count_(count) {
    if constexpr (from_low_rank) up_ = low_rank(room, "gate.raw.up", width, rank, G::spec.inside, false, initial);
    if constexpr (blocks) {
      if (source % count != 0)
        throw option_error("seqmix: layer: gate_blocks must divide the " + std::to_string(source) +
                           " channels that they read, got " + std::to_string(count));
      blocks_ = room.matrix("gate.raw", width, source / count, initial);
    }
  }

  /// `x`: the low-rank columns, or the rows that blocks read.
  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> x_rc, view2<same<T>> raw_rc, arena& ws) const {
    if constexpr (from_low_rank) up_.forward(dev, base, x_rc, raw_rc, ws);
    if constexpr (blocks)
      for (index_t i = 0; i < G::spec.raws; ++i)
        kernels::block_diagonal_forward(dev, x_rc, block(base, i), columns(raw_rc, i), false, ws);
  }
  /// dx is written, or added to when `add` (blocks alone).
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> x_rc, view2<same<T>> d_raw_rc, view2<same<T>> dx_rc,
                bool add, same<T>* d_base, arena& ws) const {
    if constexpr (from_low_rank) up_.backward(dev, base, x_rc, view2<T const>(d_raw_rc), dx_rc, d_base, ws);
    if constexpr (blocks)
      for (index_t i = 0; i < G::spec.raws; ++i) {
        auto const dy = view2<T const>(columns(d_raw_rc, i));
        kernels::block_diagonal_backward_weight(dev, dy, x_rc, block(d_base, i), ws);
        kernels::block_diagonal_backward_input(dev, dy, block(base, i), dx_rc, add || i > 0, ws);
      }
  }

 private:
  static constexpr index_t raws = G::spec.raws > 0 ? G::spec.raws : 1;
  template <class T>
  view2<T> columns(view2<T> raw_rc, index_t i) const {
    index_t const width = raw_rc.extent[1] / raws;
    return raw_rc.slice(1, i * width, width);
  }
  /// Blocks [B,O,I] of raw value i.
  template <class T>
  view3<T> block(T* base, index_t i) const {
    index_t const rows = blocks_.rows / raws, per = rows / count_;
    return {blocks_.data(base) + i * rows * blocks_.columns, {count_, per, blocks_.columns}};
  }

  index_t count_ = 1;
  low_rank up_;
  weight blocks_;
};

}  // namespace seqmix::inline v0
