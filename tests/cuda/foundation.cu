#include "foundation.hpp"
#include <seqmix/kernels/cuda/warp_tile.cuh>

namespace seqmix::testing {
namespace {

using namespace kernels::cuda;

constexpr layout layout_of(lies l) { return l == lies::row_major ? layout::row_major : layout::column_major; }

template <class T>
__device__ T* shared_memory() {
  extern __shared__ uint4 raw[];
  return reinterpret_cast<T*>(raw);
}

template <layout A, layout B, class T, int Columns>
__global__ void product_kernel(T const* a, T const* b, float* c, int depth) {
  int const a_rows = A == layout::row_major ? 16 : depth, a_columns = A == layout::row_major ? depth : 16;
  int const b_rows = B == layout::row_major ? depth : 8 * Columns,
            b_columns = B == layout::row_major ? 8 * Columns : depth;
  int const lda = padded_row<T>(a_columns), ldb = padded_row<T>(b_columns);
  T* const a_tile = shared_memory<T>();
  T* const b_tile = a_tile + a_rows * lda;
  load_tile(a_tile, lda, a_rows, a_columns, a, a_columns, a_rows, a_columns);
  load_tile(b_tile, ldb, b_rows, b_columns, b, b_columns, b_rows, b_columns);
  __syncthreads();
  fragment<Columns> f;
  f.fill(0.0F);
  multiply_add<A, B>(f, a_tile, lda, b_tile, ldb, depth);
  f.each([&](float& x, int row, int column) { c[row * 8 * Columns + column] = x; });
}

template <class T>
__global__ void load_kernel(T const* from, index_t row_stride, index_t valid_rows, index_t valid_columns, T* out,
                            int rows, int columns) {
  T* const tile = shared_memory<T>();
  int const ld = padded_row<T>(columns);
  load_tile(tile, ld, rows, columns, from, row_stride, valid_rows, valid_columns);
  __syncthreads();
  for (int i = int(threadIdx.x); i < rows * columns; i += int(blockDim.x))
    out[i] = tile[i / columns * ld + i % columns];
}

template <class T>
__global__ void places_kernel(T* out) {
  fragment<3> f;
  f.each([](float& x, int row, int column) { x = 100.0F * float(row) + float(column); });
  T* const tile = shared_memory<T>();
  int const ld = padded_row<T>(24);
  store_fragment(f, tile, ld);
  __syncwarp();
  for (int i = int(threadIdx.x); i < 16 * 24; i += warp) out[i] = tile[i / 24 * ld + i % 24];
}

__global__ void rows_kernel(float const* x, float* sums, float* maxima) {
  fragment<3> f;
  f.each([&](float& value, int row, int column) { value = x[row * 24 + column]; });
  float sum[2] = {0.0F, 0.0F}, most[2] = {-INFINITY, -INFINITY};
  for (int n = 0; n < 3; ++n)
    for (int e = 0; e < 4; ++e) {
      sum[e / 2] += f.x[n][e];
      most[e / 2] = fmaxf(most[e / 2], f.x[n][e]);
    }
  for (int half = 0; half < 2; ++half) {
    float const s = row_sum(sum[half]), m = row_max(most[half]);
    // All four lanes of a row hold the same bits: the last one writes.
    if (threadIdx.x % 4 == 3) {
      sums[fragment<3>::row(2 * half)] = s;
      maxima[fragment<3>::row(2 * half)] = m;
    }
  }
}

__device__ index_t this_thread() { return index_t(blockIdx.x) * blockDim.x + threadIdx.x; }

template <class T>
__global__ void widen_kernel(float* widened) {
  auto const i = this_thread();
  T x;
  x.bits = std::uint16_t(i);
  widened[i] = to_float(x);
}
template <class T>
__global__ void narrow_kernel(float const* x, std::uint16_t* narrowed, index_t count) {
  auto const i = this_thread();
  if (i < count) narrowed[i] = from_float<T>(x[i]).bits;
}

__global__ void ranges_kernel(row_ranges rows, index_t count, index_t* begins, index_t* lengths) {
  auto const n = this_thread();
  if (n >= count) return;
  begins[n] = rows.begin(n);
  lengths[n] = rows.length(n);
}

__global__ void views_kernel(heads<float const> x, table<float const> g, heads<float> o, index_t first,
                             index_t rows, index_t H, index_t channels) {
  auto const i = this_thread();
  if (i >= (rows - first) * H * channels) return;
  index_t const r = first + i / (H * channels), h = i / channels % H, c = i % channels;
  o.at(r, h)[c] = x.at(r, h)[c] + g(r, h);
}

__global__ void count_kernel(int* counts) {
  auto const i = (index_t(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  int* const own = shared_memory<int>();
  own[threadIdx.x] = counts[i] + 1;
  __syncthreads();
  counts[i] = own[threadIdx.x];
}

}  // namespace

template <lies A, lies B, class T, int Columns>
void tile_product(T const* a, T const* b, float* c, int depth) {
  auto const shared =
      (std::size_t(depth) + 16 + 8 * Columns) * std::size_t(padded_row<T>(depth + 8 * Columns)) * sizeof(T);
  launch({}, "tile product", product_kernel<layout_of(A), layout_of(B), T, Columns>, blocks(1), warp, shared, a, b,
         c, depth);
}
template <class T>
void tile_load(T const* from, index_t row_stride, index_t valid_rows, index_t valid_columns, T* out, int rows,
               int columns) {
  launch({}, "tile load", load_kernel<T>, blocks(1), 64,
         std::size_t(rows) * std::size_t(padded_row<T>(columns)) * sizeof(T), from, row_stride, valid_rows,
         valid_columns, out, rows, columns);
}
template <class T>
void fragment_places(T* out) {
  launch({}, "fragment places", places_kernel<T>, blocks(1), warp, 16 * std::size_t(padded_row<T>(24)) * sizeof(T),
         out);
}
void fragment_rows(float const* x, float* sums, float* maxima) {
  launch({}, "fragment rows", rows_kernel, blocks(1), warp, 0, x, sums, maxima);
}
template <class T>
void widen(float* widened) {
  launch({}, "widen", widen_kernel<T>, blocks(65536 / 256), 256, 0, widened);
}
template <class T>
void narrow(float const* x, std::uint16_t* narrowed, index_t count) {
  launch({}, "narrow", narrow_kernel<T>, blocks(divided_up(count, 256)), 256, 0, x, narrowed, count);
}
void places_of(sequences const& seq, index_t const* device_offsets, bool dry, index_t* begins, index_t* lengths) {
  device::cuda const dev{.offsets = device_offsets, .dry = dry};
  launch(dev, "places", ranges_kernel, blocks(divided_up(seq.count(), 32)), 32, 0, row_ranges(dev, seq),
         seq.count(), begins, lengths);
}
void add_through_views(view3<float const> x_rhc, view2<float const> g_rh, view3<float> o_rhc, index_t first) {
  auto const& n = x_rhc.extent;
  launch({}, "views", views_kernel, blocks(divided_up(n[0] * n[1] * n[2], 64)), 64, 0, heads<float const>(x_rhc),
         table<float const>(g_rh), heads<float>(o_rhc), first, n[0], n[1], n[2]);
}
void count_up(bool dry, index_t blocks_x, index_t blocks_y, int threads, std::size_t shared_bytes, int* counts) {
  launch({.dry = dry}, "count up", count_kernel, blocks(blocks_x, blocks_y), threads, shared_bytes, counts);
}

#define PRODUCTS(T, Columns)                                                                                       \
  template void tile_product<lies::row_major, lies::row_major, T, Columns>(T const*, T const*, float*, int);       \
  template void tile_product<lies::row_major, lies::column_major, T, Columns>(T const*, T const*, float*, int);    \
  template void tile_product<lies::column_major, lies::row_major, T, Columns>(T const*, T const*, float*, int);    \
  template void tile_product<lies::column_major, lies::column_major, T, Columns>(T const*, T const*, float*, int);
PRODUCTS(float, 8)
PRODUCTS(float, 3)
PRODUCTS(bfloat16, 8)
PRODUCTS(bfloat16, 3)
PRODUCTS(float16, 8)
PRODUCTS(float16, 1)

#define STORED(T)                                                                                                  \
  template void tile_load<T>(T const*, index_t, index_t, index_t, T*, int, int);                                   \
  template void fragment_places<T>(T*);
STORED(float)
STORED(bfloat16)
STORED(float16)

#define SIXTEEN_BITS(T)                                                                                            \
  template void widen<T>(float*);                                                                                  \
  template void narrow<T>(float const*, std::uint16_t*, index_t);
SIXTEEN_BITS(bfloat16)
SIXTEEN_BITS(float16)

}  // namespace seqmix::testing
