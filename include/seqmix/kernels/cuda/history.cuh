#pragma once

#include <seqmix/kernels/cuda/attention_tiles.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

/// The cache of past keys, values and log-decays on a device. A cache is changed in place without a second one:
/// what is moved goes towards the front, piece by piece, by blocks that share nothing.
namespace seqmix::inline v0::kernels {

namespace cuda::detail {

/// What happens to one sequence's cache: its slots [0, moved) are tokens shift .. past-1 of before, the slots
/// [moved, kept) the call's last rows. Where the cache cannot hold all tokens and must, it stays as it was.
struct cache_change {
  index_t past, rows, kept, shift, moved;
  bool overflows;

  __device__ cache_change(token_places const& places, index_t n, index_t capacity, bool windowed)
      : past(places.past(n)), rows(places.rows.length(n)), overflows(!windowed && past + rows > capacity) {
    index_t const all = overflows ? past : past + rows;
    kept = all < capacity ? all : capacity;
    shift = all - kept;
    moved = past > shift ? past - shift : 0;
    if (overflows) shift = 0, moved = kept;
  }
  __device__ index_t appended() const { return kept - moved; }
  /// The row of slot `slot` >= moved, counted in the sequence.
  __device__ index_t row_of(index_t slot) const { return rows - kept + slot; }
};

/// Keys, values or log-decays: [R,H,C], and [N,L,H,C] before and after; C numbers for each of H heads.
template <class T>
struct cached {
  heads<T const> now;
  past_heads<T const> before;
  past_heads<T> after;
  int channels, columns;

  cached(view3<T const> rows, view4<T const> past, view4<T> cache)
      : now(rows), before(past), after(cache), channels(int(cache.extent[3])),
        columns(cache.data ? int(cache.extent[2] * cache.extent[3]) : 0) {}
};
template <class T>
struct cached_tokens {
  cached<T> k, v;
  cached<float> g;
};

inline constexpr int moved_columns = 32, moved_threads = 256, moved_items = 16;

template <class T>
__device__ void move_columns(cached<T> const& x, cache_change const& change, index_t n, int first) {
  if (x.before.data == x.after.data && change.shift == 0) return;
  constexpr int slots = moved_threads / moved_columns;
  int const column = first + int(threadIdx.x) % moved_columns, h = column / x.channels, c = column % x.channels;
  for (index_t s0 = 0; s0 < change.moved; s0 += slots * moved_items) {
    index_t const mine = s0 + int(threadIdx.x) / moved_columns;
    T held[moved_items];
#pragma unroll
    for (int i = 0; i < moved_items; ++i)
      if (column < x.columns && mine + i * slots < change.moved)
        held[i] = x.before.at(n, mine + i * slots + change.shift, h)[c];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < moved_items; ++i)
      if (column < x.columns && mine + i * slots < change.moved) x.after.at(n, mine + i * slots, h)[c] = held[i];
  }
}

/// Past tokens to their new slots; in one and the same memory no token is overwritten before it has been read:
/// slots are read ahead of those that are written. Grid of sequences x groups of columns.
template <class T>
__global__ void __launch_bounds__(moved_threads)
    move_past(token_places places, cached_tokens<T> x, index_t capacity, bool windowed) {
  int const of_k = (x.k.columns + moved_columns - 1) / moved_columns;
  int const of_v = (x.v.columns + moved_columns - 1) / moved_columns;
  int const of_g = (x.g.columns + moved_columns - 1) / moved_columns;
  index_t const n = blockIdx.x / (of_k + of_v + of_g);
  int const group = int(blockIdx.x % (of_k + of_v + of_g));
  cache_change const change(places, n, capacity, windowed);
  if (group < of_k)
    move_columns(x.k, change, n, group * moved_columns);
  else if (group < of_k + of_v)
    move_columns(x.v, change, n, (group - of_k) * moved_columns);
  else
    move_columns(x.g, change, n, (group - of_k - of_v) * moved_columns);
}

/// f(slot, row in the sequence, head, channel) for what a tile of rows leaves in the cache.
template <class F>
__device__ void each_appended(cache_change const& change, index_t first, int size, int channels, int columns,
                              F const& f) {
  for (int i = int(threadIdx.x); i < size * columns; i += int(blockDim.x)) {
    index_t const row = first + i / columns, slot = row - change.row_of(0);
    if (row >= change.rows || slot < change.moved || slot >= change.kept) continue;
    f(slot, row, i % columns / channels, i % columns % channels);
  }
}

/// The call's own tokens: grid of tiles of rows.
template <class T>
__global__ void __launch_bounds__(256)
    append_rows(token_places places, row_tiles cut, cached_tokens<T> x, index_t capacity, bool windowed) {
  auto const place = cut.at(blockIdx.x);
  index_t const n = place.sequence, begin = cut.rows.begin(n);
  cache_change const change(places, n, capacity, windowed);
  if (change.overflows) return;
  auto const append = [&](auto const& y) {
    each_appended(
        change, place.first, int(cut.size), y.channels, y.columns,
        [&](index_t slot, index_t row, int h, int c) { y.after.at(n, slot, h)[c] = y.now.at(begin + row, h)[c]; });
  };
  append(x.k);
  append(x.v);
  append(x.g);
}

/// The new lengths, and NaN for the outputs of sequences whose tokens did not fit: grid of sequences. Runs after
/// everything that reads the lengths before, which may lie in the same memory.
template <class T>
__global__ void __launch_bounds__(128) finish_cache(token_places places, index_t capacity, bool windowed,
                                                    index_t* length, heads<T> o, int heads_count, int value_dim) {
  index_t const n = blockIdx.x;
  cache_change const change(places, n, capacity, windowed);
  __syncthreads();
  if (threadIdx.x == 0) length[n] = change.kept;
  if (!change.overflows || !o.data) return;
  index_t const row = index_t(heads_count) * value_dim;
  for (index_t i = threadIdx.x; i < change.rows * row; i += blockDim.x)
    o.at(places.rows.begin(n) + i / row, i % row / value_dim)[i % value_dim] = from_float<T>(NAN);
}

/// The derivative of a cache goes to the tokens that are in it, each of which is in one slot.
template <class T>
struct cached_gradient {
  past_heads<T const> d_cache;
  heads<T> now;
  past_heads<T> before;
  int channels, columns;

