#pragma once

#include <seqmix/kernels/cuda/scan_tiles.cuh>

/// The kernels of the affine scan, plain and fused with what surrounds Mamba-1's.
namespace seqmix::inline v0::kernels::cuda {

/// Everything the scan reads. Fused: heads are channels, V = 1, the decay step and the write scale come from
/// `delta`, rates from their logarithms, the output passes the skip and z.
template <class T>
struct scan_inputs {
  row_ranges rows;
  channel_cut cut;
  piece_cut piece;
  index_t K, query_heads, key_heads, value_heads, gate_heads;
  float scale;
  heads<T const> q, k, v;  ///< q and k without data: 1
  heads<float const> g;    ///< per head or per key, without data: 0
  bool per_key;
  table<float const> write, rate;  ///< without data: 1
  heads<T const> delta, z;         ///< fused, [R,1,D]
  float const *bias, *skip;        ///< fused, [D]
};

namespace detail {
__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }
__device__ inline float softplus(float x) { return x > 0.0F ? x + log1pf(expf(-x)) : log1pf(expf(x)); }
__device__ inline bool beyond_bound(float log_decay) { return log_decay < -128.0F; }
}  // namespace detail

/// A thread's two tokens of a block's channels.
template <bool Fused, int Channels, class T>
struct scan_tokens {
  index_t row[scan_items];
  bool here[scan_items];
  float v[Channels][scan_items], step[Channels][scan_items], write[Channels][scan_items];

  /// Tokens of a tile that starts `at` tokens into the sequence.
  __device__ void load(scan_inputs<T> const& x, channel_block const& b, index_t begin, index_t length, index_t at) {
#pragma unroll
    for (int i = 0; i < scan_items; ++i) {
      index_t const t = at + index_t(threadIdx.x) * scan_items + i;
      here[i] = t < length;
      row[i] = begin + t;
#pragma unroll
      for (int c = 0; c < Channels; ++c) {
        v[c][i] = step[c][i] = write[c][i] = 0.0F;
        if (here[i] && c < b.count) load_number(x, b, c, i);
      }
    }
  }
  /// The token of one row, by one thread.
  __device__ void load_one(scan_inputs<T> const& x, channel_block const& b, index_t r) {
    here[0] = true;
    row[0] = r;
    step[0][0] = 0.0F;
    load_number(x, b, 0, 0);
  }
  __device__ void load_number(scan_inputs<T> const& x, channel_block const& b, int c, int i) {
    index_t const h = b.head(x.cut, c);
    v[c][i] = to_float(x.v.at(row[i], h * x.value_heads / x.cut.heads)[b.channel(x.cut, c)]);
    if constexpr (Fused) {
      float const delta = detail::softplus(raw(x, row[i], h));
      step[c][i] = -delta;
      write[c][i] = delta;
    } else {
      index_t const gate = h * x.gate_heads / x.cut.heads;
      if (x.g.data && !x.per_key) step[c][i] = *x.g.at(row[i], gate);
      write[c][i] = x.write.data ? x.write(row[i], gate) : 1.0F;
    }
  }
  __device__ static float raw(scan_inputs<T> const& x, index_t row, index_t d) {
    return to_float(x.delta.at(row, 0)[d]) + (x.bias ? x.bias[d] : 0.0F);
  }
};

/// The rate of one channel and key.
template <bool Fused, class T>
__device__ float rate_of(scan_inputs<T> const& x, index_t h, index_t k) {
  index_t const gate = h * x.gate_heads / x.cut.heads;
  if constexpr (Fused) return expf(x.rate(gate, k));
  return x.rate.data ? x.rate(gate, k) : 1.0F;
}
/// The log-decay of a token before it is bounded: that is for products alone, as in the reference.
template <bool Fused, class T>
__device__ float log_decay_of(scan_inputs<T> const& x, index_t row, index_t h, index_t k, float step, float rate) {
  if constexpr (Fused) return step * rate;
  if (x.per_key) step = x.g.at(row, h * x.gate_heads / x.cut.heads)[k];
  return x.rate.data ? step * rate : step;
}
template <bool Fused, class T>
__device__ bool bounded(scan_inputs<T> const& x, float log_decay) {
  return (Fused || x.rate.data) && detail::beyond_bound(log_decay);
}
/// The number of head `h` of `count`, key k, of a token: 1 where there are none.
template <class T>
__device__ float key_number(heads<T const> const& x, index_t row, index_t head, index_t k) {
  return x.data ? to_float(x.at(row, head)[k]) : 1.0F;
}

