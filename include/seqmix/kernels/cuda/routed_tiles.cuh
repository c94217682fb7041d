#pragma once

#include <string>

#include <seqmix/kernels/cuda/attention_tiles.cuh>

/// What the kernels of routed selectors share on a device: where chunks and their memory lie, which keys a query
/// sees, tiles of rows that lie anywhere.
namespace seqmix::inline v0::kernels::cuda::routed {

inline constexpr int tile = tile_keys;  ///< queries, keys or chunks that a block works on together
inline constexpr int threads = 128;     ///< four warps of 16 rows

/// Blocks that are to share a multiprocessor, which bounds their registers: as many as the tiles leave room for.
template <class T, int Width>
inline constexpr int resident_blocks = sizeof(T) == 4 || Width == 128 ? 2 : 3;

/// The keys that a query sees whatever it chooses.
enum class always_seen { nothing, own_chunk, window };

template <class Which>
constexpr always_seen always_seen_by() {
  return Which::spec.own_chunk  ? always_seen::own_chunk
         : Which::spec.windowed ? always_seen::window
                                : always_seen::nothing;
}
/// The device knows selectors by their spec alone: a selector's blocks must be what its spec says.
template <class Which>
constexpr bool blocks_follow_spec() {
  selection const s{.window = 3, .chunk = 4};
  for (index_t query = 0; query < 14; ++query)
    for (index_t choice = -1; choice < query / 4 + Which::spec.own_competes; ++choice) {
      auto const seen = Which::blocks(query, choice, s);
      constexpr auto kind = always_seen_by<Which>();
      index_t const near = kind == always_seen::own_chunk ? query / 4 * 4
                           : kind == always_seen::window  ? (query < 2 ? 0 : query - 2)
                                                          : query + 1;
      for (index_t key = 0; key < 20; ++key)
        if (seen.contains(key) != (key <= query && (key >= near || (choice >= 0 && key / 4 == choice))))
          return false;
    }
  return true;
}

/// The tokens of one sequence in device code: those of the past, then its rows. What is counted inside of a
/// sequence is an int.
struct sequence_tokens {
  index_t begin, first;  ///< row 0; token_places::first
  int n, rows, past;

