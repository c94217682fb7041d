#pragma once

#include <seqmix/kernels/cpu/chunk_router.hpp>
#include <seqmix/kernels/cuda/routed_attention_backward.cuh>

/// The way back from a choice of chunks to queries, keys and gate, for the selectors whose router learns. Scores
/// and their derivatives stand in tables that hold some rows at a time.
namespace seqmix::inline v0::kernels::cuda::routed {

/// What the derivatives of one table's scores are made of and where they go.
struct router_pull {
  chunk_table score;              ///< of means, masses or maxima
  chunk_table slope;              ///< g.O_c, then the derivative by the score
  int* where = nullptr;           ///< [H, rows, chunks] keys of the maxima
  float* own_slope = nullptr;     ///< [R,H] of the own chunk by its mean so far
  float* d_mean = nullptr;        ///< [chunk places, Hk, K]
  double* d_mean_gate = nullptr;  ///< [H, chunk places], with router_bias
  router_gradient to;
  bias_sums sums;
};

/// score and what the rows would read become derivatives by the scores, a warp per row and head.
template <class T>
__global__ void __launch_bounds__(threads)
    pull_choices(problem<T> p, row_tiles cut, router_pull r, chunk_gradient gradient, bool several,
                 routed_upstream<T> up, index_t const* choice) {
  table_row const row(p, cut, r.score, 1);
  if (row.row < 0) return;
  int const head = row.rows.head, lane = int(threadIdx.x % warp);
  auto const& s = row.rows.s;
  int const count = p.candidates(s.past + row.row);
  index_t const at = p.at(s.begin + row.row, head);
  float* const slope = r.slope.of(head, row.slot);
  row_probabilities const of(r.score.of(head, row.slot), count);
  bool const straight = gradient == chunk_gradient::chunk_straight_through, open = !several || count > p.choices;
  float const output = up.output[at];
  index_t const* const chosen = choice + at * p.choices;
  float average = 0.0F, share = 0.0F;
  if (straight) {
    for (int c = lane; c < count; c += warp) average += of.at(c) * slope[c];
    average = warp_sum(average);
  } else {
    for (int i = 0; i < p.slots && chosen[i] >= 0; ++i) share += of.at(chosen[i]);
  }
  float total = 0.0F;
  for (int c = lane; c < count; c += warp) {
    float const probability = of.at(c);
    float d = 0.0F;
    if (straight) {
      if (open) d = probability * (slope[c] - average);
    } else {
      // g.o has the factor `share` already: of one choice, its derivative by the score is g.o (1 - P).
      float mine = 0.0F;
      for (int i = 0; i < p.slots; ++i)
        if (chosen[i] == c) mine = !several ? 1.0F : share > 0.0F ? probability / share : 0.0F;
      d = output * (mine - probability);
    }
    bool const is_own = r.own_slope != nullptr && c == count - 1;
    slope[c] = is_own ? 0.0F : d;
    if (is_own) r.own_slope[at] = d;
    total += d;
  }
  total = warp_sum(total);
  if (r.d_mean_gate && lane == 0) r.sums.query(head, s.begin + row.row) += double(total);
}

template <class T>
struct mean_pull_memory {
  static constexpr int row = padded_row<T>(tile);
  alignas(16) T slope[tile * row];
  T other[tile * row];
};
/// The derivatives of up to 64 rows by 64 chunks to shared memory, as T, zero where there is no complete candidate.
template <class T>
__device__ void load_slopes(problem<T> const& p, row_block const& rows, chunk_table const& slope, index_t slot,
                            int chunk, T* to) {
  for (int i = int(threadIdx.x); i < tile * tile; i += threads) {
    int const r = i / tile, c = i % tile, row = rows.row(r);
    bool const candidate = row >= 0 && chunk + c < (rows.s.past + row) / p.chunk;
    to[r * padded_row<T>(tile) + c] = from_float<T>(candidate ? slope.of(rows.head, slot + r)[chunk + c] : 0.0F);
  }
}

/// Of mean keys to queries: grid (query tiles x heads, slices of 64 channels).
template <class T>
__global__ void __launch_bounds__(threads)
    pull_means_to_queries(problem<T> p, chunk_means<T> means, row_tiles cut, router_pull r) {
  using memory = mean_pull_memory<T>;
  auto& m = shared_memory<memory>();
  index_t const tiles = r.slope.rows / tile, t = blockIdx.x % tiles;
  row_block const rows(p, cut, r.slope.first_tile + t, int(blockIdx.x / tiles));
  if (rows.empty()) return;
  int const from = int(threadIdx.x / warp) * 16, channel = int(blockIdx.y) * tile;
  int const complete = rows.last_position() / p.chunk, key_head = p.key_head(rows.head);
  index_t const place = p.first_chunk(rows.s.n);
  fragment<8> acc;
  acc.fill(0.0F);
  for (int chunk = 0; chunk < complete; chunk += tile) {
    __syncthreads();
    load_slopes(p, rows, r.slope, t * tile, chunk, m.slope);
    begin_rows(m.other, memory::row, tile, tile, channel, p.a.key_dim, [&](int i) -> T const* {
      return chunk + i < complete ? means.of_chunk(0, place + chunk + i, key_head) : nullptr;
    });
    finish_loads();
    __syncthreads();
    multiply_add<layout::row_major, layout::row_major>(acc, m.slope + from * memory::row, memory::row, m.other,
                                                       memory::row, tile);
  }
  acc.each([&](float& x, int i, int column) {
    int const row = rows.row(from + i), c = channel + column;
    if (row < 0 || c >= p.a.key_dim) return;
    index_t const at = p.at(rows.s.begin + row, rows.head);
    if (r.own_slope) {
      float mean = 0.0F;
      for (int part = 0; part < mean_parts<T>; ++part)
        mean += to_float(means.of_prefix(part, rows.s.begin + row, key_head)[c]);
      x += r.own_slope[at] * mean;
    }
    r.to.query[at * p.a.key_dim + c] = x;
  });
}

/// Tiles of 64 chunks: those of sequence n begin at first_chunk_tile(n).
template <class T>
__host__ __device__ index_t count_chunk_tiles(problem<T> const& p) {
  return p.chunk_places() / tile + p.sequences;
}
template <class T>
__device__ index_t first_chunk_tile(problem<T> const& p, index_t n) {
  return p.first_chunk(n) / tile + n;
}
/// The query tiles [first, end) of a sequence that a table holds, from the one with row `from` on.
struct held_tiles {
  index_t slot;  ///< among all tiles, of the sequence's first one
  int first, end;

