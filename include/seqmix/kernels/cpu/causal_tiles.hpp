#pragma once

#include <seqmix/kernels/cpu/tile_product.hpp>

namespace seqmix::inline v0::kernels::detail {

/// The causal half of products between n tokens and m n rows: computed in two parts, so that most of what is zero
/// is left out. `row` is the length of a row of weights.
template <class Isa, class T, int Rows>
struct causal_tiles {
  index_t count, row;

  index_t half() const noexcept { return count / 2; }
  index_t rest() const noexcept { return count - half(); }
  static constexpr index_t columns(index_t tokens) noexcept { return simd::padded<Isa, T>(Rows * tokens); }
  /// c_ij = sum over `depth` of a_i b_j for the rows j of tokens up to i at least.
  void products(index_t depth, tile_operand<T> a, T const* b, T* c) const noexcept {
    index_t const h = half();
    tile_product<Isa>(h, columns(h), depth, a, b, row, c, row, false);
    tile_product<Isa>(rest(), columns(count), depth, {a.data + h * a.row, a.row, a.column}, b, row, c + h * row,
                      row, false);
  }
  /// to_i (+)= sum over j of weight_ij x_j, for x and to with rows of `width`.
  void sums(T const* weight, T const* x, index_t width, T* to, bool add) const noexcept {
    index_t const h = half();
    tile_product<Isa>(h, width, Rows * h, tile_operand<T>{weight, row, 1}, x, width, to, width, add);
    tile_product<Isa>(rest(), width, Rows * count, tile_operand<T>{weight + h * row, row, 1}, x, width,
                      to + h * width, width, add);
  }
  /// The same row by row, each over what its token sees: for rows x that may hold what a weight of 0 does not keep
  /// out, infinities and NaN.
  void sums_of_seen(T const* weight, T const* x, index_t width, T* to, bool add) const noexcept {
    for (index_t i = 0; i < count; ++i)
      tile_product<Isa>(1, width, Rows * (i + 1), tile_operand<T>{weight + i * row, row, 1}, x, width,
                        to + i * width, width, add);
  }
  /// to_j (+)= sum over i of weight_ij x_i.
  void sums_back(T const* weight, T const* x, index_t width, T* to, bool add) const noexcept {
    index_t const h = half();
    tile_product<Isa>(Rows * h, width, count, tile_operand<T>{weight, 1, row}, x, width, to, width, add);
    tile_product<Isa>(Rows * rest(), width, rest(), tile_operand<T>{weight + h * row + Rows * h, 1, row},
                      x + h * width, width, to + Rows * h * width, width, add);
  }
};

}  // namespace seqmix::inline v0::kernels::detail
