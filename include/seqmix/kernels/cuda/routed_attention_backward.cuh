#pragma once

#include <cub/block/block_reduce.cuh>
#include <numeric>

#include <seqmix/kernels/cuda/routed_attention_forward.cuh>

/// The backward of routed attention on a device, for given choices: scores are computed again from q and k. Queries
/// sum over the chunks they chose in a fixed order, keys over their choosers in ascending order; no sum is shared
/// by two blocks.
namespace seqmix::inline v0::kernels::cuda::routed {

/// What comes back to the rows.
template <class T>
struct routed_upstream {
  heads<T const> d_o;
  float const* lse;               ///< [R,H]
  float const* output;            ///< [R,H] g.o
  float const* weight = nullptr;  ///< [R,H] on the output; nullptr: 1

  __device__ float weight_at(index_t at) const { return weight ? weight[at] : 1.0F; }
};

/// What the router adds to the gradients, before the scale of q.k; nullptr: nothing.
struct router_gradient {
  float* query = nullptr;  ///< [R,H,K]
  float* key = nullptr;    ///< [token places, Hk, K]

  template <class T>
  __device__ float* of_key(problem<T> const& p, sequence_tokens const& s, int token, int key_head) const {
    return key + ((s.first + token) * p.key_heads + key_head) * p.a.key_dim;
  }
};

/// Row r of a lane's two becomes scale (x + what the router gave); `from` is the fragment's first channel.
template <int Columns>
__device__ void add_router(fragment<Columns>& x, int r, float const* router, int from, int channels, float scale) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int e = 2 * r; e < 2 * r + 2; ++e) {
      int const channel = from + fragment<Columns>::column(n, e);
      if (router && channel < channels) x.x[n][e] += router[channel];
      x.x[n][e] *= scale;
    }
}

/// Where the derivatives of tokens go.
template <class T>
struct token_gradient {
  heads<T> q, k, v;
  past_heads<T> past_k, past_v;

  explicit token_gradient(attention_gradient<T> const& d)
      : q(d.q_rhk), k(d.k_rhk), v(d.v_rhv), past_k(d.past_k_nlhk), past_v(d.past_v_nlhv) {}
  __device__ static T* of(sequence_tokens const& s, int token, int head, heads<T> const& rows,
                          past_heads<T> const& past) {
    if (token >= s.past) return rows.data ? rows.at(s.begin + token - s.past, head) : nullptr;
    return past.data ? past.at(s.n, token, head) : nullptr;
  }
};

/// g.o of every row and head, by the products and in the order of g.v, so that a row that sees one key alone gets
/// exact zeros: grid of query tiles x heads.
template <class T>
__global__ void __launch_bounds__(threads) multiply_outputs(problem<T> p, row_tiles cut, mean_tiles width,
                                                            heads<T const> o, heads<T const> d_o, float* output) {
  T *const g = &shared_memory<T>(), *const values = g + tile * width.row;
  row_block const rows(p, cut, blockIdx.x % cut.count, int(blockIdx.x / cut.count));
  if (rows.empty()) return;
  int const from = int(threadIdx.x / warp) * 16;
  fragment<2> x;
  x.fill(0.0F);
  for (int channel = 0; channel < p.a.value_dim; channel += width.width) {
    __syncthreads();
    auto const load = [&](T* to, heads<T const> const& of) {
      begin_rows(to, width.row, tile, width.width, channel, p.a.value_dim, [&](int i) -> T const* {
        return rows.row(i) < 0 ? nullptr : of.at(rows.s.begin + rows.row(i), rows.head);
      });
    };
    load(g, d_o);
    load(values, o);
    finish_loads();
    __syncthreads();
    multiply_add<layout::row_major, layout::column_major>(x, g + from * width.row, width.row,
                                                          values + from * width.row, width.row, width.width);
  }
  x.each([&](float& y, int row, int column) {
    int const i = rows.row(from + row);
    if (row == column && i >= 0) output[p.at(rows.s.begin + i, rows.head)] = y;
  });
}

template <class T, int Width>
struct pull_queries_memory {
  static constexpr int row = padded_row<T>(Width);
  alignas(16) T query[tile * row];
  T upstream[tile * row];
  T key[tile * row];
  T value[tile * row];
  T weight[tile * weight_row<T> + 8];
  split_sum gate[tile];
};

/// What a lane's two rows need of the forward.
struct lane_upstream {
  float lse[2]{}, output[2]{}, weight[2]{};

