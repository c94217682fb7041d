#pragma once

#include <seqmix/kernels/cuda/warp_tile.cuh>
#include <seqmix/kernels/recurrence_shape.hpp>
#include <seqmix/tensor/arena.hpp>

/// What the chunkwise recurrences of a device share. A chunk has 64 tokens, whatever recurrence_shape::chunk says
/// (it changes rounding, nothing else); each of the four warps of a block works on a strip of 16 of them. Decays
/// between tokens are exponentials of sums of log-decays between them, within a strip, and products of those:
/// nothing is subtracted or divided and no e^(-G) is formed. Tokens behind the end of a sequence have log-decays of
/// 0 and rows of zeros.
namespace seqmix::inline v0::kernels::cuda::chunks {

inline constexpr int chunk = 64, strip = 16, threads = 128;
/// Channels of a tile; heads that have more are worked on in slices.
inline constexpr int width = 64;
/// A square tile in shared memory: elements between its rows, and all of them.
template <class T>
inline constexpr int row = padded_row<T>(width);
template <class T>
inline constexpr int tile = chunk* row<T>;
/// The weights between the tokens of a chunk, as they lie in device memory.
inline constexpr int pairs = chunk * chunk;

/// Where the chunks of all sequences are: slot by slot. Batches have as many for every sequence; the slots of
/// packed sequences overlap no others' and some stay empty.
struct chunk_grid {
  row_ranges rows;
  index_t sequence_count, per_sequence, count;

  chunk_grid(device::cuda const& dev, sequences const& seq)
      : rows(dev, seq), sequence_count(seq.count()),
        per_sequence(seq.is_batch() ? divided_up(seq.longest(), chunk) : 0), count(slots(seq)) {}
  static index_t slots(sequences const& seq) {
    return seq.is_batch() ? divided_up(seq.longest(), chunk) * seq.count() : seq.rows() / chunk + seq.count();
  }

  struct place {
    index_t sequence, begin;  ///< the chunk's first row
    int count;                ///< its tokens; none in an empty slot
  };
  /// Sequence n owns the slots from first(n) on.
  __device__ index_t first(index_t n) const { return rows.offsets ? rows.begin(n) / chunk + n : n * per_sequence; }
  __device__ place at(index_t slot) const {
    index_t n = 0;
    if (!rows.offsets) {
      n = slot / per_sequence;
    } else {
      index_t high = sequence_count - 1;
      while (n < high) {
        index_t const middle = (n + high + 1) / 2;
        if (first(middle) <= slot)
          n = middle;
        else
          high = middle - 1;
      }
    }
    return chunk_of(n, slot - first(n));
  }
  __device__ place chunk_of(index_t n, index_t c) const {
    index_t const left = rows.length(n) - c * chunk;
    return {n, rows.begin(n) + c * chunk, left < 0 ? 0 : left < chunk ? int(left) : chunk};
  }
};

/// Whether an input has a gate; true for the views of a dry run too, which have extents and no data.
template <class T>
bool has_gate(recurrence_input<T> const& in) {
  return in.g_rhk.extent[1] > 0;
}

/// A recurrence in device code.
template <class T>
struct problem {
  heads<T const> q, k, v;
  heads<float const> g;
  table<float const> rate, write, beta;  ///< no data: all 1
  chunk_grid grid;
  int heads_count, query_group, key_group, value_group, gate_group, key_dim, value_dim;
  int decay_keys;  ///< log-decays of a token and gate head; 0: no gate
  float scale;

  problem(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in)
      : q(in.q_rhk), k(in.k_rhk), v(in.v_rhv), g(in.g_rhk), rate(in.rate_hk), write(in.write_rh), beta(in.beta_rh),
        grid(dev, s.seq), heads_count(int(s.heads)), query_group(int(s.heads / s.query_heads)),
        key_group(int(s.heads / s.key_heads)), value_group(int(s.heads / s.value_heads)),
        gate_group(int(s.heads / s.gate_heads)), key_dim(int(s.key_dim)), value_dim(int(s.value_dim)),
        decay_keys(has_gate(in) ? int(in.g_rhk.extent[2]) : 0), scale(float(s.scale)) {}