  __device__ int count() const { return past + rows; }
};

/// The last n of [0, count) whose first(n) is at most `place`; first grows.
template <class First>
__device__ index_t holder(index_t count, index_t place, First const& first) {
  index_t low = 0;
  while (count > 1) {
    index_t const half = count / 2;
    if (first(low + half) <= place) {
      low += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return low;
}

/// Which keys are seen, and where what belongs to chunks is kept. Chunk c of sequence n has the place
/// first_chunk(n) + c; there is one place more than it has chunks at least.
template <class T>
struct problem {
  attention_problem<T> a;
  index_t rows;
  index_t chunk_stride;  ///< places from sequence to sequence of a batch; 0: packed sequences
  int sequences, chunk, window, most_chunks;
  int key_heads, value_heads, gate_heads, choices, slots;
  always_seen always;
  bool own_competes;

  __device__ sequence_tokens tokens(index_t n) const {
    return {a.places.rows.begin(n), a.places.first(n), int(n), int(a.places.rows.length(n)), int(a.places.past(n))};
  }
  __host__ __device__ index_t chunk_places() const {
    return chunk_stride > 0 ? sequences * chunk_stride : a.places.count / chunk + 2 * index_t(sequences);
  }
  __device__ index_t first_chunk(index_t n) const {
    return chunk_stride > 0 ? n * chunk_stride : a.places.first(n) / chunk + 2 * n;
  }
  __device__ index_t holder_of_chunk(index_t place) const {
    return chunk_stride > 0 ? place / chunk_stride
                            : holder(sequences, place, [&](index_t n) { return first_chunk(n); });
  }
  __device__ int chunks(sequence_tokens const& s) const { return (s.count() + chunk - 1) / chunk; }
  __device__ int candidates(int position) const { return position / chunk + (own_competes ? 1 : 0); }
  /// Keys [always_from, position] are always seen.
  __device__ int always_from(int position) const {
    if (always == always_seen::own_chunk) return position / chunk * chunk;
    if (always == always_seen::nothing) return position + 1;
    return position < window ? 0 : position - window + 1;
  }
  /// Of chunk c a query sees the keys before this one by its choice alone.
  __device__ int chosen_end(int position, int c) const {
    int const end = (c + 1) * chunk, always_first = always_from(position);
    return end < always_first ? end : always_first;
  }
  __device__ index_t at(index_t row, int head) const { return row * a.heads_count + head; }

  __device__ int key_head(int head) const { return head / a.key_group; }
  __device__ int value_head(int head) const { return head / a.value_group; }
  __device__ T const* query(sequence_tokens const& s, int row, int head) const {
    return a.q.at(s.begin + row, head);
  }
  __device__ T const* key(sequence_tokens const& s, int token, int key_head) const {
    return token < s.past ? a.past_k.at(s.n, token, key_head) : a.k.at(s.begin + token - s.past, key_head);
  }
  __device__ T const* value(sequence_tokens const& s, int token, int value_head) const {
    return token < s.past ? a.past_v.at(s.n, token, value_head) : a.v.at(s.begin + token - s.past, value_head);
  }
  __device__ head_bias bias(sequence_tokens const& s, int head) const {
    return a.bias.given ? a.bias.of(head / a.gate_group, s.first) : head_bias{};
  }
  /// G of a token before `end`, else nothing.
  __device__ split_sum gate(head_bias const& g, int token, int end) const {
    return a.bias.given && token < end ? g.split(token) : split_sum(0.0);
  }
};

template <class Memory>
__device__ Memory& shared_memory() {
  extern __shared__ uint4 routed_shared[];
  return *reinterpret_cast<Memory*>(routed_shared);
}

/// Copies channels [from, from + columns) of `count` rows of `channels` numbers to shared memory, zero where there
/// are none. at(r): row r, or nullptr. finish_loads and a barrier come before the tile is read.
template <class T, class At>
__device__ void begin_rows(T* to, int ld, int count, int columns, int from, int channels, At const& at) {
  constexpr int w = vector_elements<T>;
  int const vectors = columns / w;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < count * vectors; i += int(blockDim.x)) {
    int const r = i / vectors, c = i % vectors * w, left = channels - from - c;
    T const* const row = at(r);
    T* const here = to + r * ld + c;
    if (row == nullptr || left <= 0) {
      *reinterpret_cast<uint4*>(here) = make_uint4(0, 0, 0, 0);
    } else if (left >= w && (reinterpret_cast<std::uintptr_t>(row + from + c) & 15U) == 0) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(cuda::detail::shared_address(here)), "l"(row + from + c)
                   : "memory");
    } else {
      for (int e = 0; e < w; ++e) here[e] = e < left ? row[from + c + e] : from_float<T>(0.0F);
    }
  }
}

/// Loads tiles of heads `Width` channels wide for one query head of one sequence, slice by slice of wider heads.
/// finish_loads and a barrier come before a tile is read.
template <class T, int Width>
struct head_loader {
  static constexpr int row = padded_row<T>(Width);
  problem<T> const& p;
  sequence_tokens const& s;
  int head;

  /// Slices of products of heads with this many channels.
  __device__ static int slices(int channels) {
    return may_be_sliced<T, Width> ? (channels + Width - 1) / Width : 1;
  }
  /// Rows of x [R,H,C]; row_of(i) is counted in the sequence, below 0: none.
  template <class RowOf>
  __device__ void rows(T* to, heads<T const> const& x, int count, int slice, int channels,
                       RowOf const& row_of) const {
    begin_rows(to, row, count, Width, slice * Width, channels, [&](int i) -> T const* {
      int const r = row_of(i);
      return r < 0 ? nullptr : x.at(s.begin + r, head);
    });
  }
  template <class RowOf>
  __device__ void queries(T* to, int count, int slice, RowOf const& row_of) const {
    rows(to, p.a.q, count, slice, p.a.key_dim, row_of);
  }
  /// Tokens [from, end), at most 64.
  __device__ void keys(T* to, int from, int end, int slice) const {
    begin_rows(to, row, tile, Width, slice * Width, p.a.key_dim,
               [&](int i) -> T const* { return from + i < end ? p.key(s, from + i, p.key_head(head)) : nullptr; });
  }
  __device__ void values(T* to, int from, int end, int slice) const {
    begin_rows(to, row, tile, Width, slice * Width, p.a.value_dim, [&](int i) -> T const* {
      return from + i < end ? p.value(s, from + i, p.value_head(head)) : nullptr;
    });
  }
};