  template <class T>
  __device__ lane_upstream(problem<T> const& p, query_block const& q, lane_queries const& rows,
                           routed_upstream<T> const& up) {
    for (int r = 0; r < 2; ++r) {
      if (rows.row[r] < 0) continue;
      index_t const at = p.at(q.s.begin + rows.row[r], q.head);
      lse[r] = up.lse[at];
      output[r] = up.output[at];
      weight[r] = up.weight_at(at);
    }
  }
  /// x, products of the tile at key j, becomes the derivative of its scores by way of gv = g.v; `total` their sums.
  template <class T>
  __device__ void pull(problem<T> const& p, lane_queries const& rows, int j, split_sum const* gate, fragment<8>& x,
                       fragment<8> const& gv, float (&total)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto const seen = rows.columns(r, j);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          int const column = fragment<8>::column(n, e);
          float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, rows.gate[r], gate[column]);
          float const d = weight_of(y - lse[r]) * (weight[r] * gv.x[n][e] - output[r]);
          x.x[n][e] = column >= seen.x && column < seen.y ? d : 0.0F;
          total[r] += x.x[n][e];
        }
    }
  }
};

/// The derivatives of queries: grid (blocks of a cut, slices of keys' channels). Of lists, they go to `parts`;
/// consecutive rows add up their parts and what the router gave, and write d_q.
template <class T, int Width>
__global__ void __launch_bounds__(threads, resident_blocks<T, Width>)
    pull_queries(problem<T> p, query_cut cut, routed_upstream<T> up, index_t const* choice, chosen_parts parts,
                 router_gradient router, heads<T> d_q, bias_sums sums) {
  using memory = pull_queries_memory<T, Width>;
  auto& m = shared_memory<memory>();
  auto const q = cut.at(p, blockIdx.x);
  if (q.count <= 0) return;
  head_loader<T, Width> const load{p, q.s, q.head};
  head_bias const g = p.bias(q.s, q.head);
  int const from = int(threadIdx.x / warp) * 16, key_from = int(blockIdx.y) * Width;
  int const slices = load.slices(p.a.key_dim > p.a.value_dim ? p.a.key_dim : p.a.value_dim);
  bool const active = from < q.count;
  lane_queries const rows(p, q, g, from);
  lane_upstream const of_rows(p, q, rows, up);
  float total[2] = {0.0F, 0.0F};
  fragment<Width / 8> acc;
  acc.fill(0.0F);

  auto const keys = keys_of(p, q);
  for (int j = keys.x; j < keys.y; j += tile) {
    fragment<8> x, gv;
    x.fill(0.0F);
    gv.fill(0.0F);
    for (int slice = 0; slice < slices; ++slice) {
      __syncthreads();
      if (j == keys.x || slices > 1) {
        auto const row_of = [&](int i) { return q.row(i); };
        load.queries(m.query, tile, slice, row_of);
        load.rows(m.upstream, up.d_o, tile, slice, p.a.value_dim, row_of);
      }
      load.keys(m.key, j, keys.y, slice);
      load.values(m.value, j, keys.y, slice);
      if (slice == 0 && threadIdx.x < tile) m.gate[threadIdx.x] = p.gate(g, j + int(threadIdx.x), keys.y);
      finish_loads();
      __syncthreads();
      if (!active) continue;
      multiply_add<layout::row_major, layout::column_major>(x, m.query + from * memory::row, memory::row, m.key,
                                                            memory::row, Width);
      multiply_add<layout::row_major, layout::column_major>(gv, m.upstream + from * memory::row, memory::row,
                                                            m.value, memory::row, Width);
    }
    if (slices > 1) {
      __syncthreads();
      load.keys(m.key, j, keys.y, int(blockIdx.y));
      finish_loads();
      __syncthreads();
    }
    if (!active) continue;
    of_rows.pull(p, rows, j, m.gate, x, gv, total);
    multiply_add<T>(acc, x, m.key, memory::row, m.weight + from * weight_row<T>);
  }
  if (!active) return;

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float const sum = row_sum(total[r]);
    if (rows.row[r] < 0) continue;
    index_t const at = p.at(q.s.begin + rows.row[r], q.head);
    bool const reports = threadIdx.x % 4 == 0 && blockIdx.y == 0;
    if (cut.listed) {
      if (reports) parts.run_of(at, rows.slot[r]) = {sum, 0.0F};
      parts.store(at, rows.slot[r], key_from, acc, r);
      continue;
    }
    double all = double(sum);
#pragma unroll 1
    for (int slot = 0; slot < p.slots; ++slot) {
      if (choice[at * p.choices + slot] < 0) continue;
      all += double(parts.run_of(at, slot).x);
      parts.lane_pairs<Width / 8>(at, slot, key_from, [&](float2 const& x, int n) {
        acc.x[n][2 * r] += x.x;
        acc.x[n][2 * r + 1] += x.y;
      });
    }
    if (reports && sums.wanted) sums.query(q.head, q.s.begin + rows.row[r]) += all;
    add_router(acc, r, router.query ? router.query + at * p.a.key_dim : nullptr, key_from, p.a.key_dim, p.a.scale);
  }
  if (cut.listed) return;
  write_rows(acc, m.query + from * memory::row, memory::row, key_from, p.a.key_dim, [&](int i) -> T* {
    return from + i < q.count ? d_q.at(q.s.begin + q.first + from + i, q.head) : nullptr;
  });
}

