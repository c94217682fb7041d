#pragma once

#include <cub/warp/warp_reduce.cuh>

#include <seqmix/kernels/cuda/attention_forward.cuh>
#include <seqmix/selectors/top1.hpp>

/// The forward of a hard choice on a device: tiles of q.k as in softmax attention, the greatest score so far and
/// its key in registers, one row of values gathered at the end. Softmax sums and averaged values are computed where
/// an output or a backward asks for them, by kernels of their own. Few rows with many keys (decoding): keys are
/// split over blocks, whose candidates are put together.
namespace seqmix::inline v0::kernels::cuda {

/// What is kept of a row, the same for every output and surrogate.
using saved_choice = selectors::top1<>::saved<float>;

/// The numbers of a hard choice.
struct choice_rule {
  float scale;    ///< of q.k, divided by the forward temperature; attention_problem has the surrogate's
  float ratio;    ///< the forward temperature divided by the surrogate's
  float hard;     ///< hard_fraction
  bool weighted;  ///< the chosen value comes out with its weight
  bool two;       ///< the temperatures differ
  bool averages;  ///< the softmax output is wanted
};

/// Where a forward's results go.
template <class T>
struct choice_output {
  heads<T> o;
  saved_choice* row = nullptr;  ///< [R,H], nullptr: not kept
  heads<float> average;         ///< softmax outputs, where they are kept
  table<double> recorded_lse;
  table<index_t> recorded_choice;
};

/// A row over some of its keys: the best one, and the softmaxes over them.
struct choice_sums {
  float best = -INFINITY;    ///< the greatest score at the forward temperature
  index_t token = -1;        ///< whose it is
  float most = -INFINITY;    ///< the greatest score at the surrogate's temperature
  float sum = 0.0F;          ///< of e^(score - most)
  float forward_sum = 0.0F;  ///< of e^(score - best) at the forward temperature
};

/// The results of parts of the keys.
struct choice_parts {
  int count = 1;               ///< 1: no parts, results are written at once
  choice_sums* row = nullptr;  ///< [blocks of rows, parts, 16]
  float* value = nullptr;      ///< [blocks of rows, parts, 16, V], relative to e^most

  __device__ index_t at(index_t block, int part) const { return (block * count + part) * 16; }
};

namespace detail {

/// The greater one; NaN where there is one.
__device__ inline float greater_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/// A score at the forward temperature as one at the surrogate's.
__device__ inline float surrogate_score(float x, float bias, float ratio) {
  return x == -INFINITY ? x : fmaf(x - bias, ratio, bias);
}
template <int Keys>
__device__ void to_surrogate(fragment<Keys>& x, lane_rows const& rows, float ratio, split_sum const* gate) {
  __syncwarp();  // biases are computed again, not kept in registers
#pragma unroll
  for (int n = 0; n < Keys; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x.x[n][e] =
          surrogate_score(x.x[n][e], gate ? rows.sum[e / 2] - gate[fragment<Keys>::column(n, e)] : 0.0F, ratio);
}

/// The greatest score of a lane's two rows so far, the same in the four lanes that share them, and the key that was
/// the first to have it: at 64 tile + column, -1 for none. A NaN is the greatest score.
struct running_choice {
  float best[2] = {-INFINITY, -INFINITY};
  int at[2] = {-1, -1};

  template <int Keys>
  __device__ void absorb(fragment<Keys> const& x, int tile) {
    float here[2] = {-INFINITY, -INFINITY};
    bool better[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < Keys; ++n)
        here[r] = greater_or_nan(here[r], greater_or_nan(x.x[n][2 * r], x.x[n][2 * r + 1]));
      // All four lanes go on with the result, which cub::WarpReduce leaves in one of them.
      here[r] = greater_or_nan(here[r], __shfl_xor_sync(~0U, here[r], 1));
      here[r] = greater_or_nan(here[r], __shfl_xor_sync(~0U, here[r], 2));
      better[r] = !(here[r] <= best[r]) && best[r] == best[r];
    }
    // Of many tiles few have a new best key: only then it is looked for.
    if (!__any_sync(~0U, better[0] || better[1])) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int column = tile_keys;
#pragma unroll
      for (int n = Keys; n-- > 0;)
#pragma unroll
        for (int e = 2 * r + 2; e-- > 2 * r;)
          if (x.x[n][e] == here[r] || x.x[n][e] != x.x[n][e]) column = fragment<Keys>::column(n, e);
      column = min(column, __shfl_xor_sync(~0U, column, 1));
      column = min(column, __shfl_xor_sync(~0U, column, 2));
      if (better[r]) best[r] = here[r], at[r] = tile * tile_keys + column;
    }
  }
};

/// Adds a tile to a lane's part of the sums of e^(score - best); `before`: the best scores without it.
template <int Keys>
__device__ void add_forward_weights(fragment<Keys> const& x, running_choice const& choice, float const (&before)[2],
                                    float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float const level = choice.best[r] == -INFINITY ? 0.0F : choice.best[r];
    float total = 0.0F;
#pragma unroll
    for (int n = 0; n < Keys; ++n) total += weight_of(x.x[n][2 * r] - level) + weight_of(x.x[n][2 * r + 1] - level);
    sum[r] = fmaf(sum[r], weight_of(before[r] - level), total);
  }
}

