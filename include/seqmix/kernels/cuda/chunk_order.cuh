#pragma once

#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include <seqmix/kernels/cuda/routed_tiles.cuh>

/// The queries of a head in the order of the chunks they chose: a counting sort. Within a chunk they stay in
/// ascending order, so that every later sum over them has one order.
namespace seqmix::inline v0::kernels::cuda::routed {

/// Up to 64 entries of the list of one chunk, `first` counted in the sequence.
struct list_tile {
  int sequence, chunk, first, count;
};

/// For every head: the entries row slots + slot of a sequence, chunk by chunk, how its chunks begin in them, and
/// the tiles that they make.
struct chunk_lists {
  int* entry = nullptr;       ///< [H, R slots]
  int* start = nullptr;       ///< [H, chunk places] first entry of a chunk, counted in the sequence
  list_tile* tile = nullptr;  ///< [H, tiles] where each sequence has more room than it needs: count 0
  index_t rows = 0, places = 0, tiles = 0;
  int slots = 1;

  __device__ int const* of(int head, sequence_tokens const& s) const {
    return entry + (head * rows + s.begin) * slots;
  }
  /// Tiles of sequence n begin here: full ones, and for each chunk one that may not be full.
  template <class T>
  __device__ index_t first_tile(problem<T> const& p, index_t n) const {
    return p.a.places.rows.begin(n) * slots / routed::tile + p.first_chunk(n);
  }
};

/// Parts of `length` rows of a sequence are counted apart. A sequence's counts [chunks, parts] begin at
/// begin(n) + first_chunk(n): `length` is at least the number of chunks, so that there is room.
struct order_parts {
  row_tiles cut;
  int* count;  ///< [H, room]
  index_t room;
  int* tile_start;  ///< [H, chunk places] first tile of a chunk, counted in the sequence

  template <class T>
  __device__ int* of(problem<T> const& p, int head, sequence_tokens const& s) const {
    return count + head * room + s.begin + p.first_chunk(s.n);
  }
};

/// The part of a sequence's rows that a block works on.
struct order_part {
  sequence_tokens s;
  int head, first, entries;  ///< row; entries from there on, none in an empty slot
  int step;                  ///< parts of the sequence: from one chunk's count to the next one's
  int* count;                ///< of chunk 0 in this part

  template <class T>
  __device__ order_part(problem<T> const& p, order_parts const& parts) : head(int(blockIdx.x / parts.cut.count)) {
    auto const place = parts.cut.at(blockIdx.x % parts.cut.count);
    s = p.tokens(place.sequence);
    first = int(place.first);
    int const size = int(parts.cut.size), left = s.rows - first;
    entries = left <= 0 ? 0 : (left < size ? left : size) * p.slots;
    step = (s.rows + size - 1) / size;
    count = parts.of(p, head, s) + first / size;
  }
  /// Chunk of entry i, below 0: none.
  template <class T>
  __device__ int chunk(problem<T> const& p, index_t const* choice, int i) const {
    return int(choice[p.at(s.begin + first + i / p.slots, head) * p.choices + i % p.slots]);
  }
};

/// How often each chunk was chosen in each part: one block per part and head.
template <class T>
__global__ void __launch_bounds__(256) count_choices(problem<T> p, index_t const* choice, order_parts parts) {
  order_part const part(p, parts);
  if (part.entries == 0) return;
  for (int c = int(threadIdx.x); c < p.chunks(part.s); c += 256) part.count[index_t(c) * part.step] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = int(threadIdx.x); i < part.entries; i += 256) {
    int const c = part.chunk(p, choice, i);
    if (c >= 0) atomicAdd(part.count + index_t(c) * part.step, 1);
  }
}

/// Counts to where each part writes its first entry of a chunk: one block per sequence and head.
template <int Threads, class T>
__global__ void __launch_bounds__(Threads) place_choices(problem<T> p, order_parts parts, chunk_lists to) {
  using scan = cub::BlockScan<int, Threads, cub::BLOCK_SCAN_WARP_SCANS>;
  constexpr int items = 4;
  __shared__ typename scan::TempStorage memory;
  auto const s = p.tokens(blockIdx.x % p.sequences);
  int const head = int(blockIdx.x / p.sequences), chunks = p.chunks(s);
  int const step = (s.rows + int(parts.cut.size) - 1) / int(parts.cut.size);
  int* const count = parts.of(p, head, s);
  int* const start = to.start + head * to.places + p.first_chunk(s.n);
  int* const tiles = parts.tile_start + head * to.places + p.first_chunk(s.n);
  // of(i) is number i of n; put(i, the sum of those before it).
  auto const sums = [&](int n, auto const& of, auto const& put) {
    int before = 0;
    for (int t0 = 0; t0 < n; t0 += Threads * items) {
      int const mine = t0 + int(threadIdx.x) * items;
      int x[items], total;
#pragma unroll
      for (int i = 0; i < items; ++i) x[i] = mine + i < n ? of(mine + i) : 0;
      scan(memory).ExclusiveSum(x, x, total);
#pragma unroll
      for (int i = 0; i < items; ++i)
        if (mine + i < n) put(mine + i, before + x[i]);
      before += total;
      __syncthreads();
    }
    return before;
  };
  int const entries = sums(
      chunks * step, [&](int i) { return count[i]; }, [&](int i, int sum) { count[i] = sum; });
  for (int c = int(threadIdx.x); c < chunks; c += Threads) start[c] = step > 0 ? count[c * step] : 0;
  if (threadIdx.x == 0) start[chunks] = entries;
  __syncthreads();
  int const all = sums(
      chunks, [&](int c) { return (start[c + 1] - start[c] + tile - 1) / tile; },
      [&](int c, int sum) { tiles[c] = sum; });
  index_t const first = to.first_tile(p, s.n);
  int const room = int(to.first_tile(p, s.n + 1) - first);
  for (int t = int(threadIdx.x); t < room; t += Threads) {
    list_tile x{s.n, 0, 0, 0};
    if (t < all) {
      x.chunk = int(holder(chunks, t, [&](index_t c) { return index_t(tiles[c]); }));
      x.first = start[x.chunk] + (t - tiles[x.chunk]) * tile;
      int const left = start[x.chunk + 1] - x.first;
      x.count = left < tile ? left : tile;
    }
    to.tile[head * to.tiles + first + t] = x;
  }
}

