#pragma once

#include <algorithm>

#include <seqmix/kernels/cuda/chunk_means.cuh>

/// Which chunks does each query read, on a device. Scores by mean keys are compared as they are made. Those that
/// read every key, or that are needed as probabilities, go through a table of queries by chunks, some rows of it at
/// a time, so that memory stays linear in the number of tokens.
namespace seqmix::inline v0::kernels::cuda::routed {

/// What routing leaves for the rows of a call.
struct routing {
  index_t* choice = nullptr;  ///< [R,H,choices], the best first; -1: no candidate
  float* weight = nullptr;    ///< [R,H] on the output; NaN where a score that decided was NaN
};

/// Scores [H, rows, chunks] of the rows of some query tiles; row 64 t + i is row i of tile first_tile + t.
struct chunk_table {
  float* data = nullptr;
  index_t first_tile = 0, rows = 0, columns = 0;

  index_t tiles() const { return rows / tile; }
  __device__ index_t at(int head, index_t slot, int chunk) const { return (head * rows + slot) * columns + chunk; }
  __device__ float* of(int head, index_t slot) const { return data + at(head, slot, 0); }
};

/// The greatest of values, the lowest index among equals; a NaN before all, the first one of several.
struct best_value {
  float value = -INFINITY;
  int index = -1;

  /// Of indices in ascending order.
  __device__ void take(float v, int i) {
    if (!(v <= value) && value == value) {
      value = v;
      index = i;
    }
  }
  __device__ void take_any(float v, int i) {
    bool const nan = v != v, have = value != value;
    bool const better = nan != have ? nan : v > value || ((nan || v == value) && i < index);
    if (i >= 0 && (index < 0 || better)) {
      value = v;
      index = i;
    }
  }
  __device__ void join_lanes(int lanes) {
    for (int step = 1; step < lanes; step *= 2)
      take_any(__shfl_xor_sync(~0U, value, step), __shfl_xor_sync(~0U, index, step));
  }
};

__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, step));
  return x;
}
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0U, x, step);
  return x;
}

/// softmax of one row of `count` scores, for all lanes of a warp; all zero where every score is -inf.
struct row_probabilities {
  float const* score;
  float top = -INFINITY, inverse;

  __device__ row_probabilities(float const* scores, int count) : score(scores) {
    int const lane = int(threadIdx.x % warp);
    for (int c = lane; c < count; c += warp) top = fmaxf(top, score[c]);
    top = warp_max(top);
    if (top == -INFINITY) top = 0.0F;
    float sum = 0.0F;
    for (int c = lane; c < count; c += warp) sum += weight_of(score[c] - top);
    sum = warp_sum(sum);
    inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
  }
  __device__ float at(index_t c) const { return weight_of(score[c] - top) * inverse; }
};

/// How the tiles of a product of queries and means are cut: as wide as the heads, or slices of 64 of wider ones.
struct mean_tiles {
  int width, row;
  int row_bytes;  ///< of a query and the parts of a mean

  template <class T>
  static mean_tiles of(index_t channels) {
    int const width = channels <= widest_slice<T> ? int(divided_up(channels, 16)) * 16 : 64;
    int const row = width + vector_elements<T>;
    return {width, row, (1 + mean_parts<T>)*row * int(sizeof(T))};
  }
  /// Bytes for queries, means, their G, and scores of `score_rows` rows.
  std::size_t bytes(int score_rows) const {
    return std::size_t(tile) * std::size_t(row_bytes) + 2 * tile * sizeof(split_sum) +
           std::size_t(score_rows) * (tile + 1) * sizeof(float);
  }
};

/// The queries of a block and what they are compared with, in shared memory.
template <class T>
struct mean_products {
  problem<T> const& p;
  chunk_means<T> const& means;
  row_block const& rows;
  mean_tiles cut;
  T *query, *mean;
  split_sum *query_gate, *mean_gate;
  float* score;

