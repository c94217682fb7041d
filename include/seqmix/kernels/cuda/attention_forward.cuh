#pragma once

#include <algorithm>
#include <numeric>

#include <seqmix/kernels/cuda/attention_tiles.cuh>

/// The forward of softmax attention on a device, in one pass over tiles of keys with a running maximum and sum
/// (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691). Few rows with many keys (decoding): keys are
/// split over blocks, whose parts are put together in order.
namespace seqmix::inline v0::kernels::cuda {

/// Where a forward's results go.
template <class T>
struct attention_output {
  heads<T> o;
  float* lse;  ///< [R,H], nullptr: not kept
  table<double> recorded_lse;
  table<index_t> recorded_choice;
};

/// The results of parts of the keys: accumulated values relative to e^most, and their sum of weights.
struct attention_parts {
  int count = 1;           ///< 1: no parts, results are written at once
  float* most = nullptr;   ///< [blocks of rows, parts, 16]
  float* sum = nullptr;    ///< the same
  float* value = nullptr;  ///< [blocks of rows, parts, 16, V]

  __device__ index_t row(index_t block, int part) const { return (block * count + part) * 16; }
};

/// The rows of a block: queries of one head behind one another, or with a step of 0 one query of `count` heads.
struct query_rows {
  index_t sequence, first;  ///< counted in the sequence
  int head, step, count;

  __device__ index_t position(index_t from, int i) const { return from + first + i * step; }
  __device__ index_t row(index_t begin, int i) const { return begin + first + i * step; }
  __device__ int head_of(int i) const { return step == 0 ? head + i : head; }
};

/// How blocks are cut: `packed` heads that read the same keys and values share the blocks of their one query.
struct query_blocks {
  row_tiles tiles;
  int heads_count, packed;

  /// Those with the most keys first; the blocks of a head behind one another, since they read the same keys.
  __device__ query_rows at(index_t block) const {
    index_t const unit = block / tiles.count;
    auto const place = tiles.at(tiles.count - 1 - block % tiles.count);
    if (packed > 1) {
      int const per_group = (packed + int(tiles.size) - 1) / int(tiles.size);
      int const head = int(unit / per_group) * packed, from = int(unit % per_group) * int(tiles.size);
      int const left = packed - from;
      index_t const rows = tiles.rows.length(place.sequence);
      return {place.sequence, 0, head + from, 0, rows == 0 ? 0 : left < tiles.size ? left : int(tiles.size)};
    }
    index_t const left = tiles.rows.length(place.sequence) - place.first;
    return {place.sequence, place.first, int(unit), 1, left < tiles.size ? int(left) : int(tiles.size)};
  }
  index_t count() const {
    if (packed == 1) return tiles.count * heads_count;
    return tiles.count * (heads_count / packed) * divided_up(packed, tiles.size);
  }
};

namespace detail {

/// Running maximum and sum of a lane's two rows; the sum is the lane's own part of it.
struct running_softmax {
  float most[2], sum[2];

  /// Scores to weights; what was accumulated before is scaled to the new maximum.
  template <int Keys, int Columns>
  __device__ void absorb(fragment<Keys>& x, fragment<Columns>& acc) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float here = -INFINITY;
#pragma unroll
      for (int n = 0; n < Keys; ++n) here = fmaxf(here, fmaxf(x.x[n][2 * r], x.x[n][2 * r + 1]));
      float const now = fmaxf(most[r], row_max(here));
      // While everything is -inf, subtracting 0 keeps the weights 0 and lets a NaN through.
      float const level = now == -INFINITY ? 0.0F : now;
      float const factor = weight_of(most[r] - level);
      most[r] = now;
      float total = 0.0F;
#pragma unroll
      for (int n = 0; n < Keys; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          x.x[n][e] = weight_of(x.x[n][e] - level);
          total += x.x[n][e];
        }
      sum[r] = fmaf(sum[r], factor, total);
#pragma unroll
      for (int n = 0; n < Columns; ++n) {
        acc.x[n][2 * r] *= factor;
        acc.x[n][2 * r + 1] *= factor;
      }
    }
  }
};

