#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <seqmix/tensor/storage.hpp>

/// Numbers as they are stored and as they are computed with.
namespace seqmix::inline v0::kernels::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ inline float to_float(float16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <class T>
__device__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    T stored;
    if constexpr (std::is_same_v<T, bfloat16>)
      stored.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    else
      stored.bits = __half_as_ushort(__float2half_rn(x));
    return stored;
  }
}

/// 16 bytes at once.
template <class T>
inline constexpr int vector_elements = 16 / int(sizeof(T));

/// Whether rows of `columns` numbers may be read and written 16 bytes at a time.
template <class T>
__device__ bool vectorisable(T const* data, index_t row_stride, index_t columns) {
  constexpr index_t w = vector_elements<T>;
  return (reinterpret_cast<std::uintptr_t>(data) & 15U) == 0 && row_stride % w == 0 && columns % w == 0;
}

}  // namespace seqmix::inline v0::kernels::cuda