/// c += A B for fragments below one another, A row-major, B column-major: as multiply_add, with every element of B
/// read once; the same bits.
template <int Fragments, class T, int Columns>
__device__ void multiply_add_rows(fragment<Columns> (&c)[Fragments], T const* a, int lda, T const* b, int ldb,
                                  int depth) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll 1
    for (int k = 0; k < depth; k += 16) {
      unsigned left[Fragments][4], right[4];
#pragma unroll
      for (int f = 0; f < Fragments; ++f)
        load_matrices<false>(left[f], left_rows(a + 16 * f * lda, lda, k, layout::row_major));
#pragma unroll
      for (int n = 0; n < Columns; n += 2) {
        load_matrices<false>(right, right_rows(b, ldb, k, 8 * n, layout::column_major));
#pragma unroll
        for (int f = 0; f < Fragments; ++f) {
          mma<T>(c[f].x[n], left[f], right[0], right[1]);
          mma<T>(c[f].x[n + 1], left[f], right[2], right[3]);
        }
      }
    }
  } else {
    using four = float4 const*;
    T const* const rows = a + fragment<Columns>::row(0) * lda;
    T const* const columns = b + fragment<Columns>::column(0, 0) * ldb;
    auto const add = [](float& sum, float4 const& x, float4 const& y) {
      sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
    };
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {
      float4 left[Fragments][2];
#pragma unroll
      for (int f = 0; f < Fragments; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r) left[f][r] = *reinterpret_cast<four>(rows + (16 * f + 8 * r) * lda + k);
#pragma unroll
      for (int n = 0; n < Columns; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float4 const right = *reinterpret_cast<four>(columns + (8 * n + e) * ldb + k);
#pragma unroll
          for (int f = 0; f < Fragments; ++f)
#pragma unroll
            for (int r = 0; r < 2; ++r) add(c[f].x[n][2 * r + e], left[f][r], right);
        }
    }
  }
}

