#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/block_diagonal.hpp>

/// Products with a block-diagonal weight. Wide blocks are matrix products of their own; narrow ones (mLSTM has them
/// 4 x 4) are computed with 64 tokens in lanes, several blocks between two transpositions. Either way every element
/// is one sum in ascending order.
namespace seqmix::inline v0::kernels {

namespace detail {

/// From this many inputs and outputs on, a block is a matrix product.
inline constexpr index_t wide_block = 32;

template <class T>
bool wide_blocks(view3<T const> w_boi) noexcept {
  return w_boi.extent[1] >= wide_block && w_boi.extent[2] >= wide_block;
}
/// One block as a matrix.
template <class T>
view2<T> block_of(view3<T> w_boi, index_t b) noexcept {
  return {w_boi.at(b), {w_boi.extent[1], w_boi.extent[2]}, {w_boi.stride[1], w_boi.stride[2]}};
}

template <class T>
void expect_contiguous_blocks(view2<T const> x_rc, view3<T const> w_boi, view2<T const> y_rc) {
  expect_contiguous("block_diagonal: inputs", x_rc);
  expect_contiguous("block_diagonal: weight", w_boi);
  expect_contiguous("block_diagonal: outputs", y_rc);
}

/// Narrow blocks: B of them, of `from` inputs and `to` outputs, the weight of output o and input i at
/// w + b w_block + o w_to + i w_from.
template <class Isa, class T>
struct narrow_blocks {
  static constexpr index_t lanes = rows_per_block;  ///< tokens side by side
  index_t B, from, to;
  T const* w;
  index_t w_block, w_to, w_from;

  /// Blocks between two transpositions: about a cache line of channels.
  index_t group() const noexcept { return (std::max)(index_t(1), 64 / (std::max)({from, to, index_t(1)})); }
  /// Numbers of one thread: inputs and outputs by channels, outputs by tokens.
  index_t room() const noexcept {
    return group() * (from + to) * lanes + lanes * simd::padded<Isa, T>(group() * to);
  }
  /// The tokens from row r on, all blocks.
  void rows(view2<T const> x_rc, index_t r, index_t count, view2<T> y_rc, bool add, T* room) const noexcept {
    T *const x_t = room, *const y_t = x_t + group() * from * lanes, *const y = y_t + group() * to * lanes;
    for (index_t first = 0; first < B; first += group()) {
      index_t const n = (std::min)(group(), B - first), row = simd::padded<Isa, T>(n * to);
      transpose_vectors<Isa>(x_rc.at(r, first * from), x_rc.stride[0], count, n * from, x_t, lanes);
      for (index_t b = 0; b < n; ++b) product(first + b, count, x_t + b * from * lanes, y_t + b * to * lanes);
      transpose_vectors<Isa>(static_cast<T const*>(y_t), lanes, n * to, count, y, row);
      write_rows(static_cast<T const*>(y), row, count, n * to, T(1), y_rc.at(r, first * to), y_rc.stride[0], add);
    }
  }

 private:
  void product(index_t b, index_t count, T const* x_t, T* y_t) const noexcept {
    constexpr index_t step = Isa::template lanes<T>;
    for (index_t o = 0; o < to; ++o) {
      T const* const weight = w + b * w_block + o * w_to;
      for (index_t j = 0; j < count; j += step) {
        simd::vec<Isa, T> total{};
        for (index_t i = 0; i < from; ++i) total += weight[i * w_from] * simd::load<Isa>(x_t + i * lanes + j);
        simd::store<Isa>(y_t + o * lanes + j, total);
      }
    }
  }
};

template <class Isa, class Threads, class T>
void narrow_blocks_product(device::basic_cpu<Isa, Threads> dev, narrow_blocks<Isa, T> const& blocks_of,
                           view2<T const> x_rc, view2<T> y_rc, bool add, arena& ws) {
  T* const scratch = ws.take<T>(thread_count(dev) * blocks_of.room());
  if (ws.measuring()) return;
  index_t const R = x_rc.extent[0];
  parallel_for(dev, blocks(R, rows_per_block), [&](index_t b, int thread) {
    index_t const r = b * rows_per_block;
    blocks_of.rows(x_rc, r, (std::min)(rows_per_block, R - r), y_rc, add, scratch + thread * blocks_of.room());
  });
}

}  // namespace detail

/// y (+)= x times the blocks of w. Work: 2 R B O I flops.
template <class Isa, class Threads, class T>
void block_diagonal_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rc, view3<same<T> const> w_boi,
                            view2<same<T>> y_rc, bool add, arena& ws) {
  detail::check_block_diagonal(x_rc, w_boi, view2<T const>(y_rc));
  detail::expect_contiguous_blocks(x_rc, w_boi, view2<T const>(y_rc));
  arena_scope const scope(ws);
  index_t const B = w_boi.extent[0], O = w_boi.extent[1], I = w_boi.extent[2];
  if (!detail::wide_blocks(w_boi))
    return detail::narrow_blocks_product(
        dev, detail::narrow_blocks<Isa, T>{B, I, O, w_boi.data, w_boi.stride[0], w_boi.stride[1], 1}, x_rc, y_rc,
        add, ws);
  for (index_t b = 0; b < B; ++b)
    linear_forward(dev, x_rc.slice(1, b * I, I), detail::block_of(w_boi, b), y_rc.slice(1, b * O, O), add, ws);
}

