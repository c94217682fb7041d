#pragma once

#include <seqmix/kernels/cuda/chunk_order.cuh>
#include <seqmix/kernels/cuda/chunk_router.cuh>

/// The forward of routed attention on a device. Queries are gathered by the chunks they chose, so that 64 of them
/// share a tile of keys; what they read there is joined with the keys that they see always by log-sum-exp, choice
/// by choice, in a fixed order.
namespace seqmix::inline v0::kernels::cuda::routed {

/// What rows got from each of their choices. Forward: values relative to e^most, and the sum of their weights.
/// Backward: the derivative of the query, and the sum of those of its scores.
struct chosen_parts {
  float2* run = nullptr;   ///< [R,H,slots]
  float* value = nullptr;  ///< [R,H,slots] rows of `width` numbers
  int slots = 1, width = 0;

  template <class T>
  static chosen_parts take(problem<T> const& p, int channels, arena& ws) {
    index_t const count = p.rows * p.a.heads_count * p.slots;
    int const even = (channels + 1) / 2 * 2;
    float2* const run = ws.take<float2>(count);
    return {run, ws.take<float>(count * even), p.slots, even};
  }
  __device__ float2& run_of(index_t at, int slot) const { return run[at * slots + slot]; }
  /// f(two numbers, n): those that a lane has of a row in a fragment whose first column is channel `from`.
  template <int Columns, class F>
  __device__ void lane_pairs(index_t at, int slot, int from, F const& f) const {
    float* const row = value + (at * slots + slot) * width + from;
#pragma unroll
    for (int n = 0; n < Columns; ++n) {
      int const column = fragment<Columns>::column(n, 0);
      if (from + column < width) f(*reinterpret_cast<float2*>(row + column), n);
    }
  }
  /// Row r of a lane's two.
  template <int Columns>
  __device__ void store(index_t at, int slot, int from, fragment<Columns> const& x, int r) const {
    lane_pairs<Columns>(at, slot, from, [&](float2& to, int n) { to = {x.x[n][2 * r], x.x[n][2 * r + 1]}; });
  }
};

/// The queries of a block: a tile of a chunk's list, or consecutive rows.
struct query_block {
  sequence_tokens s;
  int head, count = 0;
  int chunk = -1;  ///< -1: consecutive rows
  int first = 0;   ///< row
  int slots = 1;
  int const* entry = nullptr;  ///< of a list

  __device__ int row(int i) const { return i >= count ? -1 : chunk < 0 ? first + i : entry[i] / slots; }
  __device__ int slot(int i) const { return i >= count || chunk < 0 ? 0 : entry[i] % slots; }
};

/// The blocks of one kind for all heads, those of a head behind one another.
struct query_cut {
  row_tiles rows;
  chunk_lists lists;
  bool listed;
  int heads_count;

  index_t count() const { return (listed ? lists.tiles : rows.count) * heads_count; }
  template <class T>
  __device__ query_block at(problem<T> const& p, index_t block) const {
    query_block q;
    q.slots = p.slots;
    if (!listed) {
      row_block const block_rows(p, rows, block % rows.count, int(block / rows.count));
      q.s = block_rows.s;
      q.head = block_rows.head;
      q.first = block_rows.first;
      q.count = block_rows.end - block_rows.first;
      return q;
    }
    q.head = int(block / lists.tiles);
    auto const t = lists.tile[block];
    if (t.count == 0) return q;
    q.s = p.tokens(t.sequence);
    q.chunk = t.chunk;
    q.count = t.count;
    q.entry = lists.of(q.head, q.s) + t.first;
    return q;
  }
};

/// The two rows of a lane: where they stand, and the keys [above, below) that they see in their block.
struct lane_queries {
  int row[2], slot[2];  ///< row -1: none
  int above[2], below[2];
  split_sum gate[2];

  template <class T>
  __device__ lane_queries(problem<T> const& p, query_block const& q, head_bias const& g, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const i = first + fragment<8>::row(2 * r);
      row[r] = q.row(i);
      slot[r] = q.slot(i);
      int const position = q.s.past + (row[r] < 0 ? 0 : row[r]);
      above[r] = q.chunk < 0 ? p.always_from(position) : q.chunk * p.chunk;
      int const end = q.chunk < 0 ? position + 1 : p.chosen_end(position, q.chunk);
      below[r] = row[r] < 0 ? 0 : end < position + 1 ? end : position + 1;
      gate[r] = p.gate(g, position, q.s.count());
    }
  }
  /// Columns of the tile at key j that row r sees.
  __device__ int2 columns(int r, int j) const {
    int const low = above[r] - j, high = below[r] - j;
    return {low > 0 ? low : 0, high < tile ? high : tile};
  }
};
/// Keys [x, y) that some query of a block sees.
template <class T>
__device__ int2 keys_of(problem<T> const& p, query_block const& q) {
  int const last = q.s.past + q.row(q.count - 1);
  if (q.chunk < 0) return {p.always_from(q.s.past + q.first), p.always == always_seen::nothing ? 0 : last + 1};
  int const end = p.chosen_end(last, q.chunk);
  return {q.chunk * p.chunk, end < last + 1 ? end : last + 1};
}