  __device__ held_tiles(row_tiles const& cut, chunk_table const& table, sequence_tokens const& s, int from)
      : slot(cut.rows.offsets ? s.begin / tile + s.n : s.n * cut.per_sequence) {
    index_t const low = table.first_tile - slot, high = low + table.rows / tile;
    int const all = (s.rows + tile - 1) / tile;
    first = from > 0 ? from / tile : 0;
    if (first < low) first = low < all ? int(low) : all;
    end = high < all ? int(high) : all;
  }
};

/// Of queries to mean keys: grid (tiles of chunks x key heads, slices of 64 channels). Added to what earlier tables
/// gave.
template <class T>
__global__ void __launch_bounds__(threads, 4) pull_means_to_chunks(problem<T> p, row_tiles cut, router_pull r) {
  using memory = mean_pull_memory<T>;
  auto& m = shared_memory<memory>();
  index_t const all = count_chunk_tiles(p), block = blockIdx.x % all;
  auto const s = p.tokens(holder(p.sequences, block, [&](index_t i) { return first_chunk_tile(p, i); }));
  int const chunks = p.chunks(s);
  index_t const chunk_at = (block - first_chunk_tile(p, s.n)) * tile;
  if (chunk_at >= chunks) return;
  int const chunk = int(chunk_at), key_head = int(blockIdx.x / all), channel = int(blockIdx.y) * tile;
  int const from = int(threadIdx.x / warp) * 16, mine = chunk + int(threadIdx.x);
  index_t const place = p.first_chunk(s.n);
  held_tiles const held(cut, r.slope, s, (chunk + 1) * p.chunk - s.past);
  bool const sums_gate = r.d_mean_gate && blockIdx.y == 0 && threadIdx.x < tile && mine < chunks;
  fragment<8> acc;
  acc.fill(0.0F);
  for (int head = key_head * p.a.key_group; head < (key_head + 1) * p.a.key_group; ++head) {
    double gate = 0.0;
    for (int t = held.first; t < held.end; ++t) {
      row_block const rows(p, cut, held.slot + t, head);
      index_t const slot = (held.slot + t - r.slope.first_tile) * tile;
      __syncthreads();
      load_slopes(p, rows, r.slope, slot, chunk, m.slope);
      begin_rows(m.other, memory::row, tile, tile, channel, p.a.key_dim,
                 [&](int i) -> T const* { return rows.row(i) < 0 ? nullptr : p.query(s, rows.row(i), head); });
      finish_loads();
      __syncthreads();
      multiply_add<layout::column_major, layout::row_major>(acc, m.slope + from, memory::row, m.other, memory::row,
                                                            tile);
      if (sums_gate)
#pragma unroll 1
        for (int i = 0; rows.row(i) >= 0; ++i)
          if (mine < (s.past + rows.row(i)) / p.chunk) gate += double(r.slope.of(head, slot + i)[mine]);
    }
    if (sums_gate) r.d_mean_gate[head * p.chunk_places() + place + mine] += gate;
  }
  acc.each([&](float& x, int i, int column) {
    if (chunk + from + i < chunks && channel + column < p.a.key_dim)
      r.d_mean[((place + chunk + from + i) * p.key_heads + key_head) * p.a.key_dim + channel + column] += x;
  });
}

/// From means to their keys, a thread per chunk, key head and channel; of prefixes each key gets its share of those
/// that hold it, the latest first.
template <class T>
__global__ void __launch_bounds__(threads) pull_keys_of_means(problem<T> p, router_pull r, index_t count) {
  index_t const i = index_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  int const x = int(i % p.a.key_dim), key_head = int(i / p.a.key_dim % p.key_heads);
  placed_chunk const c(p, i / p.a.key_dim / p.key_heads);
  auto const& s = c.s;
  float const share = c.begin < c.end ? r.d_mean[i] / float(c.end - c.begin) : 0.0F;
  float after = 0.0F;
#pragma unroll 1
  for (int j = c.end; j-- > c.begin;) {
    if (r.own_slope && j >= s.past) {
      float here = 0.0F;
      for (int head = key_head * p.a.key_group; head < (key_head + 1) * p.a.key_group; ++head)
        here += r.own_slope[p.at(s.begin + j - s.past, head)] * to_float(p.query(s, j - s.past, head)[x]);
      after += here / float(j + 1 - c.begin);
    }
    r.to.of_key(p, s, j, key_head)[x] = share + after;
  }
}
/// The same for the biases of a chunk's keys, a thread per query head and chunk.
template <class T>
__global__ void __launch_bounds__(threads) pull_biases_of_means(problem<T> p, router_pull r, index_t count) {
  index_t const i = index_t(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  int const head = int(i / p.chunk_places());
  placed_chunk const c(p, i % p.chunk_places());
  auto const& s = c.s;
  double const share = c.begin < c.end ? r.d_mean_gate[i] / double(c.end - c.begin) : 0.0;
  double after = 0.0;
#pragma unroll 1
  for (int j = c.end; j-- > c.begin;) {
    if (r.own_slope && j >= s.past)
      after += double(r.own_slope[p.at(s.begin + j - s.past, head)]) / double(j + 1 - c.begin);
    r.sums.key(head, s.first, j) += share + after;
  }
}

template <class T, int Width>
struct score_pull_memory {
  static constexpr int row = padded_row<T>(Width);
  alignas(16) T query[tile * row];
  T key[tile * row];
  T weight[tile * weight_row<T> + 8];
  split_sum gate[tile];
  float score[tile], slope[tile];  ///< of the queries of a tile at one chunk
  int where[tile];
};

/// The derivative of a chunk's score by that of one of its keys, times that of the loss: of a mass the key's share,
/// of a maximum all of it for the first key that has it.
__device__ inline float pull_of_key(bool by_mass, bool seen, float slope, float score, float key_score,
                                    bool first) {
  if (!seen || score == -INFINITY) return 0.0F;
  if (by_mass) return slope * weight_of(key_score - score);
  return first ? slope : 0.0F;
}

/// Exact scores to queries: grid (query tiles x heads, slices of channels).
template <class T, int Width>
__global__ void __launch_bounds__(threads, resident_blocks<T, Width>)
    pull_scores_to_queries(problem<T> p, row_tiles cut, router_pull r) {
  using memory = score_pull_memory<T, Width>;
  auto& m = shared_memory<memory>();
  index_t const tiles = r.slope.rows / tile, t = blockIdx.x % tiles;
  row_block const rows(p, cut, r.slope.first_tile + t, int(blockIdx.x / tiles));
  if (rows.empty()) return;
  auto const& s = rows.s;
  head_loader<T, Width> const load{p, s, rows.head};
  head_bias const g = p.bias(s, rows.head);
  int const from = int(threadIdx.x / warp) * 16, lane = int(threadIdx.x % warp);
  int const out = int(blockIdx.y) * Width, slices = load.slices(p.a.key_dim), last = rows.last_position();
  bool const active = rows.row(from) >= 0;
  int position[2];
  split_sum gate[2];
  for (int i = 0; i < 2; ++i) {
    int const row = rows.row(from + fragment<8>::row(2 * i));
    position[i] = row < 0 ? -1 : s.past + row;
    gate[i] = p.gate(g, row < 0 ? s.count() : position[i], s.count());
  }
  bool anew = true;
  float total[2] = {0.0F, 0.0F};
  fragment<Width / 8> acc;
  acc.fill(0.0F);
  for (int c = 0, candidates = p.candidates(last); c < candidates; ++c) {
    float score[2] = {-INFINITY, -INFINITY}, slope[2] = {0.0F, 0.0F};
    int where[2] = {-1, -1};
    for (int i = 0; i < 2; ++i) {
      if (position[i] < 0 || c >= p.candidates(position[i])) continue;
      index_t const slot = t * tile + from + fragment<8>::row(2 * i);
      score[i] = r.score.of(rows.head, slot)[c];
      slope[i] = r.slope.of(rows.head, slot)[c];
      if (r.where) where[i] = r.where[r.score.at(rows.head, slot, c)];
    }
    int const high = (c + 1) * p.chunk < last + 1 ? (c + 1) * p.chunk : last + 1;
    for (int j = c * p.chunk; j < high; j += tile) {
      fragment<8> x;
      x.fill(0.0F);
      for (int slice = 0; slice < slices; ++slice) {
        __syncthreads();
        if (anew || slices > 1) load.queries(m.query, tile, slice, [&](int i) { return rows.row(i); });
        load.keys(m.key, j, high, slice);
        if (slice == 0 && threadIdx.x < tile) m.gate[threadIdx.x] = p.gate(g, j + int(threadIdx.x), high);
        finish_loads();
        __syncthreads();
        if (active)
          multiply_add<layout::row_major, layout::column_major>(x, m.query + from * memory::row, memory::row, m.key,
                                                                memory::row, Width);
      }
      anew = false;
      if (slices > 1) {
        __syncthreads();
        load.keys(m.key, j, high, int(blockIdx.y));
        finish_loads();
        __syncthreads();
      }
      if (!active) continue;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const column = fragment<8>::column(n, e), key = j + column, i = e / 2;
          float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, gate[i], m.gate[column]);
          bool const seen = key < high && key <= position[i];
          x.x[n][e] = pull_of_key(r.where == nullptr, seen, slope[i], score[i], y, key == where[i]);
          total[i] += x.x[n][e];
        }
      multiply_add<T>(acc, x, m.key, memory::row, m.weight + from * weight_row<T>);
    }
  }
  for (int i = 0; i < 2; ++i) {
    float const sum = row_sum(total[i]);
    if (r.sums.wanted && position[i] >= 0 && lane % 4 == 0 && blockIdx.y == 0)
      r.sums.query(rows.head, s.begin + position[i] - s.past) += double(sum);
  }
  acc.each([&](float& x, int i, int column) {
    int const row = rows.row(from + i);
    if (row >= 0 && out + column < p.a.key_dim)
      r.to.query[p.at(s.begin + row, rows.head) * p.a.key_dim + out + column] = x;
  });
}