template <class T>
__device__ void write_row_results(attention_output<T> const& out, index_t r, int head, int heads_count, float most,
                                  float sum) {
  float const lse = sum == 0.0F ? 0.0F : most + logf(sum);
  if (out.lse) out.lse[r * heads_count + head] = lse;
  if (out.recorded_lse.data) out.recorded_lse(r, head) = sum == 0.0F ? -INFINITY : lse;
  if (out.recorded_choice.data) out.recorded_choice(r, head) = -1;
}

/// Values that nothing weighs may be infinite: what was accumulated of a row without weights is not 0 by itself.
template <int Columns>
__device__ void clear_row(fragment<Columns>& x, int r) {
#pragma unroll
  for (int n = 0; n < Columns; ++n) x.x[n][2 * r] = x.x[n][2 * r + 1] = 0.0F;
}

/// Shared memory of a forward block.
template <class T, int Width, int Warps>
struct forward_memory {
  static constexpr int row = padded_row<T>(Width);
  static constexpr int q = 0, k = q + 16 * Warps * row, v = k + tile_keys * row, p = v + tile_keys * row;
  static constexpr int weights = sizeof(T) == 2 ? 0 : 16 * Warps * padded_row<T>(tile_keys);
  static constexpr int gate_bytes = (p + weights) * int(sizeof(T));
  static constexpr int bytes = gate_bytes + 2 * tile_keys * int(sizeof(split_sum));
};

/// Blocks that shall fit a multiprocessor.
template <class T, int Width, int Warps>
inline constexpr int forward_blocks = Warps == 1       ? 8
                                      : sizeof(T) == 4 ? 3
                                      : Width > 64     ? 1
                                                       : 2;

