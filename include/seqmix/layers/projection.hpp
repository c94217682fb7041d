#pragma once

#include <vector>

#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/reference/rows.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

/// Several weights [O_i, D] that read the same input and write neighbouring columns of one activation [R, sum O_i].
/// Weights that lie behind one another in the buffer are multiplied in one product.
class projection {
 public:
  projection() = default;
  /// Adds one weight and returns its first column; 0 rows add nothing.
  index_t add(parameter_room& room, std::string_view name, index_t rows, index_t columns, initialiser initial) {
    index_t const at = width_;
    if (rows == 0) return at;
    auto const w = room.matrix(name, rows, columns, initial);
    width_ += rows;
    if (!parts_.empty()) {
      auto& last = parts_.back().w;
      if (last.columns == columns && last.offset + last.rows * columns == w.offset) {
        last.rows += rows;
        return at;
      }
    }
    parts_.push_back({w, at});
    return at;
  }
  index_t width() const noexcept { return width_; }

  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> x_rd, view2<same<T>> y_ro, arena& ws) const {
    for (auto const& p : parts_)
      kernels::linear_forward(dev, x_rd, p.w.of(base), y_ro.slice(1, p.column, p.w.rows), false, ws);
  }
  /// dx is written, weights are added to.
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> x_rd, view2<same<T> const> dy_ro,
                view2<same<T>> dx_rd, same<T>* d_base, arena& ws) const {
    bool add = false;
    for (auto const& p : parts_) {
      auto const dy = dy_ro.slice(1, p.column, p.w.rows);
      kernels::linear_backward_input(dev, dy, p.w.of(base), dx_rd, add, ws);
      kernels::linear_backward_weight(dev, dy, x_rd, p.w.of(d_base), ws);
      add = true;
    }
  }

 private:
  struct part {
    weight w;
    index_t column;
  };
  std::vector<part> parts_;
  index_t width_ = 0;
};

}  // namespace seqmix::inline v0
