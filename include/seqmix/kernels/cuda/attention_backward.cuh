#pragma once

#include <seqmix/kernels/cuda/attention_tiles.cuh>

/// The backward of softmax attention on a device (Dao et al., arXiv 2205.14135): weights are recomputed from q, k
/// and the saved log-sum-exp,
///   p = e^(score - lse),   d_score = p (g.v - g.o),
/// once by tiles of keys for d_k and d_v, once by tiles of queries for d_q, so that no two blocks add to one
/// number. What a pair of query and key does is a rule of its own; other weights have others.
namespace seqmix::inline v0::kernels::cuda {

/// Where the derivatives of tokens go: rows or the past, or for heads that are shared to float sums per query head.
template <class T>
struct token_target {
  heads<T> now;
  past_heads<T> before;
  float* per_head = nullptr;  ///< [H, places, channels]
  int channels = 0, group = 1;

  /// put(address of a token's channels), where they are wanted.
  template <class F>
  __device__ void write(token_places const& places, attended_head const& head, index_t token, F const& put) const {
    if (per_head) {
      put(per_head + (head.head * places.count + places.first(head.n) + token) * channels);
    } else if (T* const to = shared(head.n, head.begin, head.past, token, head.head / group)) {
      put(to);
    }
  }
  /// The address for all query heads of a group together; nullptr: not wanted.
  __device__ T* shared(index_t n, index_t begin, index_t past, index_t token, int head) const {
    if (token >= past) return now.data ? now.at(begin + token - past, head) : nullptr;
    return before.data ? before.at(n, token, head) : nullptr;
  }
};

/// Tiles of keys of all sequences: those of the past, where they are asked for, then those of the rows.
struct key_blocks {
  row_tiles own;
  index_t past_per_sequence, own_count;

  /// `alone`: rows bring no keys; `past`: the derivatives of past tokens are wanted.
  static key_blocks of(device::cuda const& dev, attention_shape const& s, token_places const& places, bool alone,
                       bool past) {
    row_tiles const rows(dev, s.seq, tile_keys);
    return {rows, past ? divided_up(places.capacity, tile_keys) : 0, alone ? 0 : rows.count};
  }

  struct place {
    index_t sequence, first;
    bool of_past;
  };
  index_t count() const { return own.sequence_count * past_per_sequence + own_count; }
  __device__ index_t slots() const { return own.sequence_count * past_per_sequence + own_count; }
  __device__ place at(index_t slot) const {
    index_t const past = own.sequence_count * past_per_sequence;
    if (slot < past) return {slot / past_per_sequence, slot % past_per_sequence * tile_keys, true};
    auto const row = own.at(slot - past);
    return {row.sequence, row.first, false};
  }
};

namespace detail {

/// What a lane's two rows of a fragment need; rules add their terms.
struct lane_terms : lane_rows {
  bool all_seen;

  /// The running log-decays of rows first + row of the fragment.
  template <class T>
  __device__ void load_sums(attention_problem<T> const& p, attended_head const& head, index_t first) {
    if (!p.bias.given) return;
    head_bias const bias = head.bias(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      index_t const i = first + fragment<1>::row(2 * r);
      sum[r] = i < head.rows ? bias.split(head.position + i) : split_sum(0.0);
    }
  }
  /// What the rows see of a tile; `low`: the position of the warp's first one.
  template <class T>
  __device__ void see(key_tile<T> const& tile, index_t low, index_t window) {
#pragma unroll
    for (int r = 0; r < 2; ++r) seen[r] = tile.seen(low + fragment<1>::row(2 * r), window);
    all_seen = tile.seen_by_all(low, low + 15, window);
  }
};

}  // namespace detail

/// What a backward of softmax attention reads beside the input, and what a pair does: a rule for
/// pull_back_attention.
template <class T>
struct attention_upstream {
  heads<T const> d_o;
  float const* lse;  ///< [R,H]
  float* product;    ///< g.o of every row [H,R]
  index_t rows;
  /// Whether d_v is made of the weights that pull_back leaves, else somebody else writes it.
  static constexpr bool values = true;