  __device__ mean_products(problem<T> const& problem, chunk_means<T> const& all, row_block const& block,
                           mean_tiles const& tiles)
      : p(problem), means(all), rows(block), cut(tiles), query(&shared_memory<T>()), mean(query + tile * cut.row),
        query_gate(reinterpret_cast<split_sum*>(mean + mean_parts<T> * tile * cut.row)),
        mean_gate(query_gate + tile), score(reinterpret_cast<float*>(mean_gate + tile)) {
    if (threadIdx.x >= tile) return;
    query_gate[threadIdx.x] = split_sum(0.0);
    if (biased() && rows.row(int(threadIdx.x)) >= 0)
      query_gate[threadIdx.x] = p.bias(rows.s, rows.head).split(rows.s.past + rows.first + int(threadIdx.x));
  }
  __device__ bool biased() const { return means.mean_gate != nullptr; }
  __device__ static int warp_row() { return int(threadIdx.x / warp) * 16; }
  __device__ bool active() const { return rows.row(warp_row()) >= 0; }

  /// Scores of chunks [chunk, chunk + 64), of no meaning behind the last. `anew`: queries are not loaded yet.
  __device__ void of_chunks(fragment<8>& x, int chunk, bool anew) const {
    int const key_head = p.key_head(rows.head), count = p.chunks(rows.s) - chunk;
    index_t const place = p.first_chunk(rows.s.n) + chunk;
    multiply(
        x, anew, [&](int part, int i) { return i < count ? means.of_chunk(part, place + i, key_head) : nullptr; },
        [&](int i) { return i < count ? means.mean_gate + (place + i) * p.gate_heads : nullptr; });
    x.each([&](float& y, int row, int column) {
      y = score_of(y, p.a.scale, biased(), query_gate[warp_row() + row], mean_gate[column]);
    });
  }
  /// The scores of the queries' own chunks by the means of their keys so far, to own[64].
  __device__ void of_prefixes(float* own) const {
    int const key_head = p.key_head(rows.head);
    index_t const first = rows.s.begin + rows.first;
    fragment<2> x;
    multiply(
        x, true,
        [&](int part, int i) { return rows.row(i) < 0 ? nullptr : means.of_prefix(part, first + i, key_head); },
        [&](int i) { return rows.row(i) < 0 ? nullptr : means.prefix_gate + (first + i) * p.gate_heads; });
    x.each([&](float& y, int row, int column) {
      int const i = warp_row() + row;
      if (row == column) own[i] = score_of(y, p.a.scale, biased(), query_gate[i], mean_gate[i]);
    });
    __syncthreads();
  }

 private:
  /// mean_of(part, i): mean i of the tile, gate_of(i): its G of all gate heads. Of 16 columns, those of the warp's
  /// own rows.
  template <int Columns, class MeanOf, class GateOf>
  __device__ void multiply(fragment<Columns>& x, bool anew, MeanOf const& mean_of, GateOf const& gate_of) const {
    x.fill(0.0F);
    for (int from = 0; from < p.a.key_dim; from += cut.width) {
      __syncthreads();
      if (anew || p.a.key_dim > cut.width)
        begin_rows(query, cut.row, tile, cut.width, from, p.a.key_dim, [&](int i) -> T const* {
          return rows.row(i) < 0 ? nullptr : p.query(rows.s, rows.row(i), rows.head);
        });
      for (int part = 0; part < mean_parts<T>; ++part)
        begin_rows(mean + part * tile * cut.row, cut.row, tile, cut.width, from, p.a.key_dim,
                   [&](int i) -> T const* { return mean_of(part, i); });
      if (from == 0 && threadIdx.x < tile) {
        double const* const gate = biased() ? gate_of(int(threadIdx.x)) : nullptr;
        mean_gate[threadIdx.x] = split_sum(gate ? gate[rows.head / p.a.gate_group] : 0.0);
      }
      finish_loads();
      __syncthreads();
      if (!active()) continue;
      for (int part = 0; part < mean_parts<T>; ++part)
        multiply_add<layout::row_major, layout::column_major>(
            x, query + warp_row() * cut.row, cut.row,
            mean + (part * tile + (Columns == 2 ? warp_row() : 0)) * cut.row, cut.row, cut.width);
    }
  }
};

/// The best chunks of one row, kept in device memory by one lane.
struct best_chunks {
  index_t* choice;
  float* kept;
  int most, count = 0;
  bool spoiled = false;