/// One block per rows, part of the keys and slice of the values: grid (rows x parts, slices).
template <class T, int Width, int Warps>
__global__ void __launch_bounds__(32 * Warps, forward_blocks<T, Width, Warps>)
    attend(attention_problem<T> p, query_blocks cut, attention_parts parts, attention_output<T> out) {
  using memory = forward_memory<T, Width, Warps>;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  T *const q = base + memory::q, *const k = base + memory::k, *const v = base + memory::v;
  auto* const gates = reinterpret_cast<split_sum*>(reinterpret_cast<char*>(shared) + memory::gate_bytes);
  constexpr bool few = Warps == 1;  // else there is one part
  int const part_count = few ? parts.count : 1;
  int const part = few ? int(blockIdx.x % part_count) : 0, slice = int(blockIdx.y);
  index_t const block = few ? blockIdx.x / part_count : blockIdx.x;
  // In shared memory, where they cost no registers.
  __shared__ query_rows rows;
  __shared__ attended_head head;
  if (threadIdx.x == 0) {
    rows = cut.at(block);
    head = attended_head::of(p, rows.sequence, rows.head);
  }
  __syncthreads();
  if (rows.count <= 0) return;
  int const key_slices = (p.key_dim + Width - 1) / Width;
  bool const sliced = may_be_sliced<T, Width> && key_slices > 1;

  auto seen = head.seen(rows.position(head.position, 0), rows.position(head.position, rows.count - 1), p.window);
  int const per_part = (seen.end - seen.begin + part_count - 1) / part_count;
  seen.begin = seen.begin + part * per_part < seen.end ? seen.begin + part * per_part : seen.end;
  seen.end = seen.begin + per_part < seen.end ? seen.begin + per_part : seen.end;

  slice_loader<Width, 32 * Warps, T> const load_queries{
      q,          16 * Warps, p.q.at(rows.row(head.begin, 0), rows.head), rows.step == 0 ? p.q.head : p.q.row,
      rows.count, p.key_dim};
  auto const load_keys = [&](int t, int s) {
    auto const tile = head.tile(p, t);
    begin_slice<Width, 32 * Warps>(k, tile_keys, tile.k, tile.k_row, tile.count, p.key_dim, s);
    if (p.bias.given && s == 0) load_gates(gates + t % 2 * tile_keys, head.bias(p), tile);
  };

  int const first_row = int(threadIdx.x) / warp * 16;
  bool const works = first_row < rows.count;
  lane_rows lane{};
  running_softmax run;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const i = first_row + fragment<1>::row(2 * r);
    run.most[r] = part == 0 && p.sink && i < rows.count ? p.sink[rows.head_of(i) * p.sink_step] : -INFINITY;
    run.sum[r] = run.most[r] == -INFINITY || int(threadIdx.x) % 4 != 0 ? 0.0F : 1.0F;
    if (p.bias.given && i < rows.count) lane.sum[r] = head.bias(p).split(rows.position(head.position, i));
  }
  fragment<Width / 8> acc;
  acc.fill(0.0F);
  if (!sliced && seen.begin < seen.end) {
    load_queries(0);
    load_keys(seen.begin, 0);
  }
  for (int t = seen.begin; t < seen.end; ++t) {
    auto const tile = head.tile(p, t);
    fragment<tile_keys / 8> x;
    x.fill(0.0F);
    for (int s = 0; s < (sliced ? key_slices : 1); ++s) {
      if (sliced) {
        __syncthreads();
        load_queries(s);
        load_keys(t, s);
      }
      arrive();
      if (s == 0) begin_slice<Width, 32 * Warps>(v, tile_keys, tile.v, tile.v_row, tile.count, p.value_dim, slice);
      if (works)
        multiply_add<layout::row_major, layout::column_major>(x, q + first_row * memory::row, memory::row, k,
                                                              memory::row, Width);
    }
    arrive();
    if (!sliced && t + 1 < seen.end) load_keys(t + 1, 0);
    index_t const low = rows.position(head.position, first_row), high = low + 15 * rows.step;
    bool const sees = tile.token <= high && tile.token + tile.count > low - p.window + 1;
    if (!works || !sees) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) lane.seen[r] = tile.seen(low + fragment<1>::row(2 * r) * rows.step, p.window);
    score(x, lane, p.scale, p.bias.given ? gates + t % 2 * tile_keys : nullptr, 0,
          tile.seen_by_all(low, high, p.window));
    run.absorb(x, acc);
    multiply_add<T>(acc, x, v, memory::row, base + memory::p + first_row * padded_row<T>(tile_keys));
  }
  if (!works) return;
  float const sums[2] = {row_sum(run.sum[0]), row_sum(run.sum[1])};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const i = first_row + fragment<1>::row(2 * r);
    if (i >= rows.count) continue;
    bool const writes_sums = slice == 0 && threadIdx.x % 4 == 0;
    if (part_count > 1) {
      index_t const at = parts.row(block, part) + i;
      if (writes_sums) parts.most[at] = run.most[r], parts.sum[at] = sums[r];
      write_row(parts.value + at * p.value_dim, acc, r, slice * Width, p.value_dim, 1.0F);
    } else {
      index_t const row = rows.row(head.begin, i);
      int const of = rows.head_of(i);
      if (sums[r] == 0.0F) clear_row(acc, r);
      write_row(out.o.at(row, of), acc, r, slice * Width, p.value_dim, sums[r] == 0.0F ? 0.0F : 1.0F / sums[r]);
      if (writes_sums) write_row_results(out, row, of, p.heads_count, run.most[r], sums[r]);
    }
  }
}