/// Of each token of a tile its map S -> a S + b, for one channel and key.
template <bool Fused, int Channels, class T>
__device__ void maps_of_tokens(scan_inputs<T> const& x, scan_tokens<Fused, Channels, T> const& t, index_t h, int c,
                               index_t k, float rate, float const (&key)[scan_items], affine (&map)[scan_items]) {
#pragma unroll
  for (int i = 0; i < scan_items; ++i) {
    map[i] = {1.0F, 0.0F};
    if (!t.here[i]) continue;
    float const g = log_decay_of<Fused>(x, t.row[i], h, k, t.step[c][i], rate);
    map[i] = {expf(bounded<Fused>(x, g) ? -128.0F : g), t.write[c][i] * key[i] * t.v[c][i]};
  }
}

/// What is read, scaled; fused: with the skip, times silu(z).
template <bool Fused, class T>
__device__ float finished(scan_inputs<T> const& x, index_t row, index_t h, float v, float read) {
  float y = x.scale * read;
  if constexpr (Fused) {
    if (x.skip) y = fmaf(x.skip[h], v, y);
    if (x.z.data) {
      float const z = to_float(x.z.at(row, 0)[h]);
      y *= z * detail::sigmoid(z);
    }
  }
  return y;
}

/// Where a block is: sequence, piece, channels.
struct scan_place {
  index_t n, piece, block;
  __device__ scan_place(piece_cut const& pieces, index_t blocks_of_sequence) {
    block = blockIdx.x % blocks_of_sequence;
    piece = blockIdx.x / blocks_of_sequence % pieces.pieces;
    n = blockIdx.x / blocks_of_sequence / pieces.pieces;
  }
};

/// Position of a channel's key in [N,H,K,V].
__device__ inline index_t state_at(channel_cut const& c, channel_block const& b, index_t n, int i, index_t k,
                                   index_t K) {
  return ((n * c.heads + b.head(c, i)) * K + k) * c.width + b.channel(c, i);
}