/// cuda::begin_slice for a width and a number of threads that are known when the kernel runs: 32, 64 or 128
/// channels.
template <class T>
__device__ void begin_slice_of(int width, T* tile, int rows, T const* from, index_t row_stride, int valid_rows,
                               int channels, int slice) {
  constexpr int w = vector_elements<T>;
  int const ld = padded_row<T>(width), valid = channels - slice * width, vectors = width / w;
  from += slice * width;
  if (!vectorisable(from, row_stride, valid)) {
    load_tile(tile, ld, rows, width, from, row_stride, valid_rows, valid);
    return;
  }
  int const step = int(blockDim.x) / vectors, c = int(threadIdx.x) % vectors * w;
#pragma unroll 1
  for (int r = int(threadIdx.x) / vectors; r < rows; r += step) {
    T* const to = tile + r * ld + c;
    if (r < valid_rows && c < valid)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(shared_address(to)), "l"(from + r * row_stride + c)
                   : "memory");
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

/// What a block works on. In shared memory, where it costs no registers.
struct choice_block {
  query_rows rows;
  attended_head head;
  attended_head::tiles seen;  ///< by this part

  /// By all threads of a block; it has no rows where its slot is empty.
  template <class T>
  __device__ void begin(attention_problem<T> const& p, query_blocks const& cut, index_t block, int part,
                        int parts) {
    if (threadIdx.x == 0) {
      rows = cut.at(block);
      head = attended_head::of(p, rows.sequence, rows.head);
      seen = head.seen(position(0), position(rows.count - 1), p.window);
      int const each = (seen.end - seen.begin + parts - 1) / parts;
      seen.begin = min(seen.begin + part * each, seen.end);
      seen.end = min(seen.begin + each, seen.end);
    }
    __syncthreads();
  }
  __device__ index_t position(int i) const { return rows.position(head.position, i); }
  __device__ index_t row(int i) const { return rows.row(head.begin, i); }
  template <class T>
  __device__ void load_queries(attention_problem<T> const& p, int width, T* tile, int count, int slice) const {
    begin_slice_of(width, tile, count, p.q.at(row(0), rows.head), rows.step == 0 ? p.q.head : p.q.row, rows.count,
                   p.key_dim, slice);
  }
  template <class T>
  __device__ void load_keys(attention_problem<T> const& p, int width, T* tile, split_sum* gates, int t,
                            int slice) const {
    auto const keys = head.tile(p, t);
    begin_slice_of(width, tile, tile_keys, keys.k, keys.k_row, keys.count, p.key_dim, slice);
    if (p.bias.given && slice == 0) load_gates(gates, head.bias(p), keys);
  }
  /// G of the block's rows; a barrier comes before it is read.
  template <class T>
  __device__ void load_row_gates(attention_problem<T> const& p, split_sum* row_gates) const {
    for (int i = int(threadIdx.x); i < rows.count && p.bias.given; i += int(blockDim.x))
      row_gates[i] = head.bias(p).split(position(i));
  }
  /// What the lane's rows of the fragment at row `first` see of a tile; false: they and the others see nothing.
  template <class T>
  __device__ bool see(attention_problem<T> const& p, key_tile<T> const& tile, split_sum const* row_gates, int first,
                      lane_rows& lane, bool& all_seen) const {
    index_t const low = position(first), high = low + 15 * rows.step;
    if (tile.token > high || tile.token + tile.count <= low - p.window + 1) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const i = fragment<1>::row(2 * r);
      lane.seen[r] = tile.seen(low + i * rows.step, p.window);
      if (p.bias.given) lane.sum[r] = row_gates[first + i < rows.count ? first + i : 0];
    }
    all_seen = tile.seen_by_all(low, high, p.window);
    return true;
  }
};

/// Which token a choice is.
__device__ inline index_t token_of(attended_head const& head, int at) {
  if (at < 0) return -1;
  int const behind = at - head.past_tiles() * tile_keys;
  return behind < 0 ? at : head.past + behind;
}
template <class T>
__device__ T const* value_of_token(attention_problem<T> const& p, attended_head const& head, index_t token,
                                   int of) {
  int const value_head = of / p.value_group;
  return token < head.past ? p.past_v.at(head.n, token, value_head)
                           : p.v.at(head.begin + token - head.past, value_head);
}

/// What makes a row's output: soft times the sum of e^(score - most) v, plus held times the chosen value.
struct choice_factors {
  float soft, held, inverse;
  float weight;  ///< of the chosen value in the softmax at the surrogate's temperature
  float kept;    ///< held, but for a NaN's choice

