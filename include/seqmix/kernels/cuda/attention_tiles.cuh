#pragma once

#include <seqmix/kernels/cuda/score_bias.cuh>
#include <seqmix/kernels/cuda/warp_tile.cuh>

/// What the attention kernels of a device share: which rows and keys a block works on, how products become scores,
/// and tiles that are copied while others are computed with.
namespace seqmix::inline v0::kernels::cuda {

inline constexpr int tile_keys = 64;

/// Channels that a tile holds at most; heads that have more are worked on in slices.
template <class T>
inline constexpr int widest_slice = sizeof(T) == 2 ? 128 : 64;

/// Calls f with the width of the tiles for heads of this many channels: f(std::integral_constant<int, Width>()).
template <class T, class F>
void with_slice(index_t channels, F const& f) {
  if (channels <= 32)
    f(std::integral_constant<int, 32>());
  else if (channels <= 64 || widest_slice<T> == 64)
    f(std::integral_constant<int, 64>());
  else
    f(std::integral_constant<int, widest_slice<T>>());
}
/// Whether heads that are cut into slices come to tiles of this width.
template <class T, int Width>
inline constexpr bool may_be_sliced = Width == widest_slice<T>;

/// e^x for x <= 0 with an error of about 2^-23 of the greatest result, 1, which is exact; NaN stays NaN.
__device__ inline float weight_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.4426950408889634F)));
  return y;
}

/// Copies one slice of Width channels of a tile's rows [valid_rows, channels] to shared memory, zero beyond, by a
/// block of `Threads`. What can be copied 16 bytes at a time is not waited for; `finish_loads` and a barrier come
/// before the tile is read.
template <int Width, int Threads, class T>
__device__ void begin_slice(T* tile, int rows, T const* from, index_t row_stride, int valid_rows, int channels,
                            int slice) {
  constexpr int w = vector_elements<T>, ld = padded_row<T>(Width), vectors = Width / w;
  static_assert(Threads % vectors == 0);
  from += slice * Width;
  int const valid = channels - slice * Width;
  if (!vectorisable(from, row_stride, valid)) {
    load_tile(tile, ld, rows, Width, from, row_stride, valid_rows, valid);
    return;
  }
  int const c = int(threadIdx.x) % vectors * w;
  T const* next = from + int(threadIdx.x) / vectors * row_stride + c;
#pragma unroll 1
  for (int r = int(threadIdx.x) / vectors; r < rows;
       r += Threads / vectors, next += Threads / vectors * row_stride) {
    T* const to = tile + r * ld + c;
    if (r < valid_rows && c < valid)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(detail::shared_address(to)), "l"(next)
                   : "memory");
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}
__device__ inline void finish_loads() { asm volatile("cp.async.wait_all;" : : : "memory"); }

/// What is begun is there for all threads of the block.
__device__ inline void arrive() {
  finish_loads();
  __syncthreads();
}

/// Rows in device memory and the tile that their slices are copied to: f(slice).
template <int Width, int Threads, class T>
struct slice_loader {
  T* tile;
  int rows;
  T const* from;
  index_t row_stride;
  int valid_rows, channels;

  __device__ void operator()(int slice) const {
    begin_slice<Width, Threads>(tile, rows, from, row_stride, valid_rows, channels, slice);
  }
};

/// Writes what a lane holds of row r (of its two) of a fragment, times a factor; columns from `first` on that are
/// below `columns`.
template <class U, int Columns>
__device__ void write_row(U* to, fragment<Columns> const& x, int r, int first, int columns, float factor) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const c = first + fragment<Columns>::column(n, e);
      if (c < columns) to[c] = from_float<U>(x.x[n][2 * r + e] * factor);
    }
}