/// Puts the parts of a block of rows together, in their order: grid of these blocks.
template <class T>
__global__ void __launch_bounds__(128)
    join_parts(attention_problem<T> p, query_blocks cut, attention_parts parts, attention_output<T> out) {
  auto const rows = cut.at(blockIdx.x);
  for (int i = 0; i < rows.count; ++i) {
    float most = -INFINITY;
    for (int part = 0; part < parts.count; ++part) most = fmaxf(most, parts.most[parts.row(blockIdx.x, part) + i]);
    float const level = most == -INFINITY ? 0.0F : most;
    float sum = 0.0F;
    for (int part = 0; part < parts.count; ++part) {
      index_t const at = parts.row(blockIdx.x, part) + i;
      sum += parts.sum[at] * weight_of(parts.most[at] - level);
    }
    float const inverse = 1.0F / sum;
    index_t const row = rows.row(p.places.rows.begin(rows.sequence), i);
    T* const to = out.o.at(row, rows.head_of(i));
    for (int c = int(threadIdx.x); c < p.value_dim; c += int(blockDim.x)) {
      float x = 0.0F;
      for (int part = 0; part < parts.count; ++part) {
        index_t const at = parts.row(blockIdx.x, part) + i;
        x += parts.value[at * p.value_dim + c] * weight_of(parts.most[at] - level);
      }
      to[c] = from_float<T>(sum == 0.0F ? 0.0F : x * inverse);
    }
    if (threadIdx.x == 0) write_row_results(out, row, rows.head_of(i), p.heads_count, most, sum);
  }
}

/// Of sequences with so few rows one warp works on a block's rows, and the keys may be split.
inline constexpr index_t few_rows = 16;
/// One-warp blocks that fill a device.
inline constexpr index_t enough_blocks = 1024;

/// Parts the keys are split into where there are `blocks` blocks of few rows; from shapes alone.
inline index_t parts_of(attention_shape const& s, bool windowed, index_t capacity, index_t blocks) {
  index_t tiles = divided_up(capacity, tile_keys) + 1;
  if (windowed) tiles = std::min(tiles, divided_up(s.select.window, tile_keys) + 2);
  if (blocks < 1) return 1;
  return std::clamp<index_t>(enough_blocks / blocks, 1, divided_up(tiles, 2));
}

/// Heads that share one query's blocks: those that read the same keys, values and gate, where sequences are one row
/// long.
template <class T>
index_t packed_heads(attention_shape const& s, attention_input<T> const& in) {
  if (!s.seq.is_batch() || s.seq.longest() != 1) return 1;
  index_t const kv = std::gcd(s.heads / s.key_heads, s.heads / s.value_heads);
  return has_gate(in) ? std::gcd(kv, s.heads / s.gate_heads) : kv;
}

template <class T, int Width>
void attention_forward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                       attention_problem<T> const& problem, bool windowed, attention_output<T> const& out,
                       arena& ws) {
  index_t const slices = divided_up(s.value_dim, Width);
  if (s.seq.longest() > few_rows) {
    constexpr int warps = sizeof(T) == 2 ? 8 : 4;
    query_blocks const cut{row_tiles(dev, s.seq, 16 * warps), int(s.heads), 1};
    launch(dev, "attention forward", &attend<T, Width, warps>, blocks(cut.count(), slices), 32 * warps,
           forward_memory<T, Width, warps>::bytes, problem, cut, attention_parts{}, out);
    return;
  }
  query_blocks const cut{row_tiles(dev, s.seq, few_rows), int(s.heads), int(packed_heads(s, in))};
  index_t const count = parts_of(s, windowed, in.past_k_nlhk.extent[1], cut.count() * slices);
  attention_parts parts;
  if (count > 1) {
    parts.count = int(count);
    parts.most = ws.take<float>(cut.count() * count * few_rows);
    parts.sum = ws.take<float>(cut.count() * count * few_rows);
    parts.value = ws.take<float>(cut.count() * count * few_rows * s.value_dim);
  }
  launch(dev, "attention of few rows", &attend<T, Width, 1>, blocks(cut.count() * count, slices), 32,
         forward_memory<T, Width, 1>::bytes, problem, cut, parts, out);
  if (count > 1)
    launch(dev, "attention, parts put together", &join_parts<T>, blocks(cut.count()), 128, 0, problem, cut, parts,
           out);
}

}  // namespace detail
}  // namespace seqmix::inline v0::kernels::cuda