  /// Of one key channel.
  __device__ float log_decay(index_t r, int head, int channel) const {
    if (decay_keys == 0) return 0.0F;
    int const hg = head / gate_group;
    float const x = g.at(r, hg)[decay_keys == 1 ? 0 : channel];
    return rate.data ? bounded(x * rate(hg, channel)) : x;
  }
  __device__ static float bounded(float x) {
    constexpr float bound = log_decay_bound<float>;
    return x < bound ? bound : x;
  }
  __device__ float write_scale(index_t r, int head) const {
    return write.data ? write(r, head / gate_group) : 1.0F;
  }
  __device__ float strength(index_t r, int head) const { return beta.data ? beta(r, head / gate_group) : 1.0F; }
  /// Where a row's numbers of [R,H] lie, a slot's of [slots,H] times what there is for each.
  __device__ index_t token(index_t r, int head) const { return r * heads_count + head; }
  __device__ index_t state(index_t slot, int head) const {
    return (slot * heads_count + head) * key_dim * value_dim;
  }
  __device__ index_t pair(index_t slot, int head) const { return (slot * heads_count + head) * pairs; }
};

/// A decay as a number to multiply by again and again: e^g, or where that is near 1 and its rounding would add up
/// from token to token, e^g - 1 <= 0.
__device__ inline float decay_step(float g) {
  if (g > -0.5F) return expm1f(g);
  float const factor = expf(g);
  return factor == 0.0F ? -1.0F : factor;
}
__device__ inline float decayed(float x, float step) { return fmaf(x, step, step > 0.0F ? 0.0F : x); }

/// [R,H,C] that the library made itself.
template <class T>
heads<T> dense(T* data, index_t head_count, index_t channels) {
  heads<T> x;
  x.data = data, x.row = head_count * channels, x.head = channels;
  return x;
}

/// The same number. Compilers keep all that follows from the strides of rows in registers through a loop; not from
/// this one.
__device__ inline index_t again(index_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

__host__ __device__ constexpr int slices_of(int channels) { return (channels + width - 1) / width; }
/// How deep a product over the channels from `first` on has to be; tiles are zero behind the last one.
__device__ inline int depth_of(int channels, int first) {
  int const left = channels - first;
  return left < width ? (left + 15) / 16 * 16 : width;
}

/// Copies rows [0, valid_rows) x columns [0, valid_columns) to a tile of `rows` x Columns, zero elsewhere. What can
/// be copied 16 bytes at a time is not waited for; `arrive` comes before the tile is read.
template <int Columns, class T>
__device__ void begin_tile(T* to, int rows, T const* from, index_t row_stride, int valid_rows, int valid_columns) {
  constexpr int w = vector_elements<T>, ld = padded_row<T>(Columns), vectors = Columns / w;
  if (!vectorisable(from, row_stride, valid_columns)) {
    load_tile(to, ld, rows, Columns, from, row_stride, valid_rows, valid_columns);
    return;
  }
#pragma unroll 1
  for (int i = int(threadIdx.x); i < rows * vectors; i += threads) {
    int const r = i / vectors, c = i % vectors * w;
    if (r < valid_rows && c < valid_columns)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(cuda::detail::shared_address(to + r * ld + c)), "l"(from + r * row_stride + c)
                   : "memory");
    else
      *reinterpret_cast<uint4*>(to + r * ld + c) = make_uint4(0, 0, 0, 0);
  }
}
/// The same for floats that become T.
template <int Columns, class T>
__device__ void begin_numbers(T* to, int rows, float const* from, index_t row_stride, int valid_rows,
                              int valid_columns) {
  if constexpr (sizeof(T) == 4) {
    begin_tile<Columns>(to, rows, from, row_stride, valid_rows, valid_columns);
  } else {
    constexpr int ld = padded_row<T>(Columns), vectors = Columns / 4;
    bool const fast = vectorisable(from, row_stride, valid_columns);
#pragma unroll 2
    for (int i = int(threadIdx.x); i < rows * vectors; i += threads) {
      int const r = i / vectors, c = i % vectors * 4;
      float4 x = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      float const* const at = from + r * row_stride + c;
      if (r < valid_rows && fast) {
        if (c < valid_columns) x = *reinterpret_cast<float4 const*>(at);
      } else if (r < valid_rows) {
        if (c < valid_columns) x.x = at[0];
        if (c + 1 < valid_columns) x.y = at[1];
        if (c + 2 < valid_columns) x.z = at[2];
        if (c + 3 < valid_columns) x.w = at[3];
      }
      T const packed[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)};
      uint2 bits;
      bits.x = unsigned(packed[0].bits) | unsigned(packed[1].bits) << 16;
      bits.y = unsigned(packed[2].bits) | unsigned(packed[3].bits) << 16;
      *reinterpret_cast<uint2*>(to + r * ld + c) = bits;
    }
  }
}
/// One number to shared memory, not waited for.
__device__ inline void begin_number(float* to, float const* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :
               : "r"(cuda::detail::shared_address(to)), "l"(from)
               : "memory");
}
__device__ inline void arrive() {
  asm volatile("cp.async.wait_all;" : : : "memory");
  __syncthreads();
}