  __device__ void take(float v, int c) {
    if (spoiled) return;
    if (v != v) {
      spoiled = true;
      count = 1;
      choice[0] = c;
      return;
    }
    if (count == most && !(v > kept[most - 1])) return;
    int at = count < most ? count++ : most - 1;
    for (; at > 0 && v > kept[at - 1]; --at) {
      kept[at] = kept[at - 1];
      choice[at] = choice[at - 1];
    }
    kept[at] = v;
    choice[at] = c;
  }
};

/// Choices by the scores of mean keys: one block per query tile and head. `kept` [R,H,slots] is room for the scores
/// of several choices.
template <class T, bool Several>
__global__ void __launch_bounds__(threads, 4)
    choose_by_means(problem<T> p, chunk_means<T> means, row_tiles cut, mean_tiles width, routing out, float* kept) {
  row_block const rows(p, cut, blockIdx.x % cut.count, int(blockIdx.x / cut.count));
  if (rows.empty()) return;
  mean_products<T> const products(p, means, rows, width);
  int const lane = int(threadIdx.x % warp), from = products.warp_row();
  int const all = rows.last_position() / p.chunk;  // complete chunks before the last row
  float* const own = products.score + (Several ? 4 * 16 * (tile + 1) : 0);

  // Top-1: each lane finds the best of its columns for two rows. Several: lane i < 16 keeps the list of row i.
  int complete[2];
  best_value best[2];
  for (int r = 0; r < 2; ++r)
    complete[r] = (rows.s.past + rows.first + from + (Several ? lane : fragment<8>::row(2 * r))) / p.chunk;
  int const row = rows.row(from + lane);
  bool const keeps = Several && lane < 16 && row >= 0;
  index_t const at = p.at(rows.s.begin + (row < 0 ? 0 : row), rows.head);
  best_chunks list{out.choice + at * p.choices, kept + at * p.slots, p.slots};
  for (int chunk = 0; chunk < all; chunk += tile) {
    fragment<8> x;
    products.of_chunks(x, chunk, chunk == 0);
    if (!products.active()) continue;
    if constexpr (Several) {
      float* const scores = products.score + from * (tile + 1);
      x.each([&](float& y, int i, int column) { scores[i * (tile + 1) + column] = y; });
      __syncwarp();
      if (keeps)
        for (int c = 0; c < tile && chunk + c < complete[0]; ++c)
          list.take(scores[lane * (tile + 1) + c], chunk + c);
      __syncwarp();
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const c = chunk + fragment<8>::column(n, e);
          if (c < complete[e / 2]) best[e / 2].take(x.x[n][e], c);
        }
    }
  }
  if (p.own_competes) products.of_prefixes(own);
  if constexpr (Several) {
    if (!keeps) return;
    if (p.own_competes) list.take(own[from + lane], complete[0]);
    for (int i = list.count; i < p.choices; ++i) list.choice[i] = -1;
    out.weight[at] = list.spoiled ? NAN : 1.0F;
  } else {
    for (int r = 0; r < 2; ++r) {
      best[r].join_lanes(4);
      int const i = from + fragment<8>::row(2 * r);
      if (rows.row(i) < 0 || lane % 4 != 0) continue;
      // Where all scores are -inf the first one is the greatest.
      if (best[r].index < 0 && complete[r] > 0) best[r].index = 0;
      if (p.own_competes) {
        best[r].take(own[i], complete[r]);
        if (best[r].index < 0) best[r].index = 0;
      }
      index_t const to = p.at(rows.s.begin + rows.row(i), rows.head);
      out.choice[to * p.choices] = best[r].index;
      out.weight[to] = best[r].value != best[r].value ? NAN : 1.0F;
    }
  }
}