/// Numbers of a warp's scratch that takes weights to a product: only floats go by way of it.
template <class T>
inline constexpr int weight_row = sizeof(T) == 2 ? 0 : padded_row<T>(tile);

template <class T, int Width>
struct attend_memory {
  static constexpr int row = padded_row<T>(Width);
  alignas(16) T query[tile * row];
  T key[tile * row];
  T value[tile * row];
  T weight[tile * weight_row<T> + 8];
  split_sum gate[tile];
};

/// Where a forward's results go.
template <class T>
struct routed_output {
  heads<T> o;
  float* lse = nullptr;  ///< [R,H]
  routing chosen;
  table<double> recorded_lse;
  table<index_t> recorded_choice;
  heads<index_t> recorded_choices;
  int recorded_count = 0;

  __device__ void record(index_t row, int head, index_t at, int choices, float most, float sum) const {
    float const weight = chosen.weight[at], all = sum == 0.0F ? 0.0F : most + logf(sum);
    if (lse) lse[at] = weight == weight ? all : weight;
    if (recorded_lse.data) recorded_lse(row, head) = sum == 0.0F ? -INFINITY : all;
    index_t const* const choice = chosen.choice + at * choices;
    if (recorded_choice.data) recorded_choice(row, head) = choice[0];
    for (int i = 0; i < recorded_count; ++i)
      recorded_choices.at(row, head)[i] = i < choices ? choice[i] : index_t(-1);
  }
};

/// A row's softmax, in the lanes that share it; each sums over its own columns.
struct row_softmax {
  float most = -INFINITY, sum = 0.0F;

  /// Joined by weights relative to e^other_most; returns the factors of what was there and of what comes.
  __device__ float2 join(float other_most, float other_sum) {
    float const now = fmaxf(most, other_most), level = now == -INFINITY ? 0.0F : now;
    float2 const factor{weight_of(most - level), weight_of(other_most - level)};
    most = now;
    sum = sum * factor.x + other_sum * factor.y;
    return factor;
  }
};

/// What a lane's two rows have read: values relative to e^most.
template <int Columns>
struct lane_reading {
  row_softmax run[2];
  fragment<Columns> value;

  /// The sink, then what the rows read with their choices.
  template <class T>
  __device__ void begin(problem<T> const& p, query_block const& q, lane_queries const& rows,
                        chosen_parts const& parts, index_t const* choice, int from) {
    bool const counts = threadIdx.x % 4 == 0;
    float const sink = p.a.sink ? p.a.sink[q.head * p.a.sink_step] : -INFINITY;
    if (sink != -INFINITY)
      for (int r = 0; r < 2; ++r) run[r] = {sink, counts ? 1.0F : 0.0F};
#pragma unroll 1
    for (int slot = 0; slot < p.slots; ++slot)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        index_t const at = p.at(q.s.begin + rows.row[r], q.head);
        if (rows.row[r] < 0 || choice[at * p.choices + slot] < 0) continue;
        float2 const part = parts.run_of(at, slot);
        if (part.y == 0.0F) continue;
        float2 const factor = run[r].join(part.x, counts ? part.y : 0.0F);
        parts.lane_pairs<Columns>(at, slot, from, [&](float2 const& x, int n) {
          value.x[n][2 * r] = value.x[n][2 * r] * factor.x + x.x * factor.y;
          value.x[n][2 * r + 1] = value.x[n][2 * r + 1] * factor.x + x.y * factor.y;
        });
      }
  }
  /// Products of the tile at key j to weights; what was read before is scaled to them.
  template <class T>
  __device__ void weigh(problem<T> const& p, lane_queries const& rows, int j, split_sum const* gate,
                        fragment<8>& x) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto const seen = rows.columns(r, j);
      float here = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          int const column = fragment<8>::column(n, e);
          float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, rows.gate[r], gate[column]);
          x.x[n][e] = column >= seen.x && column < seen.y ? y : -INFINITY;
          here = fmaxf(here, x.x[n][e]);
        }
      // While everything is -inf, subtracting 0 keeps the weights 0 and lets a NaN through.
      float const factor = run[r].join(row_max(here), 0.0F).x;
      float const level = run[r].most == -INFINITY ? 0.0F : run[r].most;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          x.x[n][e] = weight_of(x.x[n][e] - level);
          run[r].sum += x.x[n][e];
        }