  cached_gradient(view4<T const> d, view3<T> rows, view4<T> past)
      : d_cache(d), now(rows), before(past), channels(int(d.extent[3])),
        columns(d.data ? int(d.extent[2] * d.extent[3]) : 0) {}
};
template <class T>
__device__ void add_to(T* to, T x) {
  *to = from_float<T>(to_float(*to) + to_float(x));
}

/// Grid of sequences x tiles of slots.
template <class T>
__global__ void __launch_bounds__(256)
    add_cache_gradient(token_places places, index_t capacity, bool windowed, index_t tiles, cached_gradient<T> k,
                       cached_gradient<T> v, cached_gradient<float> g) {
  index_t const n = blockIdx.x / tiles, first = blockIdx.x % tiles * 16;
  cache_change const change(places, n, capacity, windowed);
  auto const add = [&](auto const& y) {
    for (int i = int(threadIdx.x); i < 16 * y.columns; i += int(blockDim.x)) {
      index_t const slot = first + i / y.columns;
      int const h = i % y.columns / y.channels, c = i % y.columns % y.channels;
      if (slot >= change.kept) continue;
      auto const d = y.d_cache.at(n, slot, h)[c];
      if (slot >= change.moved) {
        if (y.now.data) add_to(y.now.at(places.rows.begin(n) + change.row_of(slot), h) + c, d);
      } else if (y.before.data) {
        add_to(y.before.at(n, slot + change.shift, h) + c, d);
      }
    }
  };
  add(k);
  add(v);
  add(g);
}

template <class T>
void validate_cache(attention_shape const& s, attention_input<T> const& in, view4<T const> const& k_nlhk,
                    view4<T const> const& v_nlhv, view4<float const> const& g_nlhk) {
  if (in.queries_alone)
    throw value_error("seqmix: history state: rows without keys of their own leave nothing to remember");
  index_t const N = s.seq.count(), capacity = k_nlhk.extent[1];
  expect_shape("history state, keys", k_nlhk, {N, capacity, s.key_heads, s.key_dim});
  expect_shape("history state, values", v_nlhv, {N, capacity, s.value_heads, s.value_dim});
  expect_contiguous("history state, keys", k_nlhk);
  expect_contiguous("history state, values", v_nlhv);
  if (!g_nlhk) return;
  expect_shape("history state, log-decays", g_nlhk, {N, capacity, s.gate_heads, in.g_rhk.extent[2]});
  expect_contiguous("history state, log-decays", g_nlhk);
}

}  // namespace cuda::detail