/// Scores by mean keys to the table: grid (query tiles x heads, tiles of chunks).
template <class T>
__global__ void __launch_bounds__(threads)
    score_by_means(problem<T> p, chunk_means<T> means, row_tiles cut, mean_tiles width, chunk_table to) {
  index_t const tiles = to.rows / tile, t = blockIdx.x % tiles;
  row_block const rows(p, cut, to.first_tile + t, int(blockIdx.x / tiles));
  if (rows.empty()) return;
  mean_products<T> const products(p, means, rows, width);
  int const chunk = int(blockIdx.y) * tile;
  if (chunk < rows.last_position() / p.chunk) {
    fragment<8> x;
    products.of_chunks(x, chunk, true);
    x.each([&](float& y, int row, int column) {
      int const i = products.warp_row() + row;
      if (rows.row(i) >= 0 && chunk + column < (rows.s.past + rows.row(i)) / p.chunk)
        to.of(rows.head, t * tile + i)[chunk + column] = y;
    });
  }
  if (!p.own_competes || blockIdx.y != 0) return;
  products.of_prefixes(products.score);
  int const i = int(threadIdx.x);
  if (i < tile && rows.row(i) >= 0)
    to.of(rows.head, t * tile + i)[(rows.s.past + rows.row(i)) / p.chunk] = products.score[i];
}

/// What a pass over keys is to find out about each chunk.
enum class chunk_reading {
  mass,      ///< log sum exp of its scores
  greatest,  ///< the greatest score and the first key that has it
  always,    ///< of the keys that are always seen: their mass, and the average of g.v by their weights
  values     ///< g.O_c: what the row would read with this chunk
};

/// Rows' results of chunk_reading::always, and where the others go.
struct chunk_readings {
  chunk_table score;     ///< masses or maxima; without data: not wanted
  chunk_table reading;   ///< g.O_c
  int* where = nullptr;  ///< [H, rows, chunks] of the table, the keys of the maxima
  float *always_lse = nullptr, *always_average = nullptr;  ///< [R,H]
};

template <class T, int Width, bool Values>
struct reading_memory {
  static constexpr int row = padded_row<T>(Width);
  alignas(16) T query[tile * row];
  T key[tile * row];
  T upstream[Values ? tile * row : 8];
  T value[Values ? tile * row : 8];
  split_sum gate[tile];
};

/// A lane's two rows in a pass over keys, and what their chunk at hand comes to in the lane's own columns.
struct lane_statistics {
  int row[2], position[2];  ///< row -1: none
  split_sum gate[2];
  int above[2], below[2];  ///< keys of the chunk that a row sees
  float top[2], sum[2], average[2];
  best_value best[2];

  template <class T>
  __device__ lane_statistics(problem<T> const& p, row_block const& rows, head_bias const& g, int from) {
    for (int r = 0; r < 2; ++r) {
      row[r] = rows.row(from + fragment<8>::row(2 * r));
      position[r] = rows.s.past + (row[r] < 0 ? 0 : row[r]);
      gate[r] = p.gate(g, position[r], rows.s.count());
    }
  }
  /// Begins with chunk c, whose keys are [low, high).
  template <class T>
  __device__ void enter(problem<T> const& p, chunk_reading what, int head, int c, int low, int high) {
    bool const always = what == chunk_reading::always;
    float const sink = always && p.a.sink ? p.a.sink[head * p.a.sink_step] : -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      above[r] = always ? p.always_from(position[r]) : low;
      below[r] = row[r] < 0 || (!always && c >= p.candidates(position[r])) ? 0 : position[r] + 1;
      if (what == chunk_reading::values && below[r] > 0) {
        int const end = p.chosen_end(position[r], c);
        below[r] = below[r] < end ? below[r] : end;
      }
      below[r] = below[r] < high ? below[r] : high;
      bool const counts = sink != -INFINITY && threadIdx.x % 4 == 0;
      top[r] = counts ? sink : -INFINITY;
      sum[r] = counts ? 1.0F : 0.0F;
      average[r] = 0.0F;
      best[r] = {};
    }
  }
  /// Of the tile at key j, its products with queries, and g.v where values are read.
  template <bool Values, class T>
  __device__ void absorb(problem<T> const& p, chunk_reading what, int j, split_sum const* key_gate, fragment<8>& x,
                         fragment<8> const& gv) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float here = top[r];
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          int const column = fragment<8>::column(n, e), key = j + column;
          bool const seen = key >= above[r] && key < below[r];
          float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, gate[r], key_gate[column]);
          x.x[n][e] = seen ? y : -INFINITY;
          here = fmaxf(here, x.x[n][e]);
          if (!Values && what == chunk_reading::greatest && seen) best[r].take(y, key);
        }
      if (!Values && what == chunk_reading::greatest) continue;
      float const level = here == -INFINITY ? 0.0F : here, factor = weight_of(top[r] - level);
      top[r] = here;
      sum[r] *= factor;
      average[r] *= factor;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          float const w = weight_of(x.x[n][e] - level);
          sum[r] += w;
          if constexpr (Values) average[r] += x.x[n][e] == -INFINITY ? 0.0F : w * gv.x[n][e];
        }
    }
  }
  /// Joins the lanes of a row and writes what chunk c came to; `slot` is the table's row of the warp's first one.
  template <class T>
  __device__ void leave(problem<T> const& p, row_block const& rows, chunk_readings const& out, chunk_reading what,
                        int c, index_t slot) {
    bool const always = what == chunk_reading::always;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      index_t const to = out.score.at(rows.head, slot + fragment<8>::row(2 * r), c);
      bool const reports = row[r] >= 0 && threadIdx.x % 4 == 0 && (always || c < p.candidates(position[r]));
      if (what == chunk_reading::greatest) {
        best[r].join_lanes(4);
        if (reports) out.score.data[to] = best[r].value;
        if (reports && out.where) out.where[to] = best[r].index;
        continue;
      }
      float const all = row_max(top[r]), factor = weight_of(top[r] - (all == -INFINITY ? 0.0F : all));
      float const total = row_sum(sum[r] * factor), mean = row_sum(average[r] * factor) / total;
      float const lse = total == 0.0F ? -INFINITY : all + logf(total);
      if (!reports) continue;
      index_t const at = p.at(rows.s.begin + row[r], rows.head);
      if (always) {
        out.always_lse[at] = lse;
        out.always_average[at] = total == 0.0F ? 0.0F : mean;
        continue;
      }
      if (out.score.data) out.score.data[to] = lse;
      if (what != chunk_reading::values) continue;
      float const before = out.always_average[at], before_lse = out.always_lse[at];
      float const share = before_lse == -INFINITY ? 1.0F : 1.0F / (1.0F + expf(before_lse - lse));
      out.reading.data[to] = total == 0.0F ? before : before + share * (mean - before);
    }
  }
};