/// c += round(p) B with B [8 Depth, 8 Columns] row-major in shared memory: sixteen-bit numbers go from the fragment
/// to the tensor cores, floats by way of `scratch`, a warp's own rows of 8 Depth columns.
template <class T, int Depth, int Columns>
__device__ void multiply_add(fragment<Columns>& c, fragment<Depth>& p, T const* b, int ldb, T* scratch) {
  if constexpr (sizeof(T) == 2) {
    auto const pair = [](float low, float high) {
      return unsigned(from_float<T>(low).bits) | unsigned(from_float<T>(high).bits) << 16;
    };
#pragma unroll
    for (int k = 0; k < Depth; k += 2) {
      unsigned const left[4] = {pair(p.x[k][0], p.x[k][1]), pair(p.x[k][2], p.x[k][3]),
                                pair(p.x[k + 1][0], p.x[k + 1][1]), pair(p.x[k + 1][2], p.x[k + 1][3])};
      unsigned right[4];
#pragma unroll
      for (int n = 0; n < Columns; n += 2) {
        detail::load_matrices<true>(right, detail::right_rows(b, ldb, 8 * k, 8 * n, layout::row_major));
        detail::mma<T>(c.x[n], left, right[0], right[1]);
        detail::mma<T>(c.x[n + 1], left, right[2], right[3]);
      }
    }
  } else {
    store_fragment(p, scratch, padded_row<T>(8 * Depth));
    __syncwarp();
    multiply_add<layout::row_major, layout::row_major>(c, scratch, padded_row<T>(8 * Depth), b, ldb, 8 * Depth);
    __syncwarp();
  }
}

/// Blocks of `size` rows, none of which holds rows of two sequences. Batches: as many for every sequence; packed
/// sequences: their slots overlap no others' and some stay empty.
struct row_tiles {
  row_ranges rows;
  index_t sequence_count, size, per_sequence, count;

  row_tiles(device::cuda const& dev, sequences const& seq, index_t tile_rows)
      : rows(dev, seq), sequence_count(seq.count()), size(tile_rows),
        per_sequence(seq.is_batch() ? divided_up(seq.longest(), tile_rows) : 0),
        count(seq.is_batch() ? per_sequence * seq.count() : seq.rows() / tile_rows + seq.count()) {}

  struct place {
    index_t sequence, first;  ///< the first row counted in the sequence; past its end in an empty slot
  };
  __device__ place at(index_t slot) const {
    if (!rows.offsets) return {slot / per_sequence, slot % per_sequence * size};
    // Sequence n owns the slots from begin(n) / size + n on.
    index_t low = 0, high = sequence_count - 1;
    while (low < high) {
      index_t const middle = (low + high + 1) / 2;
      if (rows.begin(middle) / size + middle <= slot)
        low = middle;
      else
        high = middle - 1;
    }
    return {low, (slot - rows.begin(low) / size - low) * size};
  }
};

/// An attention in device code.
template <class T>
struct attention_problem {
  heads<T const> q, k, v;
  past_heads<T const> past_k, past_v;
  token_places places;
  score_bias bias;
  index_t const* position;  ///< [N] of the first row where rows bring no keys, else nullptr
  float const* sink;        ///< nullptr: none
  index_t sink_step;
  index_t window;  ///< keys a query sees
  int heads_count, key_group, value_group, gate_group, key_dim, value_dim;
  float scale;  ///< of q.k, divided by the temperature

  attention_problem(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                    score_bias const& gate, bool windowed)
      : q(in.q_rhk), k(in.k_rhk), v(in.v_rhv), past_k(in.past_k_nlhk), past_v(in.past_v_nlhv), places(dev, s, in),
        bias(gate), position(in.queries_alone ? in.position : nullptr), sink(in.sink_h.data),
        sink_step(in.sink_h.stride[0]), window(windowed ? s.select.window : index_t(1) << 60),
        heads_count(int(s.heads)), key_group(int(s.heads / s.key_heads)), value_group(int(s.heads / s.value_heads)),
        gate_group(int(s.heads / s.gate_heads)), key_dim(int(s.key_dim)), value_dim(int(s.value_dim)),
        scale(float(s.scale / s.knobs.temperature)) {}
};

/// Keys [begin, end) of a tile.
struct tile_columns {
  int begin, end;

  __device__ bool contains(int column) const { return column >= begin && column < end; }
};

/// Up to 64 keys that lie in one piece: of the past or of the call's rows.
template <class T>
struct key_tile {
  T const *k, *v;
  index_t k_row, v_row;
  index_t token;  ///< of its first key
  int count;

