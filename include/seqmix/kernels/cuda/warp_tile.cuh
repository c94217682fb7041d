#pragma once

#include <seqmix/kernels/cuda/launch.cuh>
#include <seqmix/kernels/cuda/storage.cuh>

/// Products of small tiles in shared memory, by one warp each: tensor cores (mma.sync m16n8k16) for sixteen-bit
/// numbers, fused multiply-adds in the same places for float. Sums over the depth are added in ascending order and
/// never depend on where in a tile an element stands.
namespace seqmix::inline v0::kernels::cuda {

/// How a factor lies in shared memory.
enum class layout { row_major, column_major };

/// Elements between rows of a tile in shared memory: 16 bytes of padding keep rows aligned and banks apart.
template <class T>
constexpr __host__ __device__ int padded_row(int columns) {
  return columns + vector_elements<T>;
}

/// A tile of 16 x 8 Columns numbers spread over a warp: of each 8 columns a lane holds rows r and r + 8, columns c
/// and c + 1, with r = lane / 4, c = 2 (lane % 4).
template <int Columns>
struct fragment {
  static constexpr int columns = 8 * Columns;
  float x[Columns][4];

  __device__ static int row(int element) { return int(threadIdx.x % warp) / 4 + element / 2 * 8; }
  __device__ static int column(int block, int element) {
    return 8 * block + int(threadIdx.x % 4) * 2 + element % 2;
  }
  __device__ void fill(float value) {
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = value;
  }
  /// f(element, row, column) for all the lane's elements.
  template <class F>
  __device__ void each(F const& f) {
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(x[n][e], row(e), column(n, e));
  }
};

/// Over the four lanes that share a row of a fragment.
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}

namespace detail {

__device__ inline unsigned shared_address(void const* p) { return unsigned(__cvta_generic_to_shared(p)); }
template <bool Transposed>
__device__ void load_matrices(unsigned (&m)[4], void const* row) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
template <bool Transposed>
__device__ void load_two_matrices(unsigned (&m)[4], void const* row) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(shared_address(row))
                 : "memory");
}

template <class T>
__device__ void mma(float (&c)[4], unsigned const (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bfloat16>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Where a lane's row of the next 8 x 8 matrices begins: matrices 0 to 3 are (0,0), (1,0), (0,1), (1,1) in units of
/// 8 along (`inner`, `outer`).
template <class T>
__device__ T const* left_rows(T const* a, int lda, int k, layout order) {
  int const lane = int(threadIdx.x % warp), m = lane / 8, low = lane % 8;
  if (order == layout::row_major) return a + (m % 2 * 8 + low) * lda + k + m / 2 * 8;
  return a + (k + m / 2 * 8 + low) * lda + m % 2 * 8;
}
template <class T>
__device__ T const* right_rows(T const* b, int ldb, int k, int column, layout order) {
  int const lane = int(threadIdx.x % warp), m = lane / 8, low = lane % 8;
  if (order == layout::column_major) return b + (column + m / 2 * 8 + low) * ldb + k + m % 2 * 8;
  return b + (k + m % 2 * 8 + low) * ldb + column + m / 2 * 8;
}

}  // namespace detail

/// c += A B with A 16 x depth and B depth x 8 Columns in shared memory; depth a multiple of 16, rows 16 bytes apart
/// in multiples of 16. Column-major A lies as depth rows of 16, column-major B as 8 Columns rows of depth.
template <layout A, layout B, class T, int Columns>
__device__ void multiply_add(fragment<Columns>& c, T const* a, int lda, T const* b, int ldb, int depth) {
  if constexpr (sizeof(T) == 2) {
    for (int k = 0; k < depth; k += 16) {
      unsigned left[4], right[4];
      detail::load_matrices<A == layout::column_major>(left, detail::left_rows(a, lda, k, A));
#pragma unroll
      for (int n = 0; n + 1 < Columns; n += 2) {
        detail::load_matrices<B == layout::row_major>(right, detail::right_rows(b, ldb, k, 8 * n, B));
        detail::mma<T>(c.x[n], left, right[0], right[1]);
        detail::mma<T>(c.x[n + 1], left, right[2], right[3]);
      }
      if constexpr (Columns % 2 == 1) {
        // The addresses of lanes 16 and above are not read.
        int const lane = int(threadIdx.x % 16);
        T const* const row = B == layout::column_major ? b + (8 * (Columns - 1) + lane % 8) * ldb + k + lane / 8 * 8
                                                       : b + (k + lane) * ldb + 8 * (Columns - 1);
        detail::load_two_matrices<B == layout::row_major>(right, row);
        detail::mma<T>(c.x[Columns - 1], left, right[0], right[1]);
      }
    }
  } else {
    int const r = fragment<Columns>::row(0), j = fragment<Columns>::column(0, 0);
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      float const a0 = A == layout::row_major ? a[r * lda + k] : a[k * lda + r];
      float const a1 = A == layout::row_major ? a[(r + 8) * lda + k] : a[k * lda + r + 8];
#pragma unroll
      for (int n = 0; n < Columns; ++n) {
        int const at = j + 8 * n;
        float const b0 = B == layout::row_major ? b[k * ldb + at] : b[at * ldb + k];
        float const b1 = B == layout::row_major ? b[k * ldb + at + 1] : b[(at + 1) * ldb + k];
        c.x[n][0] = fmaf(a0, b0, c.x[n][0]);
        c.x[n][1] = fmaf(a0, b1, c.x[n][1]);
        c.x[n][2] = fmaf(a1, b0, c.x[n][2]);
        c.x[n][3] = fmaf(a1, b1, c.x[n][3]);
      }
    }
  }
}

/// Copies rows [0, valid_rows) x columns [0, valid_columns) of a matrix in device memory into a tile of
/// `rows` x `columns` in shared memory, zero elsewhere; by all threads of a block. The caller synchronises.
template <class T>
__device__ void load_tile(T* tile, int ld, int rows, int columns, T const* from, index_t row_stride,
                          index_t valid_rows, index_t valid_columns) {
  constexpr int w = vector_elements<T>;
  if (vectorisable(from, row_stride, valid_columns)) {
    int const vectors = columns / w;
    for (int i = int(threadIdx.x); i < rows * vectors; i += int(blockDim.x)) {
      int const r = i / vectors, c = i % vectors * w;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (r < valid_rows && c < valid_columns) x = *reinterpret_cast<uint4 const*>(from + r * row_stride + c);
      *reinterpret_cast<uint4*>(tile + r * ld + c) = x;
    }
    return;
  }
  for (int i = int(threadIdx.x); i < rows * columns; i += int(blockDim.x)) {
    int const r = i / columns, c = i % columns;
    tile[r * ld + c] = r < valid_rows && c < valid_columns ? from[r * row_stride + c] : from_float<T>(0.0F);
  }
}

/// Writes a fragment to a tile in shared memory as T; the caller synchronises the warp.
template <class T, int Columns>
__device__ void store_fragment(fragment<Columns>& c, T* tile, int ld) {
  c.each([&](float& x, int row, int column) { tile[row * ld + column] = from_float<T>(x); });
}

}  // namespace seqmix::inline v0::kernels::cuda