/// A pass over keys for the rows of a query tile: grid (query tiles x heads, groups of chunks). Each lane sums over
/// its own columns of a chunk, and the four lanes of a row join where the chunk ends: its place does not matter.
template <class T, int Width, bool Values>
__global__ void __launch_bounds__(threads, resident_blocks<T, Width>)
    read_chunks(problem<T> p, heads<T const> upstream, row_tiles cut, chunk_readings out, chunk_reading what,
                int chunks_per_block) {
  using memory = reading_memory<T, Width, Values>;
  auto& m = shared_memory<memory>();
  index_t const tiles = out.score.rows / tile, t = blockIdx.x % tiles;
  row_block const rows(p, cut, out.score.first_tile + t, int(blockIdx.x / tiles));
  if (rows.empty()) return;
  auto const& s = rows.s;
  head_loader<T, Width> const load{p, s, rows.head};
  head_bias const g = p.bias(s, rows.head);
  int const from = int(threadIdx.x / warp) * 16, last = rows.last_position();
  int const key_slices = load.slices(p.a.key_dim), value_slices = Values ? load.slices(p.a.value_dim) : 0;
  int const slices = key_slices > value_slices ? key_slices : value_slices;
  bool const active = rows.row(from) >= 0, always = what == chunk_reading::always;
  lane_statistics lane(p, rows, g, from);

  int const first = always ? 0 : int(blockIdx.y) * chunks_per_block, most = always ? 1 : p.candidates(last);
  int const end = first + chunks_per_block < most ? first + chunks_per_block : most;
  bool anew = true;
  for (int c = first; c < end; ++c) {
    int const low = always ? p.always_from(s.past + rows.first) : c * p.chunk;
    int const high = always || (c + 1) * p.chunk > last ? last + 1 : (c + 1) * p.chunk;
    lane.enter(p, what, rows.head, c, low, high);
    for (int j = low; j < high; j += tile) {
      fragment<8> x, gv;
      x.fill(0.0F);
      if constexpr (Values) gv.fill(0.0F);
      for (int slice = 0; slice < slices; ++slice) {
        __syncthreads();
        auto const row_of = [&](int i) { return rows.row(i); };
        if (anew || slices > 1) {
          load.queries(m.query, tile, slice, row_of);
          if constexpr (Values) load.rows(m.upstream, upstream, tile, slice, p.a.value_dim, row_of);
        }
        load.keys(m.key, j, high, slice);
        if constexpr (Values) load.values(m.value, j, high, slice);
        if (slice == 0 && threadIdx.x < tile) m.gate[threadIdx.x] = p.gate(g, j + int(threadIdx.x), high);
        finish_loads();
        __syncthreads();
        if (!active) continue;
        multiply_add<layout::row_major, layout::column_major>(x, m.query + from * memory::row, memory::row, m.key,
                                                              memory::row, Width);
        if constexpr (Values)
          multiply_add<layout::row_major, layout::column_major>(gv, m.upstream + from * memory::row, memory::row,
                                                                m.value, memory::row, Width);
      }
      anew = false;
      if (active) lane.template absorb<Values>(p, what, j, m.gate, x, gv);
    }
    if (active) lane.leave(p, rows, out, what, c, t * tile + from);
  }
}