/// Exact scores to keys: grid (blocks of keys of one key head, slices of channels). Added to what earlier tables
/// gave.
template <class T, int Width>
__global__ void __launch_bounds__(threads, resident_blocks<T, Width>)
    pull_scores_to_keys(problem<T> p, key_cut keys, row_tiles cut, router_pull r) {
  using memory = score_pull_memory<T, Width>;
  auto& m = shared_memory<memory>();
  auto const block = keys.at(p, blockIdx.x);
  if (block.begin >= block.end) return;
  auto const& s = block.s;
  int const from = int(threadIdx.x / warp) * 16, out = int(blockIdx.y) * Width;
  int const slices = head_loader<T, Width>::slices(p.a.key_dim);
  bool const active = block.begin + from < block.end;
  held_tiles const held(cut, r.slope, s, (p.own_competes ? block.begin : (block.chunk + 1) * p.chunk) - s.past);
  fragment<Width / 8> acc;
  acc.fill(0.0F);
  bool anew = true;
  for (int head = block.unit * p.a.key_group; head < (block.unit + 1) * p.a.key_group; ++head) {
    head_loader<T, Width> const load{p, s, head};
    head_bias const g = p.bias(s, head);
    split_sum gate[2];
    for (int i = 0; i < 2; ++i) gate[i] = p.gate(g, block.begin + from + fragment<8>::row(2 * i), block.end);
    for (int t = held.first; t < held.end; ++t) {
      index_t const slot = (held.slot + t - r.slope.first_tile) * tile;
      auto const row_of = [&](int i) { return t * tile + i < s.rows ? t * tile + i : -1; };
      __syncthreads();
      if (threadIdx.x < tile) {
        int const i = int(threadIdx.x), row = row_of(i);
        bool const candidate = row >= 0 && block.chunk < p.candidates(s.past + row);
        m.score[i] = candidate ? r.score.of(head, slot + i)[block.chunk] : -INFINITY;
        m.slope[i] = candidate ? r.slope.of(head, slot + i)[block.chunk] : 0.0F;
        m.where[i] = candidate && r.where ? r.where[r.score.at(head, slot + i, block.chunk)] : -1;
        m.gate[i] = p.gate(g, row < 0 ? s.count() : s.past + row, s.count());
      }
      fragment<8> x;
      x.fill(0.0F);
      for (int slice = 0; slice < slices; ++slice) {
        if (slice > 0) __syncthreads();
        if (anew || slices > 1) load.keys(m.key, block.begin, block.end, slice);
        load.queries(m.query, tile, slice, row_of);
        finish_loads();
        __syncthreads();
        if (active)
          multiply_add<layout::row_major, layout::column_major>(x, m.key + from * memory::row, memory::row, m.query,
                                                                memory::row, Width);
      }
      anew = false;
      if (slices > 1) {
        __syncthreads();
        load.queries(m.query, tile, int(blockIdx.y), row_of);
        finish_loads();
        __syncthreads();
      }
      if (!active) continue;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const i = fragment<8>::column(n, e), key = block.begin + from + fragment<8>::row(e);
          float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, m.gate[i], gate[e / 2]);
          bool const seen = key <= s.past + t * tile + i;
          x.x[n][e] = pull_of_key(r.where == nullptr, seen, m.slope[i], m.score[i], y, key == m.where[i]);
        }
      if (r.sums.wanted && blockIdx.y == 0) add_key_sums(r.sums, x, head, s.first, block.begin + from, block.end);
      multiply_add<T>(acc, x, m.query, memory::row, m.weight + from * weight_row<T>);
    }
  }
  acc.each([&](float& x, int i, int column) {
    int const j = block.begin + from + i;
    if (j < block.end && out + column < p.a.key_dim) r.to.of_key(p, s, j, block.unit)[out + column] += x;
  });
}