/// The rows of one head of one sequence that a block works on, at most 64 of them.
struct row_block {
  sequence_tokens s;
  int head, first, end;  ///< none where end is not behind first

  template <class T>
  __device__ row_block(problem<T> const& p, row_tiles const& cut, index_t slot, int query_head) : head(query_head) {
    if (slot >= cut.count) {
      first = end = 0;
      return;
    }
    auto const place = cut.at(slot);
    s = p.tokens(place.sequence);
    first = int(place.first);
    end = first + tile < s.rows ? first + tile : s.rows;
  }
  __device__ bool empty() const { return end <= first; }
  __device__ int row(int i) const { return first + i < end ? first + i : -1; }
  /// Of the last row.
  __device__ int last_position() const { return s.past + end - 1; }
};

/// Writes a warp's 16 rows by way of shared memory: channels [from, from + 8 Columns) of rows that begin at
/// at(row), nullptr: nowhere.
template <class T, int Columns, class At>
__device__ void write_rows(fragment<Columns>& x, T* scratch, int ld, int from, int channels, At const& at) {
  constexpr int w = vector_elements<T>, vectors = 8 * Columns / w;
  __syncwarp();
  store_fragment(x, scratch, ld);
  __syncwarp();
#pragma unroll 1
  for (int i = int(threadIdx.x % warp); i < 16 * vectors; i += warp) {
    int const r = i / vectors, c = i % vectors * w, left = channels - from - c;
    T* const row = at(r);
    if (row == nullptr || left <= 0) continue;
    T const* const here = scratch + r * ld + c;
    if (left >= w && (reinterpret_cast<std::uintptr_t>(row + from + c) & 15U) == 0)
      *reinterpret_cast<uint4*>(row + from + c) = *reinterpret_cast<uint4 const*>(here);
    else
      for (int e = 0; e < w && e < left; ++e) row[from + c + e] = here[e];
  }
  __syncwarp();
}

/// scale q.k / temperature + G_i - G_j; the bits depend on query and key alone.
__device__ inline float score_of(float product, float scale, bool biased, split_sum const& query,
                                 split_sum const& key) {
  float const score = __fmul_rn(product, scale);
  return biased ? __fadd_rn(score, query - key) : score;
}

/// Sets `count` numbers to zero, in stream order.
template <class T>
void clear(device::cuda const& dev, T* data, index_t count) {
  if (dev.dry || count == 0) return;
  check(cudaMemsetAsync(data, 0, std::size_t(count) * sizeof(T), static_cast<cudaStream_t>(dev.stream)),
        "routed attention: zeros");
}

/// Checks sizes and numbers and says how kernels are to see them. Of a chunk that is longer than all tokens, as
/// much as there is counts.
template <class Which, class T>
problem<T> problem_of(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                      score_bias const& bias) {
  attention_problem<T> const a(dev, s, in, bias, false);
  index_t const longest = s.seq.longest() + in.past_k_nlhk.extent[1];
  index_t const chunk = s.select.chunk < longest ? s.select.chunk : longest > 0 ? longest : 1;
  index_t const window = s.select.window < longest ? s.select.window : longest;
  index_t const most_chunks = divided_up(longest, chunk);
  index_t const choices = choices_per_query(Which::spec, s.select);
  index_t const slots = choices < most_chunks ? choices : most_chunks > 0 ? most_chunks : 1;
  if (longest > 1 << 30 || s.seq.longest() * slots > 1 << 30 || choices > 1 << 30)
    throw value_error("seqmix: attention: on a device a sequence has at most 2^30 tokens, and at most 2^30 choices "
                      "of chunks");
  return {a,
          s.seq.rows(),
          s.seq.is_batch() ? most_chunks + 1 : 0,
          int(s.seq.count()),
          int(chunk),
          int(window),
          int(most_chunks),
          int(s.key_heads),
          int(s.value_heads),
          int(s.gate_heads),
          int(choices),
          int(slots),
          always_seen_by<Which>(),
          Which::spec.own_competes};
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
