#pragma once

#include <algorithm>

#include <seqmix/kernels/cpu/simd.hpp>

/// Copies between views and the padded tiles that kernels compute on.
namespace seqmix::inline v0::kernels::detail {

/// Asks for a row of `count` elements that will be read soon.
template <class T>
void prefetch_row(T const* from, index_t count) noexcept {
  constexpr index_t line = 64 / index_t(sizeof(T));
  for (index_t c = 0; c < count; c += line) simd::prefetch(from, c);
}

/// Strided rows [count, channels] to rows of `to_row` elements, zero behind the channels.
template <class T>
void copy_rows(T const* from, index_t from_row, index_t count, index_t channels, T* to, index_t to_row) noexcept {
  constexpr index_t ahead = 8;  // rows of one head lie a whole token apart, too far for the processor to guess
  for (index_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch_row(from + (i + ahead) * from_row, channels);
    std::copy_n(from + i * from_row, channels, to + i * to_row);
    std::fill(to + i * to_row + channels, to + (i + 1) * to_row, T(0));
  }
}

/// Strided rows [count, channels] to [channels, count], rows `to_row` apart and filled with zeros to whole vectors.
template <class Isa, class T>
void transpose_vectors(T const* from, index_t from_row, index_t count, index_t channels, T* to,
                       index_t to_row) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  for (index_t c = 0; c < channels; c += w)
    for (index_t j = 0; j < count; j += w) {
      index_t const columns = (std::min)(w, channels - c);
      simd::vec<Isa, T> tile[std::size_t(w)];
      simd::for_vectors<Isa, T>(columns, [&](index_t, auto const& lanes) {
        for (index_t i = 0; i < w; ++i) {
          if (j + w + i < count) simd::prefetch(from + (j + w + i) * from_row, c);
          tile[i] = j + i < count ? lanes.load(from + (j + i) * from_row + c) : simd::vec<Isa, T>{};
        }
      });
      simd::transpose_square<Isa, T>(tile);
      for (index_t i = 0; i < columns; ++i) simd::store<Isa>(to + (c + i) * to_row + j, tile[i]);
    }
}
/// The same to rows of `width`, zero behind `count`.
template <class Isa, class T>
void transpose(T const* from, index_t from_row, index_t count, index_t channels, T* to, index_t width) noexcept {
  transpose_vectors<Isa>(from, from_row, count, channels, to, width);
  index_t const end = simd::padded<Isa, T>(count);
  for (index_t c = 0; c < channels && end < width; ++c) std::fill(to + c * width + end, to + (c + 1) * width, T(0));
}

/// Padded rows back into strided ones; added when the target was begun by an earlier head of a group.
template <class T>
void write_rows(T const* from, index_t from_row, index_t count, index_t channels, T scale, T* to, index_t to_row,
                bool add) noexcept {
  for (index_t i = 0; i < count; ++i)
    for (index_t c = 0; c < channels; ++c)
      to[i * to_row + c] = scale * from[i * from_row + c] + (add ? to[i * to_row + c] : T(0));
}

}  // namespace seqmix::inline v0::kernels::detail