  template <class T>
  __device__ choice_factors(choice_sums const& x, choice_rule const& rule, attention_problem<T> const& p,
                            attended_head const& head, index_t position)
      : soft(0.0F), held(rule.hard), inverse(x.sum == 0.0F ? 0.0F : 1.0F / x.sum), weight(0.0F), kept(rule.hard) {
    if (x.token < 0) return;
    if (x.sum == 0.0F) {
      weight = __int_as_float(0x7fffffff);
      return;
    }
    float score = x.best;
    if (rule.two) {
      auto const bias = head.bias(p);
      score = surrogate_score(score, p.bias.given ? bias.split(position) - bias.split(x.token) : 0.0F, rule.ratio);
    }
    weight = weight_of(score - x.most) * inverse;
    soft = (1.0F - rule.hard) * inverse;
    if (rule.weighted) held *= rule.two ? 1.0F / x.forward_sum : weight;
    if (x.best == x.best)
      kept = held;
    else
      soft = held = x.best;
  }
};

/// What is kept of a row and told of it.
template <class T>
__device__ void write_saved(choice_output<T> const& out, choice_sums const& x, choice_factors const& f, index_t r,
                            int head, int heads_count) {
  // Where no softmax ran there is no log-sum-exp.
  float const lse = x.sum != 0.0F ? x.most + logf(x.sum) : x.token >= 0 ? f.weight : 0.0F;
  if (out.row) out.row[r * heads_count + head] = {lse, f.weight, f.kept, x.token};
  if (out.recorded_lse.data) out.recorded_lse(r, head) = x.token < 0 && x.sum == 0.0F ? -INFINITY : lse;
  if (out.recorded_choice.data) out.recorded_choice(r, head) = x.token;
}

/// A hard row by one warp: the chosen value, bit by bit.
template <class T>
__device__ void write_hard_row(attention_problem<T> const& p, choice_output<T> const& out,
                               attended_head const& head, choice_factors const& factors, choice_sums const& x,
                               index_t r, int of) {
  constexpr int w = vector_elements<T>;
  int const lane = int(threadIdx.x) % warp;
  T* const to = out.o.at(r, of);
  if (x.token < 0 || x.best != x.best) {
    for (int c = lane; c < p.value_dim; c += warp)
      to[c] = from_float<T>(x.token < 0 ? 0.0F : __int_as_float(0x7fffffff));
  } else {
    T const* const from = value_of_token(p, head, x.token, of);
    if (vectorisable(from, 0, p.value_dim) && vectorisable(to, 0, p.value_dim))
      for (int c = lane * w; c < p.value_dim; c += warp * w)
        *reinterpret_cast<uint4*>(to + c) = *reinterpret_cast<uint4 const*>(from + c);
    else
      for (int c = lane; c < p.value_dim; c += warp) to[c] = from[c];
  }
  if (lane == 0) write_saved(out, x, factors, r, of, p.heads_count);
}

/// Of a block that chooses: two fragments a warp, so that keys are read from shared memory once for both. Few rows
/// take one warp.
template <class T>
struct choose_shape {
  static constexpr int warps = sizeof(T) == 2 ? 8 : 4, fragments = 2, warp_rows = 16 * fragments;
  static constexpr int rows = warps * warp_rows, blocks = sizeof(T) == 2 ? 2 : 3;

  static std::size_t bytes(int width, bool few) {
    auto const count = std::size_t(few ? warp_rows : rows), row = std::size_t(padded_row<T>(width));
    return (count + 2 * tile_keys) * row * sizeof(T) + (2 * tile_keys + count) * sizeof(split_sum);
  }
};