  /// Whether all 64 are there and queries at `first` to `last` see them.
  __device__ bool seen_by_all(index_t first, index_t last, index_t window) const {
    return count == tile_keys && token + tile_keys - 1 <= first && token > last - window;
  }
  /// What a query at `position` sees of it.
  __device__ tile_columns seen(index_t position, index_t window) const {
    index_t const from = position - window + 1 - token, to = position + 1 - token;
    return {from < 0 ? 0 : from > tile_keys ? tile_keys : int(from), to < 0 ? 0 : to > count ? count : int(to)};
  }
};

/// One query head of one sequence, its keys in tiles: those of the past, then those of the rows. Plain numbers, to
/// be kept in shared memory, where they cost no registers.
struct attended_head {
  index_t begin, rows, past, keys, position;  ///< `position` of the first row
  int n, head, key_head, value_head;

  template <class T>
  __device__ static attended_head of(attention_problem<T> const& p, index_t n, int head) {
    index_t const rows = p.places.rows.length(n), past = p.places.past(n);
    return {p.places.rows.begin(n),
            rows,
            past,
            past + (p.position ? 0 : rows),
            p.position ? p.position[n] : past,
            int(n),
            head,
            head / p.key_group,
            head / p.value_group};
  }

  __device__ int past_tiles() const { return int(divided_up(past, tile_keys)); }
  __device__ int tile_of(index_t token) const {
    return token < past ? int(token / tile_keys) : past_tiles() + int((token - past) / tile_keys);
  }
  template <class T>
  __device__ key_tile<T> tile(attention_problem<T> const& p, int t) const {
    if (t < past_tiles()) {
      index_t const l = index_t(t) * tile_keys;
      int const count = past - l < tile_keys ? int(past - l) : tile_keys;
      return {p.past_k.at(n, l, key_head), p.past_v.at(n, l, value_head), p.past_k.token, p.past_v.token, l, count};
    }
    index_t const l = index_t(t - past_tiles()) * tile_keys;
    int const count = rows - l < tile_keys ? int(rows - l) : tile_keys;
    return {p.k.at(begin + l, key_head), p.v.at(begin + l, value_head), p.k.row, p.v.row, past + l, count};
  }
  /// Tiles [begin, end) with keys that queries at `first` to `last` see.
  struct tiles {
    int begin, end;
  };
  __device__ tiles seen(index_t first, index_t last, index_t window) const {
    index_t const low = first - window + 1 > 0 ? first - window + 1 : 0;
    index_t const high = last + 1 < keys ? last + 1 : keys;
    if (low >= high) return {0, 0};
    return {tile_of(low), tile_of(high - 1) + 1};
  }
  template <class T>
  __device__ head_bias bias(attention_problem<T> const& p) const {
    return p.bias.of(head / p.gate_group, p.places.first(n));
  }
};

/// The running log-decays of a tile's keys to shared memory.
template <class T>
__device__ void load_gates(split_sum* gates, head_bias const& bias, key_tile<T> const& tile) {
  for (int j = int(threadIdx.x); j < tile_keys; j += int(blockDim.x))
    gates[j] = j < tile.count ? bias.split(tile.token + j) : split_sum(0.0);
}

/// The two rows of a fragment that a lane holds, as scores need them: what they see of a tile, and their G.
struct lane_rows {
  tile_columns seen[2];
  split_sum sum[2];
};

/// Products to scores q.k scale / temperature + G_i - G_j, -inf where a key is not seen. `gate`: the running
/// log-decays of the tile's keys in shared memory, nullptr: no gate; `first_column`: of the fragment in the tile.
/// The bits depend on query and key alone.
template <int Columns>
__device__ void score(fragment<Columns>& x, lane_rows const& rows, float scale, split_sum const* gate,
                      int first_column, bool all_seen) {
#pragma unroll
  for (int n = 0; n < Columns; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const column = first_column + fragment<Columns>::column(n, e);
      float y = __fmul_rn(x.x[n][e], scale);
      if (gate) y = __fadd_rn(y, rows.sum[e / 2] - gate[column]);
      x.x[n][e] = all_seen || rows.seen[e / 2].contains(column) ? y : -INFINITY;
    }
}

}  // namespace seqmix::inline v0::kernels::cuda