/// Neighbouring numbers of a row of which `valid` exist.
template <class T>
__device__ void store_pair(T* to, float a, float b, int valid) {
  if (valid >= 2 && (reinterpret_cast<std::uintptr_t>(to) & (2 * sizeof(T) - 1)) == 0) {
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<float2*>(to) = make_float2(a, b);
    else
      *reinterpret_cast<unsigned*>(to) = unsigned(from_float<T>(a).bits) | unsigned(from_float<T>(b).bits) << 16;
    return;
  }
  if (valid >= 1) to[0] = from_float<T>(a);
  if (valid >= 2) to[1] = from_float<T>(b);
}
template <class T>
__device__ float2 load_pair(T const* from, int valid) {
  return make_float2(valid >= 1 ? to_float(from[0]) : 0.0F, valid >= 2 ? to_float(from[1]) : 0.0F);
}

/// f(first number, second number, row, column) for the pairs of neighbours that a lane holds.
template <int Columns, class F>
__device__ void each_pair(fragment<Columns>& x, F const& f) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      f(x.x[n][2 * half], x.x[n][2 * half + 1], fragment<1>::row(2 * half), fragment<1>::column(n, 0));
}

/// Over the 128 threads of a block, the same for all of them; `memory` has room for four numbers.
__device__ inline float block_sum(float x, float* memory) {
#pragma unroll
  for (int lanes = 1; lanes < warp; lanes *= 2) x += __shfl_xor_sync(~0U, x, lanes);
  __syncthreads();
  if (threadIdx.x % warp == 0) memory[threadIdx.x / warp] = x;
  __syncthreads();
  return (memory[0] + memory[1]) + (memory[2] + memory[3]);
}

/// A warp's rows of the weights between the tokens of a chunk; the half of the columns that no row of the warp
/// reaches is never computed.
struct causal_rows {
  fragment<4> part[2];

  __device__ static int strip_index() { return int(threadIdx.x) / warp; }
  __device__ void fill(float value) { part[0].fill(value), part[1].fill(value); }
  /// Adds the products of this warp's rows of `left` with all rows of `right`, tiles of ld columns.
  template <class T>
  __device__ void multiply(T const* left, T const* right, int ld, int depth) {
    int const s = strip_index();
    multiply_add<layout::row_major, layout::column_major>(part[0], left + s * strip * ld, ld, right, ld, depth);
    if (s >= 2)
      multiply_add<layout::row_major, layout::column_major>(part[1], left + s * strip * ld, ld, right + 32 * ld, ld,
                                                            depth);
  }
  /// f(number, token, earlier token); earlier ones may be later.
  template <class F>
  __device__ void each(F const& f) {
    int const first = strip_index() * strip;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      part[half].each([&](float& x, int r, int c) { f(x, first + r, 32 * half + c); });
  }
  template <class F>
  __device__ void each_pair_of(F const& f) {
    int const first = strip_index() * strip;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      each_pair(part[half], [&](float& a, float& b, int r, int c) { f(a, b, first + r, 32 * half + c); });
  }
};