  struct lane : detail::lane_terms {
    float lse[2], product[2];
  };
  /// Rows first + row of the fragment; those behind the last get weights of 0.
  __device__ void load(lane& x, attention_problem<T> const& p, attended_head const& head, index_t first) const {
    x.load_sums(p, head, first);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      index_t const i = first + fragment<1>::row(2 * r);
      bool const is_row = i < head.rows;
      x.lse[r] = is_row ? lse[(head.begin + i) * p.heads_count + head.head] : INFINITY;
      x.product[r] = is_row ? product[head.head * rows + head.begin + i] : 0.0F;
    }
  }
  /// q.k to weights and g.v to derivatives of scores; the fragment begins at `first_column` of
  /// the tile.
  template <int Columns>
  __device__ void pull_back(fragment<Columns>& x, fragment<Columns>& y, lane const& terms, float scale,
                            split_sum const* gate, int first_column, key_tile<T> const&) const {
    score(x, terms, scale, gate, first_column, terms.all_seen);
#pragma unroll
    for (int n = 0; n < Columns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool const hidden = x.x[n][e] == -INFINITY;
        float const weight = hidden ? 0.0F : weight_of(x.x[n][e] - terms.lse[e / 2]);
        y.x[n][e] = hidden ? 0.0F : weight * (y.x[n][e] - terms.product[e / 2]);
        x.x[n][e] = weight;
      }
  }
};

namespace detail {

/// g.o of every row, by the sums of g.v, so that a row that sees one key alone has exact zeros. Grid of (heads x
/// tiles of 64 rows).
template <class T, int Width>
__global__ void __launch_bounds__(128)
    multiply_rows(attention_problem<T> p, row_tiles cut, heads<T const> o, attention_upstream<T> up) {
  constexpr int row = padded_row<T>(Width);
  extern __shared__ uint4 shared[];
  T *const a = reinterpret_cast<T*>(shared), *const b = a + 64 * row;
  int const head = int(blockIdx.x / cut.count);
  auto const place = cut.at(blockIdx.x % cut.count);
  index_t const begin = cut.rows.begin(place.sequence) + place.first;
  index_t const left = cut.rows.length(place.sequence) - place.first;
  if (left <= 0) return;
  int const count = left < 64 ? int(left) : 64, first = int(threadIdx.x) / warp * 16;
  fragment<2> x;
  x.fill(0.0F);
  for (int s = 0; s * Width < p.value_dim; ++s) {
    if (s > 0) __syncthreads();
    begin_slice<Width, 128>(a, 64, up.d_o.at(begin, head), up.d_o.row, count, p.value_dim, s);
    begin_slice<Width, 128>(b, 64, o.at(begin, head), o.row, count, p.value_dim, s);
    arrive();
    multiply_add<layout::row_major, layout::column_major>(x, a + first * row, row, b + first * row, row, Width);
  }
  x.each([&](float& value, int r, int c) {
    if (r == c && first + r < count) up.product[head * up.rows + begin + first + r] = value;
  });
}

template <class T, int Width>
struct backward_shape {
  static constexpr int row = padded_row<T>(Width), weight_row = padded_row<T>(tile_keys);
  static constexpr int tile = 64 * row, weights = 64 * weight_row;
  /// Warps side by side along the columns of a tile; four stand along its rows.
  static constexpr int split = Width > 32 ? 2 : 1;
  static constexpr int threads = 128 * split;
  /// Blocks that shall fit a multiprocessor, by tiles of keys and of queries.
  static constexpr int blocks = Width > 64 ? 1 : (sizeof(T) == 4 ? 2 : Width > 32 ? 4 : 3) / split;
  static constexpr int query_blocks = Width > 64 || sizeof(T) == 4 ? 2 : 3;
  /// Floats are large: weights and derivatives of scores take turns.
  static constexpr bool one_buffer = sizeof(T) == 4;
  static constexpr int k = 0, v = tile, q = 2 * tile, d_o = 3 * tile, p = 4 * tile;
  static constexpr int d_score = p + (one_buffer ? 0 : weights);
  static constexpr int gate_bytes = (d_score + weights) * int(sizeof(T));
  static constexpr int sum_bytes = gate_bytes + tile_keys * int(sizeof(split_sum));
  static constexpr int bytes = sum_bytes + 4 * tile_keys * int(sizeof(double));
};

/// Adds the columns of a warp's derivatives to its row of sums in shared memory.
template <int Columns>
__device__ void add_columns(fragment<Columns> const& y, double* sums) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      double sum = double(y.x[n][e]) + double(y.x[n][e + 2]);
#pragma unroll
      for (int lanes = 4; lanes < warp; lanes *= 2) sum += __shfl_xor_sync(~0U, sum, lanes);
      if (threadIdx.x % warp < 4) sums[fragment<Columns>::column(n, e)] += sum;
    }
}

