#pragma once

#include <array>
#include <vector>

#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/rows.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

/// A bias per column of an activation, as layers add it behind a product.
class column_bias {
 public:
  column_bias() = default;
  column_bias(parameter_room& room, std::string_view name, index_t columns, initialiser initial)
      : b_(room.vector(name, columns, initial)) {}
  template <class Device, class T>
  void add(Device dev, T const* base, view2<same<T>> y_rc) const {
    if (!b_) return;
    T const* const b = b_.data(base);
    kernels::detail::for_row_blocks(dev, y_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < y_rc.extent[1]; ++c) y_rc(r, c) += b[c];
    });
  }
  /// Partial sums over fixed blocks of rows, added in order.
  template <class Device, class T>
  void backward(Device dev, view2<T const> dy_rc, same<T>* d_base, arena& ws) const {
    if (!b_) return;
    arena_scope const scope(ws);
    index_t const C = dy_rc.extent[1],
                  count = kernels::detail::blocks(dy_rc.extent[0], kernels::detail::rows_per_block);
    T* const partial = ws.take<T>(count * C);
    if (ws.measuring()) return;
    kernels::detail::for_row_blocks(dev, dy_rc.extent[0], [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + b * C;
      std::fill_n(sums, C, T(0));
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < C; ++c) sums[c] += dy_rc(r, c);
    });
    kernels::detail::add_partials(partial, count, C, b_.data(d_base));
  }

 private:
  weight b_;
};

/// Several weights [O_i, D] that write neighbouring columns of one activation [R, sum O_i]; each reads one of the
/// inputs it is given. Weights that lie behind one another in the buffer and read the same input are multiplied in
/// one product.
class projection {
 public:
  projection() = default;
  /// `bias`: nullptr for none. `input` says which of the inputs this weight reads.
  struct entry {
    initialiser initial;
    bool bias = false;
    std::size_t input = 0;
  };
  /// Adds one weight and returns its first column; 0 rows add nothing.
  index_t add(parameter_room& room, std::string_view name, index_t rows, index_t columns, entry const& e) {
    index_t const at = width_;
    if (rows == 0) return at;
    auto const w = room.matrix(name, rows, columns, e.initial);
    width_ += rows;
    if (e.bias)
      biases_.push_back({column_bias(room, std::string(name) + ".bias", rows, init::constant(0.0)), at, rows});
    if (!parts_.empty()) {
      auto& last = parts_.back();
      if (last.input == e.input && last.w.columns == columns && last.w.offset + last.w.rows * columns == w.offset) {
        last.w.rows += rows;
        return at;
      }
    }
    parts_.push_back({w, at, e.input});
    return at;
  }
  index_t add(parameter_room& room, std::string_view name, index_t rows, index_t columns, initialiser initial) {
    return add(room, name, rows, columns, entry{initial});
  }
  index_t width() const noexcept { return width_; }

  template <class Device, class T, class X, std::size_t N>
  void forward(Device dev, T const* base, std::array<view2<X>, N> const& x_rd, view2<same<T>> y_ro,
               arena& ws) const {
    for (auto const& p : parts_)
      kernels::linear_forward(dev, view2<T const>(x_rd[p.input]), p.w.of(base), y_ro.slice(1, p.column, p.w.rows),
                              false, ws);
    for (auto const& b : biases_) b.bias.add(dev, base, y_ro.slice(1, b.column, b.columns));
  }
  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> x_rd, view2<same<T>> y_ro, arena& ws) const {
    forward(dev, base, std::array{x_rd}, y_ro, ws);
  }
  /// dx is written where a weight reads its input, weights are added to.
  template <class Device, class T, class X, std::size_t N>
  void backward(Device dev, T const* base, std::array<view2<X>, N> const& x_rd, view2<same<T> const> dy_ro,
                std::array<view2<T>, N> const& dx_rd, same<T>* d_base, arena& ws) const {
    std::array<bool, N> add{};
    for (auto const& p : parts_) {
      auto const dy = dy_ro.slice(1, p.column, p.w.rows);
      kernels::linear_backward_input(dev, dy, p.w.of(base), dx_rd[p.input], add[p.input], ws);
      kernels::linear_backward_weight(dev, dy, view2<T const>(x_rd[p.input]), p.w.of(d_base), ws);
      add[p.input] = true;
    }
    for (auto const& b : biases_) b.bias.backward(dev, dy_ro.slice(1, b.column, b.columns), d_base, ws);
  }
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> x_rd, view2<same<T> const> dy_ro,
                view2<same<T>> dx_rd, same<T>* d_base, arena& ws) const {
    backward(dev, base, std::array{x_rd}, dy_ro, std::array<view2<T>, 1>{dx_rd}, d_base, ws);
  }

 private:
  struct part {
    weight w;
    index_t column;
    std::size_t input;
  };
  struct part_bias {
    column_bias bias;
    index_t column, columns;
  };
  std::vector<part> parts_;
  std::vector<part_bias> biases_;
  index_t width_ = 0;
};

}  // namespace seqmix::inline v0
