#include <algorithm>

#include "device.hpp"
#include <seqmix/kernels/cuda/launch.cuh>
#include <seqmix/kernels/cuda/storage.cuh>

namespace seqmix::benchmarks {
namespace {

using namespace kernels::cuda;

constexpr int threads = 256, chains = 8;
constexpr index_t most_blocks = 1 << 16;

__device__ index_t first_index() { return index_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ index_t index_step() { return index_t(gridDim.x) * blockDim.x; }

__device__ std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}
__device__ float uniform(std::uint32_t seed, index_t i, std::uint32_t draw) {
  return float(mixed(mixed(seed * 4 + draw) ^ mixed(std::uint32_t(i)) ^ std::uint32_t(i >> 32)) >> 8) * 0x1p-24F;
}

template <class T>
__global__ void uniform_kernel(T* x, index_t count, std::uint32_t seed, float low, float high) {
  for (auto i = first_index(); i < count; i += index_step())
    x[i] = from_float<T>(low + (high - low) * uniform(seed, i, 0));
}
template <class T>
__global__ void normal_kernel(T* x, index_t count, std::uint32_t seed, float scale) {
  for (auto i = first_index(); i < count; i += index_step()) {
    float sum = -2.0F;
    for (std::uint32_t draw = 0; draw < 4; ++draw) sum += uniform(seed, i, draw);
    x[i] = from_float<T>(scale * 1.7320508F * sum);
  }
}
template <class T>
__global__ void not_finite_kernel(T const* x, index_t numbers, unsigned long long* count) {
  unsigned long long own = 0;
  for (auto i = first_index(); i < numbers; i += index_step()) own += !isfinite(to_float(x[i]));
  if (own > 0) atomicAdd(count, own);
}
__global__ void copy_kernel(uint4 const* from, uint4* to, index_t count) {
  for (auto i = first_index(); i < count; i += index_step()) to[i] = from[i];
}
__global__ void multiply_add_kernel(int rounds, float* sink) {
  float x[chains];
  float const factor = 0.999F + 1e-9F * float(threadIdx.x);
  for (int c = 0; c < chains; ++c) x[c] = float(c);
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (int c = 0; c < chains; ++c) x[c] = fmaf(x[c], factor, 1e-3F);
  float sum = 0.0F;
  for (int c = 0; c < chains; ++c) sum += x[c];
  sink[first_index()] = sum;
}
__global__ void exponential_kernel(int rounds, float* sink) {
  float x[chains];
  for (int c = 0; c < chains; ++c) x[c] = 0.1F * float(c) + 1e-3F * float(threadIdx.x);
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (int c = 0; c < chains; ++c) asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x[c]) : "f"(-x[c]));
  float sum = 0.0F;
  for (int c = 0; c < chains; ++c) sum += x[c];
  sink[first_index()] = sum;
}

dim3 blocks_for(index_t count) { return blocks(std::min(divided_up(count, threads), most_blocks)); }

}  // namespace

template <class T>
void fill_uniform(T* x, index_t count, std::uint32_t seed, float low, float high) {
  launch({}, "fill", uniform_kernel<T>, blocks_for(count), threads, 0, x, count, seed, low, high);
}
template <class T>
void fill_normal(T* x, index_t count, std::uint32_t seed, float scale) {
  launch({}, "fill", normal_kernel<T>, blocks_for(count), threads, 0, x, count, seed, scale);
}
template <class T>
void add_not_finite(T const* x, index_t numbers, unsigned long long* count) {
  launch({}, "count what is not finite", not_finite_kernel<T>, blocks_for(numbers), threads, 0, x, numbers, count);
}
void copy_vectors(void const* from, void* to, index_t vectors) {
  launch({}, "copy", copy_kernel, blocks_for(vectors), threads, 0, static_cast<uint4 const*>(from),
         static_cast<uint4*>(to), vectors);
}
double run_multiply_adds(index_t count, int rounds, float* sink) {
  launch({}, "multiply-adds", multiply_add_kernel, blocks(count), threads, 0, rounds, sink);
  return double(count) * threads * chains * rounds;
}
double run_exponentials(index_t count, int rounds, float* sink) {
  launch({}, "exponentials", exponential_kernel, blocks(count), threads, 0, rounds, sink);
  return double(count) * threads * chains * rounds;
}

#define STORED(T)                                                                                                  \
  template void fill_uniform<T>(T*, index_t, std::uint32_t, float, float);                                         \
  template void fill_normal<T>(T*, index_t, std::uint32_t, float);                                                 \
  template void add_not_finite<T>(T const*, index_t, unsigned long long*);
STORED(float)
STORED(bfloat16)

}  // namespace seqmix::benchmarks