/// Adds the rows of a lane's part of the derivatives.
template <int Columns>
__device__ void add_rows(fragment<Columns> const& y, double (&sums)[2]) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e / 2] += double(y.x[n][e]);
}

/// x += A B of tiles whose slices are loaded one after another, by `left` and `right`; the tiles are free again.
template <int Width, int Threads, class T, int Columns>
__device__ void multiply_slices(fragment<Columns>& x, slice_loader<Width, Threads, T> const& left,
                                slice_loader<Width, Threads, T> const& right, int first_left, int first_right) {
  constexpr int row = padded_row<T>(Width);
  for (int s = 0; s * Width < left.channels; ++s) {
    left(s);
    right(s);
    arrive();
    multiply_add<layout::row_major, layout::column_major>(x, left.tile + first_left * row, row,
                                                          right.tile + first_right * row, row, Width);
    __syncthreads();
  }
}

/// d_k and d_v of one tile of keys by one query head: grid (heads x tiles, slices of their channels). Queries in
/// ascending order.
template <class T, int Width, class Rule>
__global__ void __launch_bounds__(backward_shape<T, Width>::threads, backward_shape<T, Width>::blocks)
    pull_back_keys(attention_problem<T> p, key_blocks cut, Rule rule, token_target<T> d_k, token_target<T> d_v,
                   bias_sums sums) {
  using shape = backward_shape<T, Width>;
  using loader = slice_loader<Width, shape::threads, T>;
  constexpr int row = shape::row, weight_row = shape::weight_row, part = Width / shape::split;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  T *const k = base + shape::k, *const v = base + shape::v, *const q = base + shape::q,
           *const d_o = base + shape::d_o;
  T *const weights = base + shape::p, *const d_scores = base + shape::d_score;
  auto* const gates = reinterpret_cast<split_sum*>(reinterpret_cast<char*>(shared) + shape::gate_bytes);
  auto* const columns = reinterpret_cast<double*>(reinterpret_cast<char*>(shared) + shape::sum_bytes);

  auto const place = cut.at(blockIdx.x % cut.slots());
  __shared__ attended_head head;
  if (threadIdx.x == 0) head = attended_head::of(p, place.sequence, int(blockIdx.x / cut.slots()));
  __syncthreads();
  if (place.first >= (place.of_past ? head.past : head.rows)) return;
  auto const tile = head.tile(p, int(place.first / tile_keys) + (place.of_past ? 0 : head.past_tiles()));
  int const slice = int(blockIdx.y);
  bool const has_keys = slice * Width < p.key_dim, has_values = rule.values && slice * Width < p.value_dim;
  bool const sliced = may_be_sliced<T, Width> && (p.key_dim > Width || p.value_dim > Width);
  int const along = int(threadIdx.x) / warp % 4 * 16, across = int(threadIdx.x) / 128;

  loader const load_keys{k, tile_keys, tile.k, tile.k_row, tile.count, p.key_dim};
  loader const load_values{v, tile_keys, tile.v, tile.v_row, tile.count, p.value_dim};
  if (!sliced) load_keys(0), load_values(0);
  if (p.bias.given) load_gates(gates, head.bias(p), tile);
  bool const sums_columns = sums.wanted && slice == 0;
  for (int j = int(threadIdx.x); j < 4 * tile_keys && sums_columns; j += shape::threads) columns[j] = 0.0;

  fragment<part / 8> sum_k, sum_v;
  sum_k.fill(0.0F);
  sum_v.fill(0.0F);
  // Rows whose positions are at least the first key's, and less than `window` beyond the last one's.
  index_t first = tile.token - head.position, end = tile.token + tile.count - 1 + p.window - head.position;
  first = first < 0 ? 0 : first / 64 * 64;
  end = end < head.rows ? end : head.rows;
  for (index_t i = first; i < end; i += 64) {
    int const count = head.rows - i < 64 ? int(head.rows - i) : 64;
    loader const load_queries{q, 64, p.q.at(head.begin + i, head.head), p.q.row, count, p.key_dim};
    loader const load_upstream{d_o, 64, rule.d_o.at(head.begin + i, head.head), rule.d_o.row, count, p.value_dim};
    fragment<tile_keys / 8 / shape::split> x, y;
    int const beside = across * x.columns;
    x.fill(0.0F);
    y.fill(0.0F);
    if (!sliced) {
      load_queries(0);
      load_upstream(0);
      arrive();
      multiply_add<layout::row_major, layout::column_major>(x, q + along * row, row, k + beside * row, row, Width);
      multiply_add<layout::row_major, layout::column_major>(y, d_o + along * row, row, v + beside * row, row,
                                                            Width);
    } else {
      multiply_slices(x, load_queries, load_keys, along, beside);
      multiply_slices(y, load_upstream, load_values, along, beside);
      if (has_keys) load_queries(slice);
      if (has_values) load_upstream(slice);
    }
    typename Rule::lane lane;
    rule.load(lane, p, head, i + along);
    lane.see(tile, head.position + i + along, p.window);
    rule.pull_back(x, y, lane, p.scale, p.bias.given ? gates : nullptr, beside, tile);
    if (sums_columns) add_columns(y, columns + along / 16 * tile_keys + beside);
    if (has_values) store_fragment(x, weights + along * weight_row + beside, weight_row);
    if constexpr (!shape::one_buffer) store_fragment(y, d_scores + along * weight_row + beside, weight_row);
    arrive();
    if (has_values)
      multiply_add<layout::column_major, layout::row_major>(sum_v, weights + along, weight_row, d_o + across * part,
                                                            row, 64);
    if constexpr (shape::one_buffer) {
      __syncthreads();
      store_fragment(y, d_scores + along * weight_row + beside, weight_row);
      __syncthreads();
    }
    if (has_keys)
      multiply_add<layout::column_major, layout::row_major>(sum_k, d_scores + along, weight_row, q + across * part,
                                                            row, 64);
    __syncthreads();
  }
  finish_loads();
  int const first_column = slice * Width + across * part;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const j = along + fragment<1>::row(2 * r);
    if (j >= tile.count) continue;
    d_k.write(p.places, head, tile.token + j,
              [&](auto* to) { write_row(to, sum_k, r, first_column, p.key_dim, p.scale); });
    if (has_values)
      d_v.write(p.places, head, tile.token + j,
                [&](auto* to) { write_row(to, sum_v, r, first_column, p.value_dim, 1.0F); });
  }
  if (!sums_columns) return;
  __syncthreads();
  for (int j = int(threadIdx.x); j < tile.count; j += shape::threads)
    sums.key(head.head, p.places.first(head.n), tile.token + j) =
        (columns[j] + columns[tile_keys + j]) + (columns[2 * tile_keys + j] + columns[3 * tile_keys + j]);
}