/// The map of every piece, channel and key; of derivatives, walked backwards, where `Reverse`: out = a (x + c) a
/// token, with c = scale q d_o.
template <bool Reverse, bool Fused, int Channels, class T>
__global__ void __launch_bounds__(scan_threads, 2) reduce_pieces(scan_inputs<T> x, heads<T const> d_o, affine* carry) {
  struct compose_in_order {
    __device__ affine operator()(affine earlier, affine later) const {
      return Reverse ? compose{}(later, earlier) : compose{}(earlier, later);
    }
  };
  __shared__ typename affine_scan_of_block::TempStorage room[2];
  extern __shared__ float dynamic[];
  affine* const sum = reinterpret_cast<affine*>(dynamic);
  scan_place const place(x.piece, x.cut.blocks);
  channel_block const b(x.cut, place.block);
  index_t const begin = x.rows.begin(place.n), length = x.rows.length(place.n);
  for (index_t i = threadIdx.x; i < b.count * x.K; i += scan_threads) sum[i] = {1.0F, 0.0F};
  __syncthreads();
  int turn = 0;
  index_t const first = place.piece * x.piece.tiles, end = first + x.piece.tiles;
  for (index_t tile = first; tile < end && tile * scan_tile < length; ++tile) {
    scan_tokens<Fused, Channels, T> t;
    t.load(x, b, begin, length, tile * scan_tile);
    for (index_t k = 0; k < x.K; ++k) {
      float key[scan_items], query[scan_items];
#pragma unroll
      for (int i = 0; i < scan_items; ++i) {
        key[i] = t.here[i] ? key_number(x.k, t.row[i], b.head(x.cut, 0) * x.key_heads / x.cut.heads, k) : 0.0F;
        query[i] = t.here[i] ? key_number(x.q, t.row[i], b.head(x.cut, 0) * x.query_heads / x.cut.heads, k) : 0.0F;
      }
#pragma unroll
      for (int c = 0; c < Channels; ++c) {
        if (c >= b.count) break;
        index_t const h = b.head(x.cut, c);
        affine map[scan_items], all;
        maps_of_tokens<Fused>(x, t, h, c, k, rate_of<Fused>(x, h, k), key, map);
        if constexpr (Reverse)
#pragma unroll
          for (int i = 0; i < scan_items; ++i)
            if (t.here[i]) {
              float up = to_float(d_o.at(t.row[i], h)[b.channel(x.cut, c)]);
              if (Fused && x.z.data) {
                float const z = to_float(x.z.at(t.row[i], 0)[h]);
                up *= z * detail::sigmoid(z);
              }
              map[i].b = map[i].a * x.scale * query[i] * up;
            }
        affine_scan_of_block(room[turn]).InclusiveScan(map, map, compose_in_order{}, all);
        turn ^= 1;
        affine* const at = sum + c * x.K + k;
        if (threadIdx.x == 0) *at = compose_in_order{}(*at, all);
      }
    }
  }
  __syncthreads();
  index_t const states = x.cut.heads * x.cut.width * x.K;
  for (index_t i = threadIdx.x; i < b.count * x.K; i += scan_threads)
    carry[(place.n * x.piece.pieces + place.piece) * states + b.place(x.cut, int(i / x.K)) * x.K + i % x.K] =
        sum[i];
}