/// The keys [begin, end) of a block, at most 64 of one chunk.
struct key_block {
  sequence_tokens s;
  int unit, chunk, begin, end;
};
/// Each chunk has `per_chunk` blocks for each of `units` groups of heads.
struct key_cut {
  index_t places, per_chunk;
  int units;

  template <class T>
  key_cut(problem<T> const& p, int groups)
      : places(p.chunk_places()), per_chunk(divided_up(p.chunk, tile)), units(groups) {}
  index_t count() const { return places * per_chunk * units; }
  template <class T>
  __device__ key_block at(problem<T> const& p, index_t block) const {
    index_t const t = block % (places * per_chunk), place = t / per_chunk;
    placed_chunk const c(p, place);
    index_t const begin = c.begin + t % per_chunk * tile;
    int const end = begin + tile < c.end ? int(begin) + tile : c.end;
    return {c.s, int(block / (places * per_chunk)), int(place - p.first_chunk(c.s.n)),
            int(begin < c.end ? begin : c.end), end};
  }
};

/// Adds what a warp has of the derivatives of biases, keys by queries, to the keys from `first` on.
template <int Columns>
__device__ void add_key_sums(bias_sums const& sums, fragment<Columns> const& x, int head, index_t first_place,
                             int first, int end) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < Columns; ++n) sum += x.x[n][2 * r] + x.x[n][2 * r + 1];
    sum = row_sum(sum);
    int const j = first + fragment<Columns>::row(2 * r);
    if (threadIdx.x % 4 == 0 && j < end) sums.key(head, first_place, j) += double(sum);
  }
}

/// The queries of one head that see keys of a block: rows [first, end) always, then those of entries that chose its
/// chunk.
struct key_queries {
  int first, end, tiles;  ///< tiles of consecutive rows
  int all;                ///< tiles of both kinds
  int list, list_end;
  int const* entry;
  head_bias gate;

  template <class T>
  __device__ key_queries(problem<T> const& p, key_block const& block, chunk_lists const& lists, int head, int size)
      : first(0), end(0), entry(lists.of(head, block.s)), gate(p.bias(block.s, head)) {
    auto const& s = block.s;
    if (p.always != always_seen::nothing) {
      int const last = p.always == always_seen::window ? block.end + p.window - 1 : (block.chunk + 1) * p.chunk;
      first = block.begin > s.past ? block.begin - s.past : 0;
      end = (last < s.count() ? last : s.count()) - s.past;
    }
    int const* const start = lists.start + head * lists.places + p.first_chunk(s.n) + block.chunk;
    list = start[0];
    list_end = start[1];
    tiles = end > first ? (end - first + size - 1) / size : 0;
    all = tiles + (list_end - list + size - 1) / size;
  }
  /// Row i of tile t, -1: none.
  __device__ int row(int t, int i, int size, int slots) const {
    if (t < tiles) return first + t * size + i < end ? first + t * size + i : -1;
    int const x = list + (t - tiles) * size + i;
    return x < list_end ? entry[x] / slots : -1;
  }
};

/// A tile of queries at the keys of a block.
template <class T, int Width>
struct pull_keys_memory {
  static constexpr int queries = 32;
  static constexpr int row = padded_row<T>(Width), weights = sizeof(T) == 2 ? 0 : padded_row<T>(queries);
  alignas(16) T key[tile * row];
  T value[tile * row];
  T query[queries * row];
  T upstream[queries * row];
  T weight[tile * weights + 8];
  split_sum gate[queries];
  float lse[queries], output[queries], factor[queries];
  int row_of[queries], above[queries], below[queries];  ///< -1: none; the keys of the block that a query sees
  key_queries seen_by;