/// A warp's row of a table.
struct table_row {
  row_block rows;
  index_t slot;
  int row;  ///< -1: none

  /// Units of `group` heads.
  template <class T>
  __device__ table_row(problem<T> const& p, row_tiles const& cut, chunk_table const& table, int group)
      : table_row(p, cut, table, group, index_t(blockIdx.x) * (threads / warp) + threadIdx.x / warp) {}

 private:
  template <class T>
  __device__ table_row(problem<T> const& p, row_tiles const& cut, chunk_table const& table, int group, index_t unit)
      : rows(p, cut, table.first_tile + unit % table.rows / tile, int(unit / table.rows) * group),
        slot(unit % table.rows), row(rows.head < p.a.heads_count ? rows.row(int(slot % tile)) : -1) {}
};

/// The choices of the rows of a table, a warp per row and head, or with `together` per row and key head by the sums
/// over its query heads of their probabilities; `sums` holds those. With `gated` what multiplies an output is the
/// probability of its choices.
template <class T>
__global__ void __launch_bounds__(threads)
    choose_by_table(problem<T> p, row_tiles cut, chunk_table score, chunk_table sums, bool together, bool gated,
                    routing out) {
  int const group = together ? p.a.key_group : 1, lane = int(threadIdx.x % warp);
  table_row const at(p, cut, score, group);
  if (at.row < 0) return;
  auto const& s = at.rows.s;
  int const first_head = at.rows.head, count = p.candidates(s.past + at.row);
  float const* values = score.of(first_head, at.slot);
  if (together) {
    float* const to = sums.of(first_head, at.slot);
    for (int h = first_head; h < first_head + group; ++h) {
      row_probabilities const of(score.of(h, at.slot), count);
      for (int c = lane; c < count; c += warp) to[c] = (h == first_head ? 0.0F : to[c]) + of.at(c);
    }
    values = to;
  }
  // Each pick is the greatest behind the one before it, in the order of values, then of indices.
  int picked = 0;
  bool spoiled = false;
  best_value before{INFINITY, -1};
  for (int i = 0; i < p.choices; ++i) {
    best_value next;
    if (picked == i && !spoiled)
      for (int c = lane; c < count; c += warp) {
        float const v = values[c];
        if (v != v || v < before.value || (v == before.value && c > before.index)) next.take_any(v, c);
      }
    next.join_lanes(warp);
    if (next.index >= 0) {
      ++picked;
      spoiled = next.value != next.value;
    }
    before = next;
    if (lane == 0)
      for (int h = first_head; h < first_head + group; ++h)
        out.choice[p.at(s.begin + at.row, h) * p.choices + i] = next.index;
  }
  __syncwarp();
  for (int h = first_head; h < first_head + group; ++h) {
    index_t const row = p.at(s.begin + at.row, h);
    float weight = 1.0F;
    if (gated && picked > 0) {
      row_probabilities const of(score.of(h, at.slot), count);
      weight = 0.0F;
      for (int i = 0; i < picked; ++i) weight += of.at(out.choice[row * p.choices + i]);
    }
    if (lane == 0) out.weight[row] = spoiled ? NAN : weight;
  }
}