/// d_q of 64 rows: grid (heads x tiles of rows, slices of the channels). Keys in ascending order.
template <class T, int Width, class Rule>
__global__ void __launch_bounds__(128, backward_shape<T, Width>::query_blocks)
    pull_back_queries(attention_problem<T> p, row_tiles cut, Rule rule, heads<T> d_q, bias_sums sums) {
  using shape = backward_shape<T, Width>;
  using loader = slice_loader<Width, 128, T>;
  constexpr int row = shape::row;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  T *const k = base + shape::k, *const v = base + shape::v, *const q = base + shape::q,
           *const d_o = base + shape::d_o;
  auto* const gates = reinterpret_cast<split_sum*>(reinterpret_cast<char*>(shared) + shape::gate_bytes);

  auto const place = cut.at(cut.count - 1 - blockIdx.x % cut.count);
  __shared__ attended_head head;
  if (threadIdx.x == 0) head = attended_head::of(p, place.sequence, int(blockIdx.x / cut.count));
  __syncthreads();
  index_t const first = place.first;
  if (first >= head.rows) return;
  int const count = head.rows - first < 64 ? int(head.rows - first) : 64;
  int const slice = int(blockIdx.y), along = int(threadIdx.x) / warp * 16;
  bool const sliced = may_be_sliced<T, Width> && (p.key_dim > Width || p.value_dim > Width);

  loader const load_queries{q, 64, p.q.at(head.begin + first, head.head), p.q.row, count, p.key_dim};
  loader const load_upstream{d_o, 64, rule.d_o.at(head.begin + first, head.head), rule.d_o.row, count, p.value_dim};
  if (!sliced) load_queries(0), load_upstream(0);
  typename Rule::lane lane;
  rule.load(lane, p, head, first + along);
  fragment<Width / 8> sum_q;
  sum_q.fill(0.0F);
  double row_sums[2] = {0.0, 0.0};
  auto const seen = head.seen(head.position + first, head.position + first + count - 1, p.window);
  for (int t = seen.begin; t < seen.end; ++t) {
    auto const tile = head.tile(p, t);
    loader const load_keys{k, tile_keys, tile.k, tile.k_row, tile.count, p.key_dim};
    loader const load_values{v, tile_keys, tile.v, tile.v_row, tile.count, p.value_dim};
    fragment<tile_keys / 8> x, y;
    x.fill(0.0F);
    y.fill(0.0F);
    __syncthreads();
    if (p.bias.given) load_gates(gates, head.bias(p), tile);
    if (!sliced) {
      load_keys(0);
      load_values(0);
      arrive();
      multiply_add<layout::row_major, layout::column_major>(x, q + along * row, row, k, row, Width);
      multiply_add<layout::row_major, layout::column_major>(y, d_o + along * row, row, v, row, Width);
    } else {
      multiply_slices(x, load_queries, load_keys, along, 0);
      multiply_slices(y, load_upstream, load_values, along, 0);
      load_keys(slice);
      arrive();
    }
    lane.see(tile, head.position + first + along, p.window);
    rule.pull_back(x, y, lane, p.scale, p.bias.given ? gates : nullptr, 0, tile);
    if (sums.wanted) add_rows(y, row_sums);
    multiply_add<T>(sum_q, y, k, row, base + shape::p + along * shape::weight_row);
  }
  finish_loads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sums[r] += __shfl_xor_sync(~0U, row_sums[r], 1);
    row_sums[r] += __shfl_xor_sync(~0U, row_sums[r], 2);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const i = along + fragment<1>::row(2 * r);
    if (i >= count) continue;
    index_t const at = head.begin + first + i;
    if (sums.wanted && slice == 0 && threadIdx.x % 4 == 0) sums.query(head.head, at) = row_sums[r];
    write_row(d_q.at(at, head.head), sum_q, r, slice * Width, p.key_dim, p.scale);
  }
}