/// The choice alone, and the gather of its values: grid of rows x parts.
template <class T>
__global__ void __launch_bounds__(32 * choose_shape<T>::warps, choose_shape<T>::blocks)
    choose(attention_problem<T> p, choice_rule rule, int width, query_blocks cut, choice_parts parts,
           choice_output<T> out) {
  using shape = choose_shape<T>;
  extern __shared__ uint4 shared[];
  int const ld = padded_row<T>(width), block_rows = int(blockDim.x) / warp * shape::warp_rows;
  T *const q = reinterpret_cast<T*>(shared), *const k = q + block_rows * ld;
  auto* const gates = reinterpret_cast<split_sum*>(k + 2 * tile_keys * ld);
  split_sum* const row_gates = gates + 2 * tile_keys;
  int const part = int(blockIdx.x % parts.count);
  index_t const block = blockIdx.x / parts.count;
  __shared__ choice_block b;
  b.begin(p, cut, block, part, parts.count);
  if (b.rows.count <= 0) return;
  int const slices = (p.key_dim + width - 1) / width;
  auto const load_keys = [&](int t, int s) {
    b.load_keys(p, width, k + t % 2 * tile_keys * ld, gates + t % 2 * tile_keys, t, s);
  };

  int const first_row = int(threadIdx.x) / warp * shape::warp_rows;
  bool const works = first_row < b.rows.count;
  running_choice run[shape::fragments];
  b.load_row_gates(p, row_gates);
  if (slices == 1 && b.seen.begin < b.seen.end) {
    b.load_queries(p, width, q, block_rows, 0);
    load_keys(b.seen.begin, 0);
  }
  for (int t = b.seen.begin; t < b.seen.end; ++t) {
    fragment<tile_keys / 8> x[shape::fragments];
#pragma unroll
    for (int f = 0; f < shape::fragments; ++f) x[f].fill(0.0F);
    for (int s = 0; s < slices; ++s) {
      if (slices > 1) {
        __syncthreads();
        b.load_queries(p, width, q, block_rows, s);
        load_keys(t, s);
      }
      arrive();
      if (slices == 1 && t + 1 < b.seen.end) load_keys(t + 1, 0);
      if (works) multiply_add_rows(x, q + first_row * ld, ld, k + t % 2 * tile_keys * ld, ld, width);
    }
    if (!works) continue;
    auto const tile = b.head.tile(p, t);
    auto const* const gate = p.bias.given ? gates + t % 2 * tile_keys : nullptr;
#pragma unroll
    for (int f = 0; f < shape::fragments; ++f) {
      lane_rows lane;
      bool all_seen;
      if (!b.see(p, tile, row_gates, first_row + 16 * f, lane, all_seen)) continue;
      score(x[f], lane, rule.scale, gate, 0, all_seen);
      run[f].absorb(x[f], t);
    }
  }
#pragma unroll
  for (int f = 0; f < shape::fragments; ++f)
    for (int j = 0; j < 16; ++j) {
      int const i = first_row + 16 * f + j;
      if (i >= b.rows.count) break;
      // The row is in lanes 4 (j % 8) to 4 (j % 8) + 3.
      choice_sums x;
      x.best = __shfl_sync(~0U, j < 8 ? run[f].best[0] : run[f].best[1], 4 * (j % 8));
      x.token = token_of(b.head, __shfl_sync(~0U, j < 8 ? run[f].at[0] : run[f].at[1], 4 * (j % 8)));
      if (parts.count > 1) {
        if (threadIdx.x == 0) parts.row[parts.at(block, part) + i] = x;
      } else {
        choice_factors const factors(x, rule, p, b.head, 0);
        write_hard_row(p, out, b.head, factors, x, b.row(i), b.rows.head_of(i));
      }
    }
}

/// Of a block that averages too: one fragment a warp; few rows take one warp.
template <class T, int Width>
struct average_shape {
  static constexpr int warps = sizeof(T) == 2 ? 8 : 4, row = padded_row<T>(Width);
  static constexpr int weight_row = sizeof(T) == 2 ? 0 : padded_row<T>(tile_keys);
  static constexpr int blocks = sizeof(T) == 2 && Width > 64 ? 1 : 2;