/// The decays of one head in a chunk, in shared memory.
struct head_decays {
  float log_decay[chunk], since[chunk],
      until[chunk];                ///< sums from the start of the strip, behind a token to its end
  float log_total[4], gap[4][4];   ///< sums of whole strips; decays of those between two
  float from[chunk], to[chunk];    ///< decays of `since` and `until`
  float within[chunk][strip + 1];  ///< from behind an earlier token of the strip to behind a token

  /// By all threads of a block of at least 64.
  template <class T>
  __device__ void load(problem<T> const& p, chunk_grid::place const& at, int head) {
    int const i = int(threadIdx.x), s = i / strip;
    if (i < chunk) log_decay[i] = i < at.count ? p.log_decay(at.begin + i, head, 0) : 0.0F;
    __syncthreads();
    if (i < chunk) {
      float sum = 0.0F;
      within[i][i % strip] = 1.0F;
      for (int later = i + 1; later % strip != 0; ++later) within[later][i % strip] = expf(sum += log_decay[later]);
      until[i] = sum, to[i] = expf(sum);
      sum = 0.0F;
      for (int earlier = s * strip; earlier <= i; ++earlier) sum += log_decay[earlier];
      since[i] = sum, from[i] = expf(sum);
      if (i % strip == strip - 1) log_total[s] = sum;
    }
    __syncthreads();
    if (i < 16) {
      float sum = 0.0F;
      for (int other = i % 4 + 1; other < i / 4; ++other) sum += log_total[other];
      gap[i / 4][i % 4] = expf(sum);
    }
    __syncthreads();
  }
  /// From behind token j to behind token i; 0 for a later j.
  __device__ float between(int i, int j) const {
    int const a = i / strip, b = j / strip;
    if (a == b) return j <= i ? within[i][j % strip] : 0.0F;
    return a < b ? 0.0F : from[i] * (gap[a][b] * to[j]);
  }
  __device__ float from_start(int i) const {
    float sum = since[i];
    for (int s = 0; s < i / strip; ++s) sum += log_total[s];
    return expf(sum);
  }
  __device__ float to_end(int i) const {
    float sum = until[i];
    for (int s = i / strip + 1; s < 4; ++s) sum += log_total[s];
    return expf(sum);
  }
  __device__ float total_step() const {
    return decay_step(((log_total[0] + log_total[1]) + log_total[2]) + log_total[3]);
  }
};

/// Decays of one head, for kernels that need no more: [R,H] from the chunk's start to behind a token and from there
/// to its end, [slots,H] decay_step of whole chunks.
struct head_factors {
  float *start = nullptr, *end = nullptr, *total = nullptr;
};
template <class T>
__global__ void __launch_bounds__(chunk) sum_decays(problem<T> p, head_factors to) {
  __shared__ head_decays decays;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), i = int(threadIdx.x);
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  decays.load(p, at, head);
  if (i < at.count) {
    to.start[p.token(at.begin + i, head)] = decays.from_start(i);
    to.end[p.token(at.begin + i, head)] = decays.to_end(i);
  }
  if (i == 0) to.total[slot * p.heads_count + head] = decays.total_step();
}

/// Queries and keys as they meet a state: rows of the input times numbers, or (decays per channel) rows made
/// before.
template <class T>
struct decayed_rows {
  heads<T const> q, k;
  int query_group = 1, key_group = 1;
  float const *start = nullptr, *end = nullptr;  ///< [R,H]; nullptr: 1
  float const* total = nullptr;                  ///< [slots,H] or [slots,H,K]: decay_step of the chunk
  int total_width = 1;
  float scale = 1.0F;  ///< of queries

  __device__ float query_factor(index_t token) const { return start ? scale * start[token] : 1.0F; }
  __device__ float key_factor(index_t token) const { return end ? end[token] : 1.0F; }
};

}  // namespace seqmix::inline v0::kernels::cuda::chunks