/// dx [R, B I] (+)= dy [R, B O] times the transposed blocks.
template <class Isa, class Threads, class T>
void block_diagonal_backward_input(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_rc,
                                   view3<same<T> const> w_boi, view2<same<T>> dx_rc, bool add, arena& ws) {
  detail::check_block_diagonal(view2<T const>(dx_rc), w_boi, dy_rc);
  detail::expect_contiguous_blocks(view2<T const>(dx_rc), w_boi, dy_rc);
  arena_scope const scope(ws);
  index_t const B = w_boi.extent[0], O = w_boi.extent[1], I = w_boi.extent[2];
  if (!detail::wide_blocks(w_boi))
    return detail::narrow_blocks_product(
        dev, detail::narrow_blocks<Isa, T>{B, O, I, w_boi.data, w_boi.stride[0], 1, w_boi.stride[1]}, dy_rc, dx_rc,
        add, ws);
  for (index_t b = 0; b < B; ++b)
    linear_backward_input(dev, dy_rc.slice(1, b * O, O), detail::block_of(w_boi, b), dx_rc.slice(1, b * I, I), add,
                          ws);
}

/// dw [B,O,I] += dy' x of every block; a narrow one adds the sums of 64 tokens in their order.
template <class Isa, class Threads, class T>
void block_diagonal_backward_weight(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_rc,
                                    view2<same<T> const> x_rc, view3<same<T>> dw_boi, arena& ws) {
  detail::check_block_diagonal(x_rc, view3<T const>(dw_boi), dy_rc);
  detail::expect_contiguous_blocks(x_rc, view3<T const>(dw_boi), dy_rc);
  arena_scope const scope(ws);
  index_t const B = dw_boi.extent[0], O = dw_boi.extent[1], I = dw_boi.extent[2], R = x_rc.extent[0];
  if (detail::wide_blocks(view3<T const>(dw_boi))) {
    for (index_t b = 0; b < B; ++b)
      linear_backward_weight(dev, dy_rc.slice(1, b * O, O), x_rc.slice(1, b * I, I), detail::block_of(dw_boi, b),
                             ws);
    return;
  }
  constexpr index_t lanes = detail::rows_per_block;
  index_t const group = detail::narrow_blocks<Isa, T>{B, I, O, nullptr, 0, 0, 0}.group();
  index_t const room = group * (I + O) * lanes;
  T* const scratch = ws.take<T>(thread_count(dev) * room);
  if (ws.measuring()) return;
  parallel_for(dev, detail::blocks(B, group), [&](index_t g, int thread) {
    index_t const first = g * group, n = (std::min)(group, B - first);
    T *const x_t = scratch + thread * room, *const dy_t = x_t + group * I * lanes;
    for (index_t r = 0; r < R; r += lanes) {
      index_t const count = (std::min)(lanes, R - r), whole = simd::padded<Isa, T>(count);
      detail::transpose_vectors<Isa>(x_rc.at(r, first * I), x_rc.stride[0], count, n * I, x_t, lanes);
      detail::transpose_vectors<Isa>(dy_rc.at(r, first * O), dy_rc.stride[0], count, n * O, dy_t, lanes);
      for (index_t b = 0; b < n; ++b)
        for (index_t o = 0; o < O; ++o)
          for (index_t i = 0; i < I; ++i)
            dw_boi(first + b, o, i) +=
                detail::dot<Isa>(dy_t + (b * O + o) * lanes, x_t + (b * I + i) * lanes, whole);
    }
  });
}

}  // namespace seqmix::inline v0::kernels