/// How many query tiles one table holds: about as many numbers as rows have in queries and values, at least 2^18.
template <class T>
index_t tiles_of_table(problem<T> const& p, row_tiles const& cut) {
  index_t const per_tile = index_t(p.a.heads_count) * tile * (std::max)(p.most_chunks, 1);
  index_t const numbers = p.a.heads_count * p.rows * (p.a.key_dim + p.a.value_dim) / 2;
  index_t const room = (std::max)(numbers, index_t(1) << 18) / per_tile;
  return (std::max<index_t>)((std::min)(room, cut.count), 1);
}
template <class T>
chunk_table take_table(problem<T> const& p, index_t tiles, arena& ws) {
  chunk_table table;
  table.rows = tiles * tile;
  table.columns = p.most_chunks;
  table.data = ws.take<float>(p.a.heads_count * table.rows * table.columns);
  return table;
}

template <class T>
void score_table_by_means(device::cuda const& dev, problem<T> const& p, chunk_means<T> const& means,
                          row_tiles const& cut, chunk_table const& table) {
  auto const width = mean_tiles::of<T>(p.a.key_dim);
  launch(dev, "routed attention: scores of mean keys", &score_by_means<T>,
         blocks(table.tiles() * p.a.heads_count, (std::max<index_t>)(divided_up(table.columns, tile), 1)), threads,
         width.bytes(1), p, means, cut, width, table);
}

template <bool Values, class T>
void launch_reading(device::cuda const& dev, problem<T> const& p, view3<T const> d_o_rhv, row_tiles const& cut,
                    chunk_readings const& out, chunk_reading what) {
  int const per_block = (std::max)(1, 512 / p.chunk);
  index_t const groups = what == chunk_reading::always ? 1 : divided_up(p.most_chunks, per_block);
  int const channels = Values ? (std::max)(p.a.key_dim, p.a.value_dim) : p.a.key_dim;
  with_slice<T>(channels, [&]<int Width>(std::integral_constant<int, Width>) {
    launch(dev, "routed attention: a pass over keys", &read_chunks<T, Width, Values>,
           blocks(out.score.tiles() * p.a.heads_count, groups), threads, sizeof(reading_memory<T, Width, Values>),
           p, heads<T const>(d_o_rhv), cut, out, what, per_block);
  });
}

/// Chooses the chunks of every row.
template <class Which, class T>
void choose_chunks(device::cuda const& dev, attention_shape const& s, problem<T> const& p, row_tiles const& cut,
                   routing const& out, arena& ws) {
  constexpr which_spec spec = Which::spec;
  constexpr bool by_mean = scores_by_mean(spec.score), gated = spec.gradient == chunk_gradient::gated;
  arena_scope const scope(ws);
  chunk_means<T> means;
  if constexpr (by_mean) means = average_chunks(dev, p, s.select.router_bias && p.a.bias.given, ws);
  bool const together = s.select.shared_choice;
  if constexpr (by_mean && !gated)
    if (!together) {
      auto const width = mean_tiles::of<T>(p.a.key_dim);
      float* const kept = spec.several ? ws.take<float>(p.rows * p.a.heads_count * p.slots) : nullptr;
      launch(dev, "routed attention: choice by mean keys", &choose_by_means<T, spec.several>,
             blocks(cut.count * p.a.heads_count), threads, width.bytes(spec.several ? tile + 1 : 1), p, means, cut,
             width, out, kept);
      return;
    }
  index_t const tiles = tiles_of_table(p, cut);
  chunk_table score = take_table(p, tiles, ws), sums;
  if (together) sums = take_table(p, tiles, ws);
  index_t const units = together ? p.key_heads : p.a.heads_count;
  chunk_readings readings;
  for (; score.first_tile < cut.count; score.first_tile += tiles) {
    readings.score = score;
    if constexpr (by_mean)
      score_table_by_means(dev, p, means, cut, score);
    else
      launch_reading<false>(dev, p, view3<T const>{}, cut, readings,
                            spec.score == chunk_score::exact_mass ? chunk_reading::mass : chunk_reading::greatest);
    launch(dev, "routed attention: choice by scores", &choose_by_table<T>,
           blocks(divided_up(score.rows * units, threads / warp)), threads, 0, p, cut, score, sums, together, gated,
           out);
  }
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