/// Entries to their places, one block per part and head: tiles of entries are sorted by chunk, each stably, and
/// appended to what their chunks have.
template <int Threads, class T>
__global__ void __launch_bounds__(Threads)
    order_choices(problem<T> p, index_t const* choice, order_parts parts, chunk_lists to, int key_bits) {
  constexpr int items = 4, size = Threads * items;
  using sort = cub::BlockRadixSort<unsigned, Threads, items, int>;
  using scan = cub::BlockScan<int, Threads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ union {
    typename sort::TempStorage sort;
    typename scan::TempStorage scan;
  } memory;
  __shared__ unsigned sorted[size];
  order_part const part(p, parts);
  int* const list = to.entry + (part.head * to.rows + part.s.begin) * to.slots;
  unsigned const none = (1U << key_bits) - 1;
  int const mine = int(threadIdx.x) * items;
  for (int t0 = 0; t0 < part.entries; t0 += size) {
    unsigned chunk[items];
    int entry[items], first[items];
#pragma unroll
    for (int i = 0; i < items; ++i) {
      int const e = t0 + mine + i, c = e < part.entries ? part.chunk(p, choice, e) : -1;
      chunk[i] = c < 0 ? none : unsigned(c);
      entry[i] = part.first * p.slots + e;
    }
    sort(memory.sort).Sort(chunk, entry, 0, key_bits);
#pragma unroll
    for (int i = 0; i < items; ++i) sorted[mine + i] = chunk[i];
    __syncthreads();
    // The first entry of each one's chunk in this tile.
#pragma unroll
    for (int i = 0; i < items; ++i) first[i] = mine + i > 0 && sorted[mine + i - 1] != chunk[i] ? mine + i : 0;
    scan(memory.scan).InclusiveScan(first, first, [](int a, int b) { return a > b ? a : b; });
#pragma unroll
    for (int i = 0; i < items; ++i)
      if (chunk[i] != none) list[part.count[index_t(chunk[i]) * part.step] + mine + i - first[i]] = entry[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < items; ++i)
      if (chunk[i] != none && (mine + i + 1 == size || sorted[mine + i + 1] != chunk[i]))
        part.count[index_t(chunk[i]) * part.step] += mine + i + 1 - first[i];
    __syncthreads();
  }
}

/// Takes the memory of the lists, about 4 (2 + slots) H R bytes of `ws`, and launches what makes them.
template <class T>
chunk_lists order_by_chunk(device::cuda const& dev, attention_shape const& s, problem<T> const& p,
                           index_t const* choice, arena& ws) {
  constexpr int scan_threads = 256, sort_threads = 128;
  chunk_lists lists;
  lists.rows = p.rows;
  lists.places = p.chunk_places();
  lists.slots = p.slots;
  lists.tiles = p.rows * p.slots / tile + p.chunk_places();
  lists.entry = ws.take<int>(p.a.heads_count * p.rows * p.slots);
  lists.start = ws.take<int>(p.a.heads_count * lists.places);
  lists.tile = ws.take<list_tile>(p.a.heads_count * lists.tiles);
  index_t const room = p.rows + lists.places;
  int* const count = ws.take<int>(p.a.heads_count * room);
  order_parts const parts{row_tiles(dev, s.seq, (std::max)(p.most_chunks, 1024)), count, room,
                          ws.take<int>(p.a.heads_count * lists.places)};
  int key_bits = 1;
  while ((index_t(1) << key_bits) <= p.most_chunks) ++key_bits;
  launch(dev, "routed attention: counts of choices", &count_choices<T>, blocks(parts.cut.count * p.a.heads_count),
         256, 0, p, choice, parts);
  launch(dev, "routed attention: places of choices", &place_choices<scan_threads, T>,
         blocks(p.sequences * p.a.heads_count), scan_threads, 0, p, parts, lists);
  launch(dev, "routed attention: order of choices", &order_choices<sort_threads, T>,
         blocks(parts.cut.count * p.a.heads_count), sort_threads, 0, p, choice, parts, lists, key_bits);
  return lists;
}

}  // namespace seqmix::inline v0::kernels::cuda::routed