  /// Shared memory: queries, keys, values, weights, gates.
  static std::size_t bytes(bool few) {
    constexpr int both = 2 * tile_keys;
    int const count = 16 * (few ? 1 : warps);
    return std::size_t(count * (row + weight_row) + both * row) * sizeof(T) +
           std::size_t(both + count) * sizeof(split_sum);
  }
};

/// The choice with softmax sums and, where they are asked for, averages: grid (rows x parts, slices of the values).
template <class T, int Width>
__global__ void __launch_bounds__(32 * average_shape<T, Width>::warps, average_shape<T, Width>::blocks)
    choose_and_average(attention_problem<T> p, choice_rule rule, query_blocks cut, choice_parts parts,
                       choice_output<T> out) {
  using shape = average_shape<T, Width>;
  constexpr int row = shape::row;
  extern __shared__ uint4 shared[];
  int const block_rows = int(blockDim.x) / warp * 16;
  T *const q = reinterpret_cast<T*>(shared), *const k = q + block_rows * row, *const v = k + tile_keys * row;
  T* const weights = v + tile_keys * row;
  auto* const gates = reinterpret_cast<split_sum*>(weights + block_rows * shape::weight_row);
  split_sum* const row_gates = gates + 2 * tile_keys;
  int const part = int(blockIdx.x % parts.count), slice = int(blockIdx.y);
  index_t const block = blockIdx.x / parts.count;
  __shared__ choice_block b;
  b.begin(p, cut, block, part, parts.count);
  if (b.rows.count <= 0) return;
  int const key_slices = (p.key_dim + Width - 1) / Width;
  bool const sliced = may_be_sliced<T, Width> && key_slices > 1;
  auto const load_keys = [&](int t, int s) { b.load_keys(p, Width, k, gates + t % 2 * tile_keys, t, s); };

  int const first_row = int(threadIdx.x) / warp * 16;
  bool const works = first_row < b.rows.count;
  b.load_row_gates(p, row_gates);
  running_choice choice;
  running_softmax run{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
  float forward_sum[2] = {0.0F, 0.0F};
  fragment<Width / 8> acc;
  acc.fill(0.0F);
  if (!sliced && b.seen.begin < b.seen.end) {
    b.load_queries(p, Width, q, block_rows, 0);
    load_keys(b.seen.begin, 0);
  }
  for (int t = b.seen.begin; t < b.seen.end; ++t) {
    auto const tile = b.head.tile(p, t);
    fragment<tile_keys / 8> products[1];
    auto& x = products[0];
    x.fill(0.0F);
    for (int s = 0; s < (sliced ? key_slices : 1); ++s) {
      if (sliced) {
        __syncthreads();
        b.load_queries(p, Width, q, block_rows, s);
        load_keys(t, s);
      }
      arrive();
      if (s == 0 && rule.averages)
        begin_slice_of(Width, v, tile_keys, tile.v, tile.v_row, tile.count, p.value_dim, slice);
      if (works) multiply_add_rows(products, q + first_row * row, row, k, row, Width);
    }
    arrive();
    if (!sliced && t + 1 < b.seen.end) load_keys(t + 1, 0);
    auto const* const gate = p.bias.given ? gates + t % 2 * tile_keys : nullptr;
    lane_rows lane;
    bool all_seen;
    if (!works || !b.see(p, tile, row_gates, first_row, lane, all_seen)) continue;
    score(x, lane, rule.scale, gate, 0, all_seen);
    float const before[2] = {choice.best[0], choice.best[1]};
    choice.absorb(x, t);
    if (rule.two) {
      if (rule.weighted) add_forward_weights(x, choice, before, forward_sum);
      to_surrogate(x, lane, rule.ratio, gate);
    }
    run.absorb(x, acc);
    if (rule.averages) multiply_add<T>(acc, x, v, row, weights + first_row * shape::weight_row);
  }
  if (!works) return;
  float const sums[2] = {row_sum(run.sum[0]), row_sum(run.sum[1])};
  float const forward_sums[2] = {row_sum(forward_sum[0]), row_sum(forward_sum[1])};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    choice_sums const x{choice.best[r], token_of(b.head, choice.at[r]), run.most[r], sums[r], forward_sums[r]};
    int const i = first_row + fragment<1>::row(2 * r);
    if (i >= b.rows.count) continue;
    bool const writes_sums = slice == 0 && threadIdx.x % 4 == 0;
    if (parts.count > 1) {
      index_t const at = parts.at(block, part) + i;
      if (writes_sums) parts.row[at] = x;
      if (rule.averages) write_row(parts.value + at * p.value_dim, acc, r, slice * Width, p.value_dim, 1.0F);
      continue;
    }
    index_t const at = b.row(i);
    int const of = b.rows.head_of(i);
    choice_factors const factors(x, rule, p, b.head, b.position(i));
    // What nothing weighs may be infinite.
    if (x.sum == 0.0F) clear_row(acc, r);
    if (out.average.data) write_row(out.average.at(at, of), acc, r, slice * Width, p.value_dim, factors.inverse);
    if (factors.soft == 0.0F) clear_row(acc, r);
    T const* const value = x.token >= 0 ? value_of_token(p, b.head, x.token, of) : nullptr;
    T* const to = out.o.at(at, of);
#pragma unroll
    for (int n = 0; n < Width / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const c = slice * Width + fragment<1>::column(n, e);
        if (c >= p.value_dim) continue;
        float const chosen = value ? factors.held * to_float(value[c]) : 0.0F;
        to[c] = from_float<T>(fmaf(factors.soft, acc.x[n][2 * r + e], chosen));
      }
    if (writes_sums) write_saved(out, x, factors, at, of, p.heads_count);
  }
}