/// Adds the derivatives of shared heads in the order of their query heads: grid of (shared heads x tiles of keys).
template <class T>
__global__ void __launch_bounds__(128) add_heads(token_places places, key_blocks cut, token_target<T> d) {
  auto const place = cut.at(blockIdx.x % cut.slots());
  int const shared_head = int(blockIdx.x / cut.slots());
  index_t const n = place.sequence, past = places.past(n), begin = places.rows.begin(n);
  index_t const count = place.of_past ? past : places.rows.length(n);
  for (int x = int(threadIdx.x); x < tile_keys * d.channels; x += int(blockDim.x)) {
    index_t const here = place.first + x / d.channels, token = here + (place.of_past ? 0 : past);
    T* const to = here < count ? d.shared(n, begin, past, token, shared_head) : nullptr;
    if (!to) continue;
    float sum = 0.0F;
    for (int i = 0; i < d.group; ++i) {
      index_t const head = index_t(shared_head) * d.group + i;
      sum += d.per_head[(head * places.count + places.first(n) + token) * d.channels + x % d.channels];
    }
    to[x % d.channels] = from_float<T>(sum);
  }
}

/// d_sink of one head per block: minus the sum over all rows of the sink's weight times g.o.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    pull_back_sink(float const* sink, index_t sink_step, float const* lse, float const* product, index_t rows,
                   float* d_sink, index_t d_sink_step) {
  using reduce = cub::BlockReduce<double, Threads>;
  __shared__ typename reduce::TempStorage memory;
  index_t const h = blockIdx.x;
  float const weight = sink[h * sink_step];
  double sum = 0.0;
  for (index_t r = threadIdx.x; r < rows && weight != -INFINITY; r += Threads)
    sum -= double(weight_of(weight - lse[r * gridDim.x + h]) * product[h * rows + r]);
  sum = reduce(memory).Sum(sum);
  if (threadIdx.x == 0) d_sink[h * d_sink_step] = float(sum);
}

