#pragma once

#include <type_traits>

#include <seqmix/kernels/cpu/simd.hpp>

namespace seqmix::inline v0::kernels {

/// One factor of a tile product: element (i, k) at data[i * row + k * column].
template <class T>
struct tile_operand {
  T const* data;
  index_t row, column;
};

namespace detail {

/// C[Rows, Vectors lanes] (+)= A B for a few rows held in registers. The order over k is the same for every tile
/// shape, so an element's bits do not depend on the tile, the tail or the number of rows it is computed with.
template <class Isa, class T, int Rows, int Vectors>
SEQMIX_INLINE void register_tile(index_t depth, tile_operand<T> a, T const* b, index_t b_row, T* c, index_t c_row,
                                 bool accumulate) noexcept {
  using V = simd::vec<Isa, T>;
  constexpr index_t w = Isa::template lanes<T>;
  V acc[std::size_t(Rows)][std::size_t(Vectors)];
  SEQMIX_UNROLL(8)
  for (int i = 0; i < Rows; ++i) {
    SEQMIX_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) acc[i][v] = accumulate ? simd::load<Isa>(c + i * c_row + v * w) : V{};
  }
  for (index_t k = 0; k < depth; ++k) {
    T const* const bk = b + k * b_row;
    V right[std::size_t(Vectors)];
    SEQMIX_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) right[v] = simd::load<Isa>(bk + v * w);
    SEQMIX_UNROLL(8)
    for (int i = 0; i < Rows; ++i) {
      V const left = simd::broadcast<Isa, T>(a.data[i * a.row + k * a.column]);
      SEQMIX_UNROLL(4)
      for (int v = 0; v < Vectors; ++v) acc[i][v] += left * right[v];
    }
  }
  SEQMIX_UNROLL(8)
  for (int i = 0; i < Rows; ++i) {
    SEQMIX_UNROLL(4)
    for (int v = 0; v < Vectors; ++v) simd::store<Isa>(c + i * c_row + v * w, acc[i][v]);
  }
}

template <class Isa, class T, int Vectors>
void column_panel(index_t rows, index_t depth, tile_operand<T> a, T const* b, index_t b_row, T* c, index_t c_row,
                  bool accumulate) noexcept {
  index_t i = 0;
  auto const run = [&]<int Rows>(std::integral_constant<int, Rows>) {
    register_tile<Isa, T, Rows, Vectors>(depth, {a.data + i * a.row, a.row, a.column}, b, b_row, c + i * c_row,
                                         c_row, accumulate);
    i += Rows;
  };
  while (i + 6 <= rows) run(std::integral_constant<int, 6>{});
  if (i + 4 <= rows) run(std::integral_constant<int, 4>{});
  if (i + 2 <= rows) run(std::integral_constant<int, 2>{});
  if (i < rows) run(std::integral_constant<int, 1>{});
}

}  // namespace detail

/// C[rows, columns] = A[rows, depth] B[depth, columns], or += when `accumulate`. `columns` is a multiple of the
/// vector length and B's and C's rows are padded to it; A may be transposed by its strides. Every element is the
/// sum over k in ascending order, whatever the tile: hard selections depend on that. Work: 2 rows columns depth.
template <class Isa, class T>
void tile_product(index_t rows, index_t columns, index_t depth, tile_operand<T> a, T const* b, index_t b_row, T* c,
                  index_t c_row, bool accumulate) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  constexpr int most = Isa::registers >= 32 ? 4 : 2;
  index_t j = 0;
  for (; j + most * w <= columns; j += most * w)
    detail::column_panel<Isa, T, most>(rows, depth, a, b + j, b_row, c + j, c_row, accumulate);
  if constexpr (most > 2) {
    if (j + 3 * w <= columns) {
      detail::column_panel<Isa, T, 3>(rows, depth, a, b + j, b_row, c + j, c_row, accumulate);
      j += 3 * w;
    } else if (j + 2 * w <= columns) {
      detail::column_panel<Isa, T, 2>(rows, depth, a, b + j, b_row, c + j, c_row, accumulate);
      j += 2 * w;
    }
  }
  for (; j < columns; j += w)
    detail::column_panel<Isa, T, 1>(rows, depth, a, b + j, b_row, c + j, c_row, accumulate);
}

}  // namespace seqmix::inline v0::kernels