/// Of two candidates the one with the greater score, the lower token where they are equal; a NaN is the greatest.
struct better_choice {
  __device__ choice_sums const& operator()(choice_sums const& a, choice_sums const& b) const {
    if (a.token < 0 || b.token < 0) return a.token < 0 ? b : a;
    bool const odd[2] = {a.best != a.best, b.best != b.best};
    if (odd[0] != odd[1]) return odd[0] ? a : b;
    if (odd[0] || a.best == b.best) return a.token < b.token ? a : b;
    return a.best > b.best ? a : b;
  }
};

/// Puts the parts of a block of rows together, a row by each warp: grid of these blocks. Sums over parts are added
/// in a fixed order.
template <class T>
__global__ void __launch_bounds__(128) join_choices(attention_problem<T> p, choice_rule rule, query_blocks cut,
                                                    choice_parts parts, choice_output<T> out) {
  using best_of = cub::WarpReduce<choice_sums>;
  using sum_of = cub::WarpReduce<float>;
  __shared__ union {
    typename best_of::TempStorage best;
    typename sum_of::TempStorage sum;
  } memory[4];
  __shared__ choice_block b;
  b.begin(p, cut, blockIdx.x, 0, 1);
  int const lane = int(threadIdx.x) % warp;
  auto& scratch = memory[threadIdx.x / warp];
  for (int i = int(threadIdx.x) / warp; i < b.rows.count; i += 4) {
    auto const part = [&](int j) -> choice_sums const& { return parts.row[parts.at(blockIdx.x, j) + i]; };
    choice_sums x;
    for (int j = lane; j < parts.count; j += warp) {
      float const most = fmaxf(x.most, part(j).most);
      x = better_choice()(x, part(j));
      x.most = most;
    }
    float const most = x.most;
    x = best_of(scratch.best).Reduce(x, better_choice());
    x.best = __shfl_sync(~0U, x.best, 0);
    x.token = __shfl_sync(~0U, x.token, 0);
    x.most = most;
#pragma unroll
    for (int lanes = 1; lanes < warp; lanes *= 2) x.most = fmaxf(x.most, __shfl_xor_sync(~0U, x.most, lanes));
    x.sum = x.forward_sum = 0.0F;
    float const level = x.most == -INFINITY ? 0.0F : x.most, best = x.token < 0 ? 0.0F : x.best;
    for (int j = lane; j < parts.count; j += warp) {
      x.sum += part(j).sum * weight_of(part(j).most - level);
      x.forward_sum += part(j).forward_sum * weight_of(part(j).best - best);
    }
    __syncwarp();
    x.sum = __shfl_sync(~0U, sum_of(scratch.sum).Sum(x.sum), 0);
    __syncwarp();
    x.forward_sum = __shfl_sync(~0U, sum_of(scratch.sum).Sum(x.forward_sum), 0);
    __syncwarp();
    index_t const row = b.row(i);
    int const of = b.rows.head_of(i);
    choice_factors const factors(x, rule, p, b.head, b.position(i));
    if (!parts.value && !rule.weighted) {
      write_hard_row(p, out, b.head, factors, x, row, of);
      continue;
    }
    T const* const value = x.token >= 0 ? value_of_token(p, b.head, x.token, of) : nullptr;
    for (int c = lane; c < p.value_dim; c += warp) {
      float sum = 0.0F;
      for (int j = 0; parts.value && j < parts.count; ++j)
        if (part(j).sum != 0.0F)
          sum += parts.value[(parts.at(blockIdx.x, j) + i) * p.value_dim + c] * weight_of(part(j).most - level);
      if (out.average.data) out.average.at(row, of)[c] = sum * factors.inverse;
      float const chosen = value ? factors.held * to_float(value[c]) : 0.0F;
      out.o.at(row, of)[c] = from_float<T>(factors.soft == 0.0F ? chosen : fmaf(factors.soft, sum, chosen));
    }
    if (lane == 0) write_saved(out, x, factors, row, of, p.heads_count);
  }
}