#pragma unroll
      for (int n = 0; n < Columns; ++n) {
        value.x[n][2 * r] *= factor;
        value.x[n][2 * r + 1] *= factor;
      }
    }
  }
};

/// Softmax over the keys that a block's queries see there: grid (blocks of a cut, slices of values). Of lists, what
/// was read goes to `parts`; consecutive rows join their parts and write the output.
template <class T, int Width>
__global__ void __launch_bounds__(threads, resident_blocks<T, Width>)
    attend(problem<T> p, query_cut cut, chosen_parts parts, routed_output<T> out) {
  using memory = attend_memory<T, Width>;
  auto& m = shared_memory<memory>();
  auto const q = cut.at(p, blockIdx.x);
  if (q.count <= 0) return;
  head_loader<T, Width> const load{p, q.s, q.head};
  head_bias const g = p.bias(q.s, q.head);
  int const from = int(threadIdx.x / warp) * 16, value_from = int(blockIdx.y) * Width;
  int const slices = load.slices(p.a.key_dim);
  bool const active = from < q.count;
  lane_queries const rows(p, q, g, from);
  lane_reading<Width / 8> reading;
  reading.value.fill(0.0F);
  if (!cut.listed) reading.begin(p, q, rows, parts, out.chosen.choice, value_from);

  auto const keys = keys_of(p, q);
  for (int j = keys.x; j < keys.y; j += tile) {
    fragment<8> x;
    x.fill(0.0F);
    for (int slice = 0; slice < slices; ++slice) {
      __syncthreads();
      if (j == keys.x || slices > 1) load.queries(m.query, tile, slice, [&](int i) { return q.row(i); });
      load.keys(m.key, j, keys.y, slice);
      if (slice == 0) {
        load.values(m.value, j, keys.y, int(blockIdx.y));
        if (threadIdx.x < tile) m.gate[threadIdx.x] = p.gate(g, j + int(threadIdx.x), keys.y);
      }
      finish_loads();
      __syncthreads();
      if (active)
        multiply_add<layout::row_major, layout::column_major>(x, m.query + from * memory::row, memory::row, m.key,
                                                              memory::row, Width);
    }
    if (!active) continue;
    reading.weigh(p, rows, j, m.gate, x);
    multiply_add<T>(reading.value, x, m.value, memory::row, m.weight + from * weight_row<T>);
  }
  if (!active) return;

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float const most = reading.run[r].most, sum = row_sum(reading.run[r].sum);
    if (rows.row[r] < 0) continue;
    index_t const row = q.s.begin + rows.row[r], at = p.at(row, q.head);
    bool const reports = threadIdx.x % 4 == 0 && blockIdx.y == 0;
    if (cut.listed) {
      if (reports) parts.run_of(at, rows.slot[r]) = {most, sum};
      parts.store(at, rows.slot[r], value_from, reading.value, r);
      continue;
    }
    if (reports) out.record(row, q.head, at, p.choices, most, sum);
    float const factor = (sum == 0.0F ? 0.0F : 1.0F / sum) * out.chosen.weight[at];
#pragma unroll
    for (int n = 0; n < Width / 8; ++n)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e)
        reading.value.x[n][e] = factor == 0.0F ? 0.0F : factor * reading.value.x[n][e];
  }
  if (cut.listed) return;
  write_rows(reading.value, m.query + from * memory::row, memory::row, value_from, p.a.value_dim, [&](int i) -> T* {
    return from + i < q.count ? out.o.at(q.s.begin + q.first + from + i, q.head) : nullptr;
  });
}

/// Launches all of the forward behind the choice.
template <class T>
void attend_chosen(device::cuda const& dev, attention_shape const& s, problem<T> const& p, row_tiles const& rows,
                   routed_output<T> const& out, arena& ws) {
  arena_scope const scope(ws);
  auto const lists = order_by_chunk(dev, s, p, out.chosen.choice, ws);
  auto const parts = chosen_parts::take(p, p.a.value_dim, ws);
  with_slice<T>((std::max)(p.a.key_dim, p.a.value_dim), [&]<int Width>(std::integral_constant<int, Width>) {
    for (bool const listed : {true, false}) {
      query_cut const cut{rows, lists, listed, p.a.heads_count};
      launch(dev, listed ? "routed attention: chosen chunks" : "routed attention: output", &attend<T, Width>,
             blocks(cut.count(), divided_up(p.a.value_dim, Width)), threads, sizeof(attend_memory<T, Width>), p,
             cut, parts, out);
    }
  });
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
