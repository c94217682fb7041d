#pragma once

#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <numeric>

#include <seqmix/kernels/cuda/launch.cuh>
#include <seqmix/kernels/cuda/storage.cuh>

/// The affine recurrence S = a S + b over time, one number per channel and key, by cub::BlockScan.
///
/// A block walks one sequence in tiles of 256 tokens and holds a few neighbouring channels that read the same
/// queries and keys. A thread owns two neighbouring tokens and loads their channels at once (whole sectors, since
/// channels are neighbours in memory); a scan runs along the tokens for each channel and key, with the state so far
/// as its prefix. Keys are the outer loop, so what the channels of a block add to a token's query and key stays in
/// registers. Where there are few channels a sequence is cut into pieces: their carries first, then all pieces at
/// once.
namespace seqmix::inline v0::kernels::cuda {

inline constexpr int scan_threads = 128, scan_items = 2, scan_tile = scan_threads * scan_items;

/// The map S -> a S + b.
struct affine {
  float a, b;
};
struct compose {
  __device__ affine operator()(affine first, affine then) const {
    return {then.a * first.a, fmaf(then.a, first.b, then.b)};
  }
};
/// Hands the state so far to a tile, and keeps the one behind it.
struct running_state {
  float* state;
  __device__ affine operator()(affine tile) {
    float const before = *state;
    __syncwarp();
    if (threadIdx.x % warp == 0) *state = fmaf(tile.a, before, tile.b);
    return {1.0F, before};
  }
};
using affine_scan_of_block = cub::BlockScan<affine, scan_threads, cub::BLOCK_SCAN_WARP_SCANS>;

/// How channels fall into blocks: heads of one channel side by side, or slices of one head; all channels of a block
/// read the same query and key head.
struct channel_cut {
  index_t heads, width;       ///< H, V
  index_t per_block, blocks;  ///< channels a block holds at most, blocks of one sequence
  index_t slices;             ///< blocks a head is cut into, where heads are wider than one channel

  static channel_cut of(index_t heads, index_t width, index_t shared, index_t most) {
    channel_cut c{heads, width, 1, 0, 1};
    if (width == 1) {
      index_t const group = shared > 0 ? heads / shared : heads;
      // Without queries and keys a block may take any heads; else it must not leave a group.
      for (index_t n = (std::min)(most, group); n > 1 && c.per_block == 1; --n)
        if (shared == 0 || group % n == 0) c.per_block = n;
      c.blocks = divided_up(heads, c.per_block);
    } else {
      c.per_block = (std::min)(most, width);
      c.slices = divided_up(width, c.per_block);
      c.blocks = heads * c.slices;
    }
    return c;
  }
  /// Sums over a block's channels that belong to one head: [H] or [H, slices].
  __host__ __device__ index_t slots() const { return heads * slices; }
};

/// What a block of channels knows of itself.
struct channel_block {
  index_t block, first_head, first_channel, count;

  __device__ channel_block(channel_cut const& c, index_t at) : block(at) {
    if (c.width == 1) {
      first_head = at * c.per_block;
      first_channel = 0;
      count = c.heads - first_head < c.per_block ? c.heads - first_head : c.per_block;
    } else {
      first_head = at / c.slices;
      first_channel = at % c.slices * c.per_block;
      count = c.width - first_channel < c.per_block ? c.width - first_channel : c.per_block;
    }
  }
  __device__ index_t head(channel_cut const& c, int i) const { return c.width == 1 ? first_head + i : first_head; }
  __device__ index_t channel(channel_cut const& c, int i) const { return c.width == 1 ? 0 : first_channel + i; }
  /// The place of channel i among H V.
  __device__ index_t place(channel_cut const& c, int i) const { return head(c, i) * c.width + channel(c, i); }
  __device__ index_t slot(channel_cut const& c, int i) const { return c.width == 1 ? first_head + i : block; }
};

/// Tiles of all sequences before sequence n, without knowing the others' lengths: some numbers may stay unused.
__device__ inline index_t tiles_before(row_ranges const& rows, index_t n) { return rows.begin(n) / scan_tile + n; }
inline index_t tiles_at_most(sequences const& seq) { return seq.rows() / scan_tile + seq.count() + 1; }

/// How sequences are cut into pieces of whole tiles, so that few channels still fill a device. From shapes alone.
struct piece_cut {
  index_t tiles, pieces;

  static piece_cut of(sequences const& seq, index_t blocks) {
    constexpr index_t enough = 400;  // blocks that keep a large device busy
    index_t const all = divided_up(seq.longest(), scan_tile);
    index_t const wanted = (std::max)(index_t(1), enough / (std::max)(index_t(1), blocks * seq.count()));
    index_t const tiles = (std::max)(index_t(1), divided_up(all, wanted));
    return {tiles, (std::max)(index_t(1), divided_up(all, tiles))};
  }
};

/// The carries of pieces to what each begins with, in place: of [N, pieces, channels, K] maps, one thread a channel
/// and key; backwards where `Reverse`. `start` may be nullptr.
template <bool Reverse>
__global__ void chain_pieces(affine* carry, float const* start, index_t pieces, index_t states, index_t total,
                             index_t start_key_row, index_t K) {
  index_t const i = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= total) return;
  index_t const n = i / states, s = i % states, channel = s / K, k = s % K;
  // States lie as [N,H,K,V], carries as [channel][K] with channel = h V + v.
  index_t const V = start_key_row, at = n * states + channel / V * K * V + k * V + channel % V;
  float state = start ? start[at] : 0.0F;
  for (index_t p = 0; p < pieces; ++p) {
    affine* const map = carry + (n * pieces + (Reverse ? pieces - 1 - p : p)) * states + s;
    affine const m = *map;
    map->b = state;
    state = fmaf(m.a, state, m.b);
  }
}

/// to[r, g, c] = sum over the j-th of `group` neighbours from[r, g group + j, c], in order.
template <class T>
__global__ void add_neighbours(float const* from, heads<T> to, index_t rows, index_t groups, index_t group,
                               index_t columns) {
  index_t const i = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows * groups * columns) return;
  index_t const c = i % columns, g = i / columns % groups, r = i / columns / groups;
  float sum = 0.0F;
  for (index_t j = 0; j < group; ++j) sum += from[((r * groups + g) * group + j) * columns + c];
  to.at(r, g)[c] = from_float<T>(sum);
}

/// to[g, k] = sum over sequences, then the `group` neighbours, of from[n, g group + j, k]; added where `Add`.
template <bool Add>
__global__ void add_sequences(double const* from, float* to, index_t row, index_t column, index_t sequences_count,
                              index_t groups, index_t group, index_t columns) {
  index_t const i = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= groups * columns) return;
  index_t const g = i / columns, k = i % columns;
  double sum = 0.0;
  for (index_t j = 0; j < group; ++j)
    for (index_t n = 0; n < sequences_count; ++n) sum += from[(n * groups * group + g * group + j) * columns + k];
  float* const at = to + g * row + k * column;
  *at = float(sum) + (Add ? *at : 0.0F);
}

inline constexpr int plain_threads = 256;
inline dim3 plain_blocks(index_t count) { return blocks(divided_up(count, plain_threads)); }

}  // namespace seqmix::inline v0::kernels::cuda