/// Every number that stays in its slot is left alone; a full window's cache is moved by one pass over it. No
/// scratch.
template <class T>
void cuda_history<T>::remember(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                               bool windowed, view4<T> k_nlhk, view4<T> v_nlhv, view4<number> g_nlhk,
                               index_t* length, view3<T> o_rhv) {
  namespace d = cuda::detail;
  d::validate_cache<T>(s, in, k_nlhk, v_nlhv, g_nlhk);
  if (dev.dry) return;
  cuda::token_places const places(dev, s, in);
  cuda::row_tiles const cut(dev, s.seq, 16);
  index_t const capacity = k_nlhk.extent[1], N = s.seq.count();
  d::cached_tokens<T> const x{
      {in.k_rhk, in.past_k_nlhk, k_nlhk}, {in.v_rhv, in.past_v_nlhv, v_nlhv}, {in.g_rhk, in.past_g_nlhk, g_nlhk}};
  auto const groups = [](int columns) { return cuda::divided_up(columns, d::moved_columns); };
  if (in.past_length && (windowed || in.past_k_nlhk.data != k_nlhk.data))
    cuda::launch(dev, "history: past tokens", &d::move_past<T>,
                 cuda::blocks(N * (groups(x.k.columns) + groups(x.v.columns) + groups(x.g.columns))),
                 d::moved_threads, 0, places, x, capacity, windowed);
  cuda::launch(dev, "history: new tokens", &d::append_rows<T>, cuda::blocks(cut.count), 256, 0, places, cut, x,
               capacity, windowed);
  cuda::launch(dev, "history: lengths", &d::finish_cache<T>, cuda::blocks(N), 128, 0, places, capacity, windowed,
               length, cuda::heads<T>(o_rhv), int(s.heads), int(s.value_dim));
}

/// One addition per number; no scratch.
template <class T>
void cuda_history<T>::add_remembered(device::cuda const& dev, attention_shape const& s,
                                     attention_input<T> const& in, bool windowed, view4<T const> d_k_nlhk,
                                     view4<T const> d_v_nlhv, view4<number const> d_g_nlhk,
                                     attention_gradient<T> const& d) {
  namespace k = cuda::detail;
  k::validate_cache<T>(s, in, d_k_nlhk, d_v_nlhv, d_g_nlhk);
  if (dev.dry) return;
  index_t const capacity = d_k_nlhk.extent[1], tiles = cuda::divided_up(capacity, 16);
  cuda::launch(dev, "history: derivatives", &k::add_cache_gradient<T>, cuda::blocks(s.seq.count() * tiles), 256, 0,
               cuda::token_places(dev, s, in), capacity, windowed, tiles,
               k::cached_gradient<T>(d_k_nlhk, d.k_rhk, d.past_k_nlhk),
               k::cached_gradient<T>(d_v_nlhv, d.v_rhv, d.past_v_nlhv),
               k::cached_gradient<float>(d_g_nlhk, d.g_rhk, d.past_g_nlhk));
}

}  // namespace seqmix::inline v0::kernels