/// Launches the derivatives of the router's scores. What biases get is added to `sums`.
template <class Which, class T>
router_gradient pull_router(device::cuda const& dev, attention_shape const& s, problem<T> const& p,
                            row_tiles const& cut, routed_upstream<T> const& up, view3<T const> d_o_rhv,
                            index_t const* choice, bias_sums const& sums, arena& ws) {
  constexpr which_spec spec = Which::spec;
  constexpr chunk_score by = kernels::detail::surrogate_score(spec);
  constexpr bool by_mean = scores_by_mean(by);
  constexpr bool straight = spec.gradient == chunk_gradient::chunk_straight_through;
  // Without a window no key that is always seen lies in a candidate: what a chunk adds is its whole mass.
  constexpr bool reading_finds_mass = straight && by == chunk_score::exact_mass && !spec.windowed;
  bool const biased = by_mean && s.select.router_bias && p.a.bias.given;
  index_t const H = p.a.heads_count, width = index_t(p.key_heads) * p.a.key_dim;
  router_pull r;
  r.sums = sums;
  r.to.query = ws.take<float>(p.rows * H * p.a.key_dim);
  r.to.key = ws.take<float>(p.a.places.count * width);
  arena_scope const scope(ws);
  chunk_means<T> means;
  if constexpr (by_mean) {
    means = average_chunks(dev, p, biased, ws);
    r.d_mean = ws.take<float>(means.places * width);
    clear(dev, r.d_mean, means.places * width);
    if (p.own_competes) r.own_slope = ws.take<float>(p.rows * H);
    if (biased) {
      r.d_mean_gate = ws.take<double>(means.places * H);
      clear(dev, r.d_mean_gate, means.places * H);
    }
  } else {
    clear(dev, r.to.key, p.a.places.count * width);
  }
  chunk_readings readings;
  if constexpr (straight) {
    readings.always_lse = ws.take<float>(p.rows * H);
    readings.always_average = ws.take<float>(p.rows * H);
  }
  index_t const tiles = tiles_of_table(p, cut);
  r.score = take_table(p, tiles, ws);
  r.slope = take_table(p, tiles, ws);
  if (by == chunk_score::exact_max) r.where = ws.take<int>(H * r.score.rows * r.score.columns);
  for (index_t first = 0; first < cut.count; first += tiles) {
    r.score.first_tile = r.slope.first_tile = first;
    readings.score = r.score;
    readings.reading = r.slope;
    readings.where = r.where;
    if constexpr (by_mean)
      score_table_by_means(dev, p, means, cut, r.score);
    else if constexpr (!reading_finds_mass)
      launch_reading<false>(dev, p, d_o_rhv, cut, readings,
                            by == chunk_score::exact_mass ? chunk_reading::mass : chunk_reading::greatest);
    if constexpr (straight) {
      if constexpr (!reading_finds_mass) readings.score.data = nullptr;
      launch_reading<true>(dev, p, d_o_rhv, cut, readings, chunk_reading::always);
      launch_reading<true>(dev, p, d_o_rhv, cut, readings, chunk_reading::values);
    }
    launch(dev, "routed attention: derivatives of choices", &pull_choices<T>,
           blocks(divided_up(r.score.rows * H, threads / warp)), threads, 0, p, cut, r, spec.gradient, spec.several,
           up, choice);
    if constexpr (by_mean) {
      launch(dev, "routed attention: mean keys to queries", &pull_means_to_queries<T>,
             blocks(tiles * H, divided_up(p.a.key_dim, tile)), threads, sizeof(mean_pull_memory<T>), p, means, cut,
             r);
      launch(dev, "routed attention: queries to mean keys", &pull_means_to_chunks<T>,
             blocks(count_chunk_tiles(p) * p.key_heads, divided_up(p.a.key_dim, tile)), threads,
             sizeof(mean_pull_memory<T>), p, cut, r);
    } else {
      with_slice<T>(p.a.key_dim, [&]<int Width>(std::integral_constant<int, Width>) {
        key_cut const keys(p, p.key_heads);
        launch(dev, "routed attention: scores to queries", &pull_scores_to_queries<T, Width>,
               blocks(tiles * H, divided_up(p.a.key_dim, Width)), threads, sizeof(score_pull_memory<T, Width>), p,
               cut, r);
        launch(dev, "routed attention: scores to keys", &pull_scores_to_keys<T, Width>,
               blocks(keys.count(), divided_up(p.a.key_dim, Width)), threads, sizeof(score_pull_memory<T, Width>),
               p, keys, cut, r);
      });
    }
  }
  if constexpr (by_mean) {
    launch(dev, "routed attention: mean keys to keys", &pull_keys_of_means<T>,
           blocks(divided_up(means.places * width, threads)), threads, 0, p, r, means.places * width);
    if (biased)
      launch(dev, "routed attention: mean biases to keys", &pull_biases_of_means<T>,
             blocks(divided_up(means.places * H, threads)), threads, 0, p, r, means.places * H);
  }
  return r.to;
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
