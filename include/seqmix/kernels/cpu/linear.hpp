#pragma once

#include <algorithm>

#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/kernels/cpu/tile_product.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// The big matrix products on the library's own tile: every element is one sum in ascending order, whatever the
/// block, so that the same token gives the same bits in a batch, in a packed row and in a single step
/// (docs/adr/0003).
namespace seqmix::inline v0::kernels {

namespace detail {

inline constexpr index_t linear_rows = 128;   ///< tokens per block
inline constexpr index_t linear_strip = 64;   ///< output channels per block of a weight gradient
inline constexpr index_t linear_depth = 256;  ///< terms of a sum between two visits of the result

constexpr index_t blocks(index_t n, index_t block) noexcept { return (n + block - 1) / block; }

/// Columns of a panel: what one register tile covers.
template <class Isa, class T>
inline constexpr index_t panel_width = (Isa::registers >= 32 ? 4 : 2) * Isa::template lanes<T>;

/// Room of one thread for the last columns, which do not fill a vector.
template <class Isa, class T>
constexpr index_t product_scratch() noexcept {
  return (linear_rows + linear_depth) * panel_width<Isa, T>;
}

/// C [rows, columns] = A B, or += when `add`; B [depth, columns] and C are strided by rows, nothing is padded.
template <class Isa, class T>
void block_product(index_t rows, index_t columns, index_t depth, tile_operand<T> a, T const* b, index_t b_row, T* c,
                   index_t c_row, bool add, T* scratch) noexcept {
  constexpr index_t panel = panel_width<Isa, T>;
  for (index_t j = 0; j < columns; j += panel) {
    index_t const width = (std::min)(panel, columns - j), wide = simd::padded<Isa, T>(width);
    bool const whole = width == wide;
    T* const c_tile = whole ? c + j : scratch;
    index_t const c_tile_row = whole ? c_row : wide;
    if (!whole && add) copy_rows(c + j, c_row, rows, width, c_tile, wide);
    for (index_t k = 0; k < depth; k += linear_depth) {
      index_t const terms = (std::min)(linear_depth, depth - k);
      T const* b_tile = b + k * b_row + j;
      index_t b_tile_row = b_row;
      if (!whole) {
        T* const packed = scratch + linear_rows * panel;
        copy_rows(b_tile, b_row, terms, width, packed, wide);
        b_tile = packed;
        b_tile_row = wide;
      }
      tile_product<Isa>(rows, wide, terms, tile_operand<T>{a.data + k * a.column, a.row, a.column}, b_tile,
                        b_tile_row, c_tile, c_tile_row, add || k > 0);
    }
    if (!whole) write_rows(c_tile, wide, rows, width, T(1), c + j, c_row, false);
  }
}

/// Rows of x, y for every block of tokens.
template <class Isa, class Threads, class T>
void token_blocks_product(device::basic_cpu<Isa, Threads> dev, view2<T const> x_rk, T const* b, index_t b_row,
                          view2<T> y_rc, bool add, arena& ws) {
  T* const scratch = ws.take<T>(thread_count(dev) * product_scratch<Isa, T>());
  index_t const R = x_rk.extent[0];
  parallel_for(dev, blocks(R, linear_rows), [&](index_t block, int thread) {
    index_t const r = block * linear_rows;
    block_product<Isa>((std::min)(linear_rows, R - r), y_rc.extent[1], x_rk.extent[1],
                       tile_operand<T>{x_rk.at(r), x_rk.stride[0], 1}, b, b_row, y_rc.at(r), y_rc.stride[0], add,
                       scratch + thread * product_scratch<Isa, T>());
  });
}

}  // namespace detail

/// y [R,O] (+)= x [R,I] w [O,I]'. Work: 2 R I O flops. Workspace: the transposed weight.
template <class Isa, class Threads, class T>
void linear_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_ri, view2<same<T> const> w_oi,
                    view2<same<T>> y_ro, bool add, arena& ws) {
  arena_scope const scope(ws);
  index_t const O = w_oi.extent[0], I = w_oi.extent[1], row = simd::padded<Isa, T>(O);
  T* const transposed = ws.take<T>(I * row);
  if (!ws.measuring())
    parallel_for(dev, detail::blocks(O, detail::linear_strip), [&](index_t block, int) {
      index_t const begin = block * detail::linear_strip, end = (std::min)(O, begin + detail::linear_strip);
      detail::transpose_vectors<Isa>(w_oi.at(begin), w_oi.stride[0], end - begin, I, transposed + begin, row);
    });
  detail::token_blocks_product<Isa>(dev, x_ri, static_cast<T const*>(transposed), row, y_ro, add, ws);
}

/// dx [R,I] (+)= dy [R,O] w [O,I]
template <class Isa, class Threads, class T>
void linear_backward_input(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_ro, view2<same<T> const> w_oi,
                           view2<same<T>> dx_ri, bool add, arena& ws) {
  arena_scope const scope(ws);
  detail::token_blocks_product<Isa>(dev, dy_ro, w_oi.data, w_oi.stride[0], dx_ri, add, ws);
}

/// dw [O,I] += dy [R,O]' x [R,I]; cut by output channels, so that every sum over tokens has one order.
template <class Isa, class Threads, class T>
void linear_backward_weight(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_ro, view2<same<T> const> x_ri,
                            view2<same<T>> dw_oi, arena& ws) {
  arena_scope const scope(ws);
  T* const scratch = ws.take<T>(thread_count(dev) * detail::product_scratch<Isa, T>());
  index_t const O = dw_oi.extent[0];
  parallel_for(dev, detail::blocks(O, detail::linear_strip), [&](index_t block, int thread) {
    index_t const o = block * detail::linear_strip;
    detail::block_product<Isa>((std::min)(detail::linear_strip, O - o), dw_oi.extent[1], dy_ro.extent[0],
                               tile_operand<T>{dy_ro.at(0, o), 1, dy_ro.stride[0]}, x_ri.data, x_ri.stride[0],
                               dw_oi.at(o), dw_oi.stride[0], true,
                               scratch + thread * detail::product_scratch<Isa, T>());
  });
}

}  // namespace seqmix::inline v0::kernels