  /// Query i of tile t of those that see the block.
  __device__ void put(problem<T> const& p, key_block const& block, routed_upstream<T> const& up, int head, int t,
                      int i) {
    int const row = seen_by.row(t, i, queries, p.slots);
    bool const chosen = t >= seen_by.tiles;
    int const position = block.s.past + (row < 0 ? 0 : row);
    index_t const at = p.at(block.s.begin + (row < 0 ? 0 : row), head);
    int const end = chosen ? p.chosen_end(position, block.chunk) : position + 1;
    row_of[i] = row;
    above[i] = chosen ? 0 : p.always_from(position) - block.begin;
    below[i] = row < 0 ? 0 : (end < position + 1 ? end : position + 1) - block.begin;
    lse[i] = up.lse[at];
    output[i] = up.output[at];
    factor[i] = up.weight_at(at);
    gate[i] = p.gate(seen_by.gate, position, block.s.count());
  }
  /// x, products of keys and queries, becomes the weights on values, gv = g.v the derivatives of scores.
  __device__ void pull(problem<T> const& p, int first_key, split_sum const (&key_gate)[2], fragment<queries / 8>& x,
                       fragment<queries / 8>& gv) const {
#pragma unroll
    for (int n = 0; n < queries / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = fragment<8>::column(n, e), key = first_key + fragment<8>::row(e);
        float const y = score_of(x.x[n][e], p.a.scale, p.a.bias.given, gate[i], key_gate[e / 2]);
        bool const seen = key >= above[i] && key < below[i];
        float const w = seen ? weight_of(y - lse[i]) : 0.0F, f = factor[i];
        x.x[n][e] = w * f;
        gv.x[n][e] = seen ? w * (f * gv.x[n][e] - output[i]) : 0.0F;
      }
  }
};

/// The derivatives of keys and values: grid (blocks of keys, slices of channels). A block goes through the query
/// heads of its group and through the queries that see its keys always, then those that chose its chunk.
template <class T, int Width>
__global__ void __launch_bounds__(threads, 2)
    pull_keys(problem<T> p, key_cut cut, chunk_lists lists, routed_upstream<T> up, router_gradient router,
              token_gradient<T> d, bias_sums sums) {
  using memory = pull_keys_memory<T, Width>;
  constexpr int queries = memory::queries;
  auto& m = shared_memory<memory>();
  auto const block = cut.at(p, blockIdx.x);
  if (block.begin >= block.end) return;
  auto const& s = block.s;
  int const from = int(threadIdx.x / warp) * 16, out = int(blockIdx.y) * Width;
  int const group = p.a.heads_count / cut.units;
  int const slices = head_loader<T, Width>::slices(p.a.key_dim > p.a.value_dim ? p.a.key_dim : p.a.value_dim);
  bool const active = block.begin + from < block.end;
  fragment<Width / 8> d_key, d_value;
  d_key.fill(0.0F);
  d_value.fill(0.0F);

#pragma unroll 1
  for (int head = block.unit * group; head < (block.unit + 1) * group; ++head) {
    head_loader<T, Width> const load{p, s, head};
    __syncthreads();
    if (threadIdx.x == 0) m.seen_by = key_queries(p, block, lists, head, queries);
    __syncthreads();
    split_sum gate[2];
    for (int r = 0; r < 2; ++r)
      gate[r] = p.gate(m.seen_by.gate, block.begin + from + fragment<8>::row(2 * r), block.end);

#pragma unroll 1
    for (int t = 0; t < m.seen_by.all; ++t) {
      __syncthreads();
      if (threadIdx.x < queries) m.put(p, block, up, head, t, int(threadIdx.x));
      fragment<queries / 8> x, gv;
      x.fill(0.0F);
      gv.fill(0.0F);
      auto const load_queries = [&](int slice) {
        auto const row_of = [&](int i) { return m.row_of[i]; };
        load.queries(m.query, queries, slice, row_of);
        load.rows(m.upstream, up.d_o, queries, slice, p.a.value_dim, row_of);
        finish_loads();
        __syncthreads();
      };
      for (int slice = 0; slice < slices; ++slice) {
        __syncthreads();
        if (t == 0 || slices > 1) {
          load.keys(m.key, block.begin, block.end, slice);
          load.values(m.value, block.begin, block.end, slice);
        }
        load_queries(slice);
        if (!active) continue;
        multiply_add<layout::row_major, layout::column_major>(x, m.key + from * memory::row, memory::row, m.query,
                                                              memory::row, Width);
        multiply_add<layout::row_major, layout::column_major>(gv, m.value + from * memory::row, memory::row,
                                                              m.upstream, memory::row, Width);
      }
      if (slices > 1) {
        __syncthreads();
        load_queries(int(blockIdx.y));
      }
      if (!active) continue;
      m.pull(p, from, gate, x, gv);
      T* const scratch = m.weight + from * memory::weights;
      multiply_add<T>(d_value, x, m.upstream, memory::row, scratch);
      multiply_add<T>(d_key, gv, m.query, memory::row, scratch);
      if (sums.wanted && blockIdx.y == 0) add_key_sums(sums, gv, head, s.first, block.begin + from, block.end);
    }

    // Derivatives of shared heads are written behind the last of their query heads, by way of the tiles of keys.
    __syncthreads();
    if (!active) continue;
    int const key_head = p.key_head(head), value_head = p.value_head(head);
    auto const token_of = [&](int i) { return block.begin + from + i; };
    if ((head + 1) % p.a.key_group == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const j = token_of(fragment<8>::row(2 * r));
        float const* const extra = router.key && j < block.end ? router.of_key(p, s, j, key_head) : nullptr;
        add_router(d_key, r, extra, out, p.a.key_dim, p.a.scale);
      }
      write_rows(d_key, m.key + from * memory::row, memory::row, out, p.a.key_dim, [&](int i) -> T* {
        return token_of(i) < block.end ? d.of(s, token_of(i), key_head, d.k, d.past_k) : nullptr;
      });
      d_key.fill(0.0F);
    }
    if ((head + 1) % p.a.value_group == 0) {
      write_rows(d_value, m.value + from * memory::row, memory::row, out, p.a.value_dim, [&](int i) -> T* {
        return token_of(i) < block.end ? d.of(s, token_of(i), value_head, d.v, d.past_v) : nullptr;
      });
      d_value.fill(0.0F);
    }
  }
}

