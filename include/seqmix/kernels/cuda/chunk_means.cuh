#pragma once

#include <seqmix/kernels/cuda/routed_tiles.cuh>

/// The mean keys of chunks on a device, as routers compare queries with them.
namespace seqmix::inline v0::kernels::cuda::routed {

/// Means are kept in as many numbers of type T as it takes for the digits of a float (bfloat16: 16 of them): their
/// products with queries are added up.
template <class T>
inline constexpr int mean_parts = sizeof(T) == 2 ? 2 : 1;

/// Means of whole chunks, and where the own chunk competes those of the keys so far, at every row.
template <class T>
struct chunk_means {
  T* mean = nullptr;              ///< [parts, chunk places, Hk, K]
  T* prefix = nullptr;            ///< [parts, R, Hk, K]
  double* mean_gate = nullptr;    ///< [chunk places, Hg] of the running log-decays, with router_bias
  double* prefix_gate = nullptr;  ///< [R, Hg]
  index_t places = 0, rows = 0;
  int key_heads = 1, gate_heads = 1, key_dim = 0;

  __device__ T* of_chunk(int part, index_t place, int key_head) const {
    return mean + ((part * places + place) * key_heads + key_head) * key_dim;
  }
  __device__ T* of_prefix(int part, index_t row, int key_head) const {
    return prefix + ((part * rows + row) * key_heads + key_head) * key_dim;
  }
};

template <class T>
__device__ void store_parts(T* to, index_t step, float x) {
  *to = from_float<T>(x);
  if constexpr (mean_parts<T> == 2) {
    float const high = to_float(*to);
    to[step] = from_float<T>(isfinite(high) ? x - high : 0.0F);
  }
}

/// Tokens [begin, end) of the chunk with this place, none behind a sequence's last chunk.
struct placed_chunk {
  sequence_tokens s;
  int begin, end;

  template <class T>
  __device__ placed_chunk(problem<T> const& p, index_t place) : s(p.tokens(p.holder_of_chunk(place))) {
    index_t const from = (place - p.first_chunk(s.n)) * p.chunk;
    begin = int(from < s.count() ? from : s.count());
    end = begin + p.chunk < s.count() ? begin + p.chunk : s.count();
  }
};

/// A thread per chunk, key head and channel: sums in the order of tokens and one true division, so that equal
/// chunks have equal means.
template <class T>
__global__ void __launch_bounds__(threads) average_keys(problem<T> p, chunk_means<T> means, index_t count) {
  index_t const i = index_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  int const x = int(i % p.a.key_dim), head = int(i / p.a.key_dim % p.key_heads);
  index_t const place = i / p.a.key_dim / p.key_heads;
  placed_chunk const c(p, place);
  auto const& s = c.s;
  index_t const prefix_step = means.rows * p.key_heads * p.a.key_dim;
  float sum = 0.0F;
#pragma unroll 4
  for (int j = c.begin; j < c.end; ++j) {
    sum += to_float(p.key(s, j, head)[x]);
    if (means.prefix && j >= s.past)
      store_parts(means.of_prefix(0, s.begin + j - s.past, head) + x, prefix_step,
                  __fdiv_rn(sum, float(j + 1 - c.begin)));
  }
  if (c.begin < c.end)
    store_parts(means.of_chunk(0, place, head) + x, means.places * p.key_heads * p.a.key_dim,
                __fdiv_rn(sum, float(c.end - c.begin)));
}

/// The same of the running log-decays: a thread per chunk and gate head.
template <class T>
__global__ void __launch_bounds__(threads) average_decays(problem<T> p, chunk_means<T> means, index_t count) {
  index_t const i = index_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  int const head = int(i % p.gate_heads);
  placed_chunk const c(p, i / p.gate_heads);
  auto const& s = c.s;
  head_bias const g = p.a.bias.of(head, s.first);
  double sum = 0.0;
#pragma unroll 1
  for (int j = c.begin; j < c.end; ++j) {
    sum += g.at(j);
    if (means.prefix_gate && j >= s.past)
      means.prefix_gate[(s.begin + j - s.past) * p.gate_heads + head] = sum / double(j + 1 - c.begin);
  }
  if (c.begin < c.end) means.mean_gate[i] = sum / double(c.end - c.begin);
}

/// Takes the memory of the means and launches what computes them. Bytes of `ws`: sizeof(float) Hk K (R + N
/// capacity) / chunk, and where the own chunk competes as much as the keys of all rows in float.
template <class T>
chunk_means<T> average_chunks(device::cuda const& dev, problem<T> const& p, bool biased, arena& ws) {
  chunk_means<T> means;
  means.places = p.chunk_places();
  means.rows = p.rows;
  means.key_heads = p.key_heads;
  means.gate_heads = p.gate_heads;
  means.key_dim = p.a.key_dim;
  index_t const width = index_t(p.key_heads) * p.a.key_dim;
  means.mean = ws.take<T>(mean_parts<T> * means.places * width);
  if (p.own_competes) means.prefix = ws.take<T>(mean_parts<T> * means.rows * width);
  launch(dev, "routed attention: mean keys", &average_keys<T>, blocks(divided_up(means.places * width, threads)),
         threads, 0, p, means, means.places * width);
  if (!biased) return means;
  means.mean_gate = ws.take<double>(means.places * p.gate_heads);
  if (p.own_competes) means.prefix_gate = ws.take<double>(means.rows * p.gate_heads);
  launch(dev, "routed attention: mean log-decays", &average_decays<T>,
         blocks(divided_up(means.places * p.gate_heads, threads)), threads, 0, p, means,
         means.places * p.gate_heads);
  return means;
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
