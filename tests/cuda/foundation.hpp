#pragma once

#include <cstddef>
#include <cstdint>

#include <seqmix/tensor/sequences.hpp>
#include <seqmix/tensor/storage.hpp>

/// Kernels that do one thing of what all kernels stand on, and start it as they do. Pointers lead to device memory.
namespace seqmix::testing {

/// How the factors of a tile product lie in memory.
enum class lies { row_major, column_major };

/// c = A B with A 16 x depth and B depth x 8 Columns, through tiles in shared memory.
template <lies A, lies B, class T, int Columns>
void tile_product(T const* a, T const* b, float* c, int depth);

/// One block copies [valid_rows, valid_columns] of a matrix into a tile of rows x columns with padded rows; out is
/// that tile without its padding.
template <class T>
void tile_load(T const* from, index_t row_stride, index_t valid_rows, index_t valid_columns, T* out, int rows,
               int columns);

/// Numbers 100 row + column, written by where a fragment says that its elements are, and stored in a tile as T.
template <class T>
void fragment_places(T* out_16x24);

/// Per row of a 16 x 24 matrix: over the lanes that share it, the sum and the maximum of each lane's own numbers.
void fragment_rows(float const* x_16x24, float* sums_16, float* maxima_16);

/// Sixteen-bit numbers in device code: widened[i] = float of pattern i, narrowed[i] = bits of x[i] stored as T.
template <class T>
void widen(float* widened_65536);
template <class T>
void narrow(float const* x, std::uint16_t* narrowed, index_t count);

/// Where sequence n begins and how long it is, [N] each, as device code sees it.
void places_of(sequences const& seq, index_t const* device_offsets, bool dry, index_t* begins, index_t* lengths);

/// o[r,h,c] = x[r,h,c] + g[r,h] through device views with any strides, from row `first` on.
void add_through_views(view3<float const> x_rhc, view2<float const> g_rh, view3<float> o_rhc, index_t first = 0);

/// Adds one to every number that a thread of the grid stands for: blocks x threads of them, through shared_bytes of
/// dynamic shared memory.
void count_up(bool dry, index_t blocks_x, index_t blocks_y, int threads, std::size_t shared_bytes, int* counts);

}  // namespace seqmix::testing