/// o, the state before every tile and the final state.
template <bool Fused, int Channels, class T>
__global__ void __launch_bounds__(scan_threads, 2) scan_forward(scan_inputs<T> x, heads<T> o, float const* initial,
                                                             affine const* carry, float* saved, float* final) {
  __shared__ typename affine_scan_of_block::TempStorage room[2];
  extern __shared__ float state[];  // [channel][K]
  scan_place const place(x.piece, x.cut.blocks);
  channel_block const b(x.cut, place.block);
  index_t const begin = x.rows.begin(place.n), length = x.rows.length(place.n), K = x.K;
  index_t const states = x.cut.heads * x.cut.width * K;
  for (index_t i = threadIdx.x; i < b.count * K; i += scan_threads) {
    int const c = int(i / K);
    index_t const k = i % K;
    state[i] = carry ? carry[(place.n * x.piece.pieces + place.piece) * states + b.place(x.cut, c) * K + k].b
                     : (initial ? initial[state_at(x.cut, b, place.n, c, k, K)] : 0.0F);
  }
  __syncthreads();
  int turn = 0;
  index_t const first = place.piece * x.piece.tiles, end = first + x.piece.tiles;
  for (index_t tile = first; tile < end && tile * scan_tile < length; ++tile) {
    if (saved) {
      float* const to = saved + (tiles_before(x.rows, place.n) + tile) * states;
      for (index_t i = threadIdx.x; i < b.count * K; i += scan_threads)
        to[b.place(x.cut, int(i / K)) * K + i % K] = state[i];
      __syncthreads();
    }
    scan_tokens<Fused, Channels, T> t;
    t.load(x, b, begin, length, tile * scan_tile);
    float sum[Channels][scan_items] = {};
    for (index_t k = 0; k < K; ++k) {
      float key[scan_items], query[scan_items];
#pragma unroll
      for (int i = 0; i < scan_items; ++i) {
        key[i] = t.here[i] ? key_number(x.k, t.row[i], b.head(x.cut, 0) * x.key_heads / x.cut.heads, k) : 0.0F;
        query[i] = t.here[i] ? key_number(x.q, t.row[i], b.head(x.cut, 0) * x.query_heads / x.cut.heads, k) : 0.0F;
      }
#pragma unroll
      for (int c = 0; c < Channels; ++c) {
        if (c >= b.count) break;
        index_t const h = b.head(x.cut, c);
        affine map[scan_items];
        maps_of_tokens<Fused>(x, t, h, c, k, rate_of<Fused>(x, h, k), key, map);
        running_state prefix{state + c * K + k};
        affine_scan_of_block(room[turn]).InclusiveScan(map, map, compose{}, prefix);
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < scan_items; ++i) sum[c][i] = fmaf(query[i], map[i].b, sum[c][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < scan_items; ++i)
#pragma unroll
      for (int c = 0; c < Channels; ++c)
        if (t.here[i] && c < b.count) {
          index_t const h = b.head(x.cut, c);
          o.at(t.row[i], h)[b.channel(x.cut, c)] =
              from_float<T>(finished<Fused>(x, t.row[i], h, t.v[c][i], sum[c][i]));
        }
    __syncthreads();  // the first warp's states, before others read them
  }
  bool const last = place.piece == x.piece.pieces - 1 || end * scan_tile >= length;
  bool const mine = first * scan_tile < length || (length == 0 && place.piece == 0);
  if (final && last && mine)
    for (index_t i = threadIdx.x; i < b.count * K; i += scan_threads)
      final[state_at(x.cut, b, place.n, int(i / K), i % K, K)] = state[i];
}

/// Where derivatives go. Sums over a block's channels or over tokens are partial: later kernels add them in order.
template <class T>
struct scan_outputs {
  heads<T> v, delta, z;         ///< v without data: to `v_part`
  float* v_part;                ///< [R, H V]
  float *q_part, *k_part;       ///< [R, blocks, K]
  float *g_part, *write_part;   ///< [R, slots (, K)], [R, slots]
  double *g_sum, *rate_sum;     ///< [N, H V, 1|K], [N, H V, K]
  double *bias_sum, *skip_sum;  ///< [N, D]
  float* initial;               ///< [N,H,K,V]
};

/// All derivatives, tile by tile from the last: states are computed again from the one saved before the tile, then
/// d_S_t = scale q_t d_o_t + a_{t+1} d_S_{t+1}.
template <bool Fused, int Channels, class T>
__global__ void __launch_bounds__(scan_threads, 2)
    scan_backward(scan_inputs<T> x, heads<T const> d_o, float const* saved, float const* d_final,
                  affine const* carry, scan_outputs<T> d) {
  using sum_of_block = cub::BlockReduce<double, scan_threads>;
  __shared__ typename affine_scan_of_block::TempStorage room[2];
  __shared__ typename sum_of_block::TempStorage sum_room;
  __shared__ affine turned[2][scan_tile];
  extern __shared__ double numbers[];  // sums [channel][2 K + 2], then floats [channel][K]
  index_t const K = x.K, per_channel = 2 * K + 2;
  scan_place const place(x.piece, x.cut.blocks);
  channel_block const b(x.cut, place.block);
  float* const up = reinterpret_cast<float*>(numbers + x.cut.per_block * per_channel);
  index_t const begin = x.rows.begin(place.n), length = x.rows.length(place.n);
  index_t const states = x.cut.heads * x.cut.width * K;
  for (index_t i = threadIdx.x; i < b.count * per_channel; i += scan_threads) numbers[i] = 0.0;
  for (index_t i = threadIdx.x; i < b.count * K; i += scan_threads) {
    int const c = int(i / K);
    index_t const k = i % K;
    up[i] = carry ? carry[(place.n * x.piece.pieces + place.piece) * states + b.place(x.cut, c) * K + k].b
                  : (d_final ? d_final[state_at(x.cut, b, place.n, c, k, K)] : 0.0F);
  }
  __syncthreads();
  auto const add_sum = [&](double value, double* to) {
    double const total = sum_of_block(sum_room).Sum(value);
    if (threadIdx.x == 0) *to += total;
    __syncthreads();
  };
  int turn = 0;
  index_t const first = place.piece * x.piece.tiles;
  index_t end = first + x.piece.tiles;
  if (end > divided_up(length, scan_tile)) end = divided_up(length, scan_tile);
  for (index_t tile = end; tile-- > first;) {
    float const* const before = saved + (tiles_before(x.rows, place.n) + tile) * states;
    scan_tokens<Fused, Channels, T> t;
    t.load(x, b, begin, length, tile * scan_tile);
    float g_out[Channels][scan_items], out[Channels][scan_items] = {}, dv[Channels][scan_items] = {},
                                       dg[Channels][scan_items] = {}, dw[Channels][scan_items] = {};
#pragma unroll
    for (int c = 0; c < Channels; ++c)
#pragma unroll
      for (int i = 0; i < scan_items; ++i) {
        g_out[c][i] = 0.0F;
        if (!t.here[i] || c >= b.count) continue;
        index_t const h = b.head(x.cut, c);
        g_out[c][i] = to_float(d_o.at(t.row[i], h)[b.channel(x.cut, c)]);
        if (Fused && x.z.data) {
          float const z = to_float(x.z.at(t.row[i], 0)[h]);
          g_out[c][i] *= z * detail::sigmoid(z);
        }
      }
    for (index_t k = 0; k < K; ++k) {
      float key[scan_items], query[scan_items], dq[scan_items] = {}, dk[scan_items] = {}, dg_key[scan_items] = {};
#pragma unroll
      for (int i = 0; i < scan_items; ++i) {
        key[i] = t.here[i] ? key_number(x.k, t.row[i], b.head(x.cut, 0) * x.key_heads / x.cut.heads, k) : 0.0F;
        query[i] = t.here[i] ? key_number(x.q, t.row[i], b.head(x.cut, 0) * x.query_heads / x.cut.heads, k) : 0.0F;
      }
#pragma unroll
      for (int c = 0; c < Channels; ++c) {
        if (c >= b.count) break;
        index_t const h = b.head(x.cut, c);
        float const rate = rate_of<Fused>(x, h, k);
        affine map[scan_items], past[scan_items], later[scan_items];
        maps_of_tokens<Fused>(x, t, h, c, k, rate, key, map);
        float start = before[b.place(x.cut, c) * K + k];
        struct given {
          float state;
          __device__ affine operator()(affine) { return {1.0F, state}; }
        } prefix{start};
        affine_scan_of_block(room[turn]).ExclusiveScan(map, past, compose{}, prefix);
        turn ^= 1;
        // Tokens in reverse: each meets the decay of the one behind it, the last one of the tile none.
        affine* const line = turned[turn];
#pragma unroll
        for (int i = 0; i < scan_items; ++i) {
          int const at = int(threadIdx.x) * scan_items + i;
          line[scan_tile - 1 - at].b = x.scale * query[i] * g_out[c][i];
          if (at > 0) line[scan_tile - at].a = map[i].a;
          if (at == scan_tile - 1) line[0].a = 1.0F;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < scan_items; ++i) later[i] = line[threadIdx.x * scan_items + i];
        given entering{up[c * K + k]};
        affine_scan_of_block(room[turn]).InclusiveScan(later, later, compose{}, entering);
        turn ^= 1;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < scan_items; ++i) line[threadIdx.x * scan_items + i] = later[i];
        __syncthreads();
        double rate_here = 0.0, constant_here = 0.0;
#pragma unroll
        for (int i = 0; i < scan_items; ++i) {
          int const at = int(threadIdx.x) * scan_items + i;
          float const dS = line[scan_tile - 1 - at].b, S0 = past[i].b, S = fmaf(map[i].a, S0, map[i].b);
          if (at == 0) up[c * K + k] = map[i].a * dS;
          if (!t.here[i]) continue;
          out[c][i] = fmaf(query[i], S, out[c][i]);
          dq[i] = fmaf(x.scale * g_out[c][i], S, dq[i]);
          dk[i] = fmaf(dS * t.write[c][i], t.v[c][i], dk[i]);
          dv[c][i] = fmaf(dS * t.write[c][i], key[i], dv[c][i]);
          dw[c][i] = fmaf(dS * key[i], t.v[c][i], dw[c][i]);
          float const log_decay = log_decay_of<Fused>(x, t.row[i], h, k, t.step[c][i], rate);
          float const dG = bounded<Fused>(x, log_decay) ? 0.0F : dS * map[i].a * S0;
          float const step =
              Fused || !x.per_key ? t.step[c][i] : x.g.at(t.row[i], h * x.gate_heads / x.cut.heads)[k];
          rate_here += double(dG) * double(step);
          if (x.per_key && !Fused) {
            constant_here += double(dG);
            if (x.cut.width == 1 && d.g_part)
              d.g_part[(t.row[i] * x.cut.slots() + b.slot(x.cut, c)) * K + k] = dG;
            else
              dg_key[i] += dG;
          } else {
            dg[c][i] = fmaf(dG, rate, dg[c][i]);
          }
        }
        if (d.rate_sum) add_sum(Fused ? rate_here * double(rate) : rate_here, numbers + c * per_channel + k);
        if (d.g_sum && x.per_key) add_sum(constant_here, numbers + c * per_channel + K + k);
      }
#pragma unroll
      for (int i = 0; i < scan_items; ++i)
        if (t.here[i]) {
          index_t const at = (t.row[i] * x.cut.blocks + place.block) * K + k;
          if (d.q_part) d.q_part[at] = dq[i];
          if (d.k_part) d.k_part[at] = dk[i];
          if (d.g_part && x.per_key && x.cut.width > 1)
            d.g_part[(t.row[i] * x.cut.slots() + b.slot(x.cut, 0)) * K + k] = dg_key[i];
        }
    }
    float block_dg[scan_items] = {}, block_dw[scan_items] = {};
#pragma unroll
    for (int c = 0; c < Channels; ++c) {
      if (c >= b.count) break;
      index_t const h = b.head(x.cut, c);
      double bias_here = 0.0, skip_here = 0.0, constant_here = 0.0;
#pragma unroll
      for (int i = 0; i < scan_items; ++i) {
        if (!t.here[i]) continue;
        constant_here += double(dg[c][i]);
        if constexpr (Fused) {
          float const raw = scan_tokens<Fused, Channels, T>::raw(x, t.row[i], h);
          float const d_raw = (dw[c][i] - dg[c][i]) * detail::sigmoid(raw);
          bias_here += double(d_raw);
          d.delta.at(t.row[i], 0)[h] = from_float<T>(d_raw);
          float total = x.scale * out[c][i];
          if (x.skip) {
            total = fmaf(x.skip[h], t.v[c][i], total);
            dv[c][i] = fmaf(x.skip[h], g_out[c][i], dv[c][i]);
            skip_here += double(g_out[c][i]) * double(t.v[c][i]);
          }
          if (x.z.data) {
            float const z = to_float(x.z.at(t.row[i], 0)[h]), s = detail::sigmoid(z);
            float const dy = to_float(d_o.at(t.row[i], h)[0]);
            d.z.at(t.row[i], 0)[h] = from_float<T>(dy * total * s * fmaf(z, 1.0F - s, 1.0F));
          }
        } else if (x.cut.width == 1) {
          index_t const at = t.row[i] * x.cut.slots() + b.slot(x.cut, c);
          if (d.g_part && !x.per_key) d.g_part[at] = dg[c][i];
          if (d.write_part) d.write_part[at] = dw[c][i];
        } else {
          block_dg[i] += dg[c][i];
          block_dw[i] += dw[c][i];
        }
        if (d.v_part)
          d.v_part[t.row[i] * x.cut.heads * x.cut.width + b.place(x.cut, c)] = dv[c][i];
        else
          d.v.at(t.row[i], h)[b.channel(x.cut, c)] = from_float<T>(dv[c][i]);
      }
      if (d.bias_sum) add_sum(bias_here, numbers + c * per_channel + 2 * K);
      if (d.skip_sum) add_sum(skip_here, numbers + c * per_channel + 2 * K + 1);
      if (d.g_sum && !x.per_key) add_sum(constant_here, numbers + c * per_channel + K);
    }
    if (!Fused && x.cut.width > 1)
#pragma unroll
      for (int i = 0; i < scan_items; ++i)
        if (t.here[i]) {
          index_t const at = t.row[i] * x.cut.slots() + b.slot(x.cut, 0);
          if (d.g_part && !x.per_key) d.g_part[at] = block_dg[i];
          if (d.write_part) d.write_part[at] = block_dw[i];
        }
    __syncthreads();
  }
  // Each piece has its own sums, behind those of the sequences.
  index_t const channels = x.cut.heads * x.cut.width, unit = place.n * x.piece.pieces + place.piece;
  for (index_t i = threadIdx.x; i < b.count * K; i += scan_threads) {
    int const c = int(i / K);
    index_t const k = i % K, channel = unit * channels + b.place(x.cut, c);
    if (d.rate_sum) d.rate_sum[channel * K + k] = numbers[c * per_channel + k];
    if (d.g_sum && x.per_key) d.g_sum[channel * K + k] = numbers[c * per_channel + K + k];
    if (k == 0 && d.g_sum && !x.per_key) d.g_sum[channel] = numbers[c * per_channel + K];
    if (k == 0 && d.bias_sum) d.bias_sum[channel] = numbers[c * per_channel + 2 * K];
    if (k == 0 && d.skip_sum) d.skip_sum[channel] = numbers[c * per_channel + 2 * K + 1];
    if (d.initial && place.piece == 0) d.initial[state_at(x.cut, b, place.n, c, k, K)] = up[i];
  }
}

/// Sequences of at most one token: one thread a channel walks its keys.
template <bool Fused, class T>
__global__ void scan_step(scan_inputs<T> x, heads<T> o, float const* initial, float* final, index_t count) {
  index_t const at = index_t(blockIdx.x) * blockDim.x + threadIdx.x, channels = x.cut.heads * x.cut.width;
  if (at >= count) return;
  index_t const n = at / channels, h = at % channels / x.cut.width, channel = at % x.cut.width, K = x.K;
  channel_cut const alone{x.cut.heads, x.cut.width, 1, channels, x.cut.width};
  channel_block const b(alone, h * x.cut.width + channel);
  scan_tokens<Fused, 1, T> t;
  bool const here = x.rows.length(n) > 0;
  if (here) t.load_one(x, b, x.rows.begin(n));
  float sum = 0.0F;
  for (index_t k = 0; k < K; ++k) {
    index_t const place = ((n * x.cut.heads + h) * K + k) * x.cut.width + channel;
    float state = initial ? initial[place] : 0.0F;
    if (here) {
      index_t const r = t.row[0];
      float const rate = rate_of<Fused>(x, h, k), g = log_decay_of<Fused>(x, r, h, k, t.step[0][0], rate);
      float const key = key_number(x.k, r, h * x.key_heads / x.cut.heads, k);
      state = fmaf(expf(bounded<Fused>(x, g) ? -128.0F : g), state, t.write[0][0] * key * t.v[0][0]);
      sum = fmaf(key_number(x.q, r, h * x.query_heads / x.cut.heads, k), state, sum);
    }
    if (final) final[place] = state;
  }
  if (here) o.at(t.row[0], h)[channel] = from_float<T>(finished<Fused>(x, t.row[0], h, t.v[0][0], sum));
}

}  // namespace seqmix::inline v0::kernels::cuda