template <class T>
void choice_forward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                    attention_problem<T> const& problem, choice_rule const& rule, bool windowed,
                    choice_output<T> const& out, arena& ws) {
  bool const soft = rule.averages || rule.weighted, few = s.seq.longest() <= few_rows;
  constexpr int warps = choose_shape<T>::warps;
  int const threads = few ? 32 : 32 * warps;
  query_blocks const cut{row_tiles(dev, s.seq,
                                   few    ? few_rows
                                   : soft ? 16 * warps
                                          : choose_shape<T>::rows),
                         int(s.heads), few ? int(packed_heads(s, in)) : 1};
  choice_parts parts;
  if (few) parts.count = int(parts_of(s, windowed, in.past_k_nlhk.extent[1], cut.count()));
  if (parts.count > 1) {
    parts.row = ws.take<choice_sums>(cut.count() * parts.count * few_rows);
    if (rule.averages) parts.value = ws.take<float>(cut.count() * parts.count * few_rows * s.value_dim);
  }
  // Of few widths, so that programs compile fast.
  auto const average = [&](auto width) {
    constexpr int w = decltype(width)::value;
    launch(dev, "choice and average", &choose_and_average<T, w>,
           blocks(cut.count() * parts.count, divided_up(s.value_dim, w)), threads, average_shape<T, w>::bytes(few),
           problem, rule, cut, parts, out);
  };
  int const width = s.key_dim <= 32 ? 32 : s.key_dim <= 64 || widest_slice<T> == 64 ? 64 : widest_slice<T>;
  if (!soft)
    launch(dev, "choice", &choose<T>, blocks(cut.count() * parts.count), threads,
           choose_shape<T>::bytes(width, few), problem, rule, width, cut, parts, out);
  else if (s.key_dim <= 64 && s.value_dim <= 64)
    average(std::integral_constant<int, 64>());
  else
    average(std::integral_constant<int, widest_slice<T>>());
  if (parts.count > 1)
    launch(dev, "choices of parts put together", &join_choices<T>, blocks(cut.count()), 128, 0, problem, rule, cut,
           parts, out);
}

}  // namespace detail
}  // namespace seqmix::inline v0::kernels::cuda