/// The sink's derivative: its weight times g.(0 - o), summed over all rows by one block per head.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    pull_sinks(float const* sink, index_t sink_step, float const* lse, float const* output, index_t rows,
               int heads_count, float* d_sink, index_t d_step) {
  using reduce = cub::BlockReduce<double, Threads>;
  __shared__ typename reduce::TempStorage memory;
  int const head = int(blockIdx.x);
  float const x = sink[head * sink_step];
  double sum = 0.0;
#pragma unroll 1
  for (index_t r = threadIdx.x; r < rows; r += Threads) {
    index_t const at = r * heads_count + head;
    sum -= x == -INFINITY ? 0.0 : double(expf(x - lse[at]) * output[at]);
  }
  sum = reduce(memory).Sum(sum);
  if (threadIdx.x == 0) d_sink[head * d_step] = float(sum);
}

/// Launches the derivatives of queries, keys and values for given choices.
template <class T>
void pull_chosen(device::cuda const& dev, problem<T> const& p, row_tiles const& rows, chunk_lists const& lists,
                 routed_upstream<T> const& up, index_t const* choice, router_gradient const& router,
                 token_gradient<T> const& d, bias_sums const& sums, arena& ws) {
  arena_scope const scope(ws);
  auto const parts = chosen_parts::take(p, p.a.key_dim, ws);
  int const wide = (std::max)(p.a.key_dim, p.a.value_dim);
  with_slice<T>(wide, [&]<int Width>(std::integral_constant<int, Width>) {
    for (bool const listed : {true, false}) {
      query_cut const cut{rows, lists, listed, p.a.heads_count};
      launch(dev, listed ? "routed attention: queries of chosen chunks" : "routed attention: queries",
             &pull_queries<T, Width>, blocks(cut.count(), divided_up(p.a.key_dim, Width)), threads,
             sizeof(pull_queries_memory<T, Width>), p, cut, up, choice, parts, router, d.q, sums);
    }
    key_cut const cut(p, std::gcd(p.key_heads, p.value_heads));
    launch(dev, "routed attention: keys and values", &pull_keys<T, Width>,
           blocks(cut.count(), divided_up(wide, Width)), threads, sizeof(pull_keys_memory<T, Width>), p, cut, lists,
           up, router, d, sums);
  });
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