/// d_q, d_k, d_v and the sums of the biases' derivatives by a rule, in tiles of `Width` channels.
template <class T, int Width, class Rule>
void pull_back_attention(device::cuda const& dev, attention_shape const& s, attention_problem<T> const& problem,
                         key_blocks const& keys, Rule const& rule, token_target<T> const& d_k,
                         token_target<T> const& d_v, heads<T> d_q, bias_sums const& sums) {
  using shape = backward_shape<T, Width>;
  row_tiles const& rows = keys.own;
  index_t const key_slices = divided_up(s.key_dim, Width);
  index_t const value_slices = rule.values ? divided_up(s.value_dim, Width) : 0;
  launch(dev, "attention backward: keys", &pull_back_keys<T, Width, Rule>,
         blocks(s.heads * keys.count(), key_slices > value_slices ? key_slices : value_slices), shape::threads,
         shape::bytes, problem, keys, rule, d_k, d_v, sums);
  launch(dev, "attention backward: queries", &pull_back_queries<T, Width, Rule>,
         blocks(s.heads * rows.count, key_slices), 128, shape::bytes, problem, rows, rule, d_q, sums);
  for (auto const* d : {&d_k, &d_v})
    if (d->group > 1)
      launch(dev, "attention backward: shared heads", &add_heads<T>, blocks(s.heads / d->group * keys.count()), 128,
             0, problem.places, keys, *d);
}

template <class T, int Width>
void attention_backward(device::cuda const& dev, attention_shape const& s, attention_problem<T> const& problem,
                        bool alone, heads<T const> o, attention_upstream<T> const& up, token_target<T> const& d_k,
                        token_target<T> const& d_v, heads<T> d_q, bias_sums const& sums, bool past_wanted) {
  auto const keys = key_blocks::of(dev, s, problem.places, alone, past_wanted);
  launch(dev, "attention backward: rows", &multiply_rows<T, Width>, blocks(s.heads * keys.own.count), 128,
         std::size_t(2 * backward_shape<T, Width>::tile) * sizeof(T), problem, keys.own, o, up);
  pull_back_attention<T, Width>(dev, s, problem, keys, up, d_k, d_v, d_q, sums);
}

}  // namespace detail
}  // namespace seqmix::inline v0::kernels::cuda
