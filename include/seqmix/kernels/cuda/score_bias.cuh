#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <seqmix/kernels/attention_shape.hpp>
#include <seqmix/kernels/cuda/launch.cuh>
#include <seqmix/tensor/arena.hpp>

/// A gate per head as score bias on a device: the running log-decay G of every token, and its derivative. Gates are
/// read once by a scan over time; scores then take differences G_i - G_j.
namespace seqmix::inline v0::kernels::cuda {

/// A token's log-decay as part of a score bias is kept at or above this; its derivative is 0 where the bound acts,
/// NaN stays NaN.
inline constexpr float lowest_bias = -1e4F;
__device__ inline float bounded_bias(float g) { return g < lowest_bias ? lowest_bias : g; }

/// A running sum in two floats, so that tiles of differences need no double arithmetic. a - b is rounded like a
/// float, up to 2^-48 of a and b; it is 0 for equal sums and never has the wrong sign.
struct split_sum {
  float high, low;

  split_sum() = default;
  __device__ explicit split_sum(double x) : high(float(x)), low(float(x - double(high))) {}
};
__device__ inline float operator-(split_sum const& a, split_sum const& b) {
  return (a.high - b.high) + (a.low - b.low);
}

/// [N,L,H,C] in device code, channels contiguous: what is kept of the tokens before row 0 of each sequence.
template <class T>
struct past_heads {
  T* data = nullptr;
  index_t sequence = 0, token = 0, head = 0;

  past_heads() = default;
  template <class U>
  past_heads(view4<U> x_nlhc)
      : data(x_nlhc.data), sequence(x_nlhc.stride[0]), token(x_nlhc.stride[1]), head(x_nlhc.stride[2]) {}
  __device__ T* at(index_t n, index_t l, index_t h) const { return data + n * sequence + l * token + h * head; }
};

/// Where tokens are counted: sequence n's past tokens, then its rows, token t at begin(n) + n capacity + t of
/// `count` places. `length` [N] says how many past tokens there are, nullptr: none; `capacity` at most.
struct token_places {
  row_ranges rows;
  index_t const* length;
  index_t capacity, count;

  template <class T>
  token_places(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in)
      : rows(dev, s.seq), length(in.past_length), capacity(in.past_k_nlhk.extent[1]),
        count(s.seq.rows() + s.seq.count() * capacity) {}
  __device__ index_t past(index_t n) const { return length ? length[n] : 0; }
  __device__ index_t first(index_t n) const { return rows.begin(n) + n * capacity; }
};

/// G of one gate head and sequence: the log-decays of tokens 0 .. t (of tokens 1 .. t when constant).
struct head_bias {
  double const* sums = nullptr;
  double constant = 0.0;

  __device__ double at(index_t token) const { return sums ? sums[token] : constant * double(token); }
  __device__ split_sum split(index_t token) const { return split_sum(at(token)); }
};

/// The gate of an attention as kernels see it. The bias of key j for query i is split(i) - split(j).
struct score_bias {
  bool given = false;
  double const* sums = nullptr;  ///< [Hg, places]; nullptr: constant
  heads<float const> constant{};
  index_t places = 0;

  /// `first`: token_places::first of sequence n.
  __device__ head_bias of(index_t gate_head, index_t first) const {
    if (sums) return {sums + gate_head * places + first, 0.0};
    return {nullptr, given ? double(bounded_bias(*constant.at(0, gate_head))) : 0.0};
  }
};

/// Derivatives of the biases, summed per query head: over the keys of each row, over the queries of each token.
/// Whoever takes them writes all rows and all tokens that exist; past ones where d_past_g is asked for or the gate
/// is constant.
struct bias_sums {
  bool wanted = false;
  double* of_query = nullptr;  ///< [H,R]
  double* of_key = nullptr;    ///< [H, places]
  index_t rows = 0, places = 0;

  __device__ double& query(index_t head, index_t row) const { return of_query[head * rows + row]; }
  /// `first`: token_places::first of the token's sequence.
  __device__ double& key(index_t head, index_t first, index_t token) const {
    return of_key[head * places + first + token];
  }
};

namespace detail {

inline constexpr int scan_threads = 256, scan_items = 8;

/// Log-decays of the past and of the call's rows.
struct decay_tokens {
  heads<float const> now;
  past_heads<float const> before;

  __device__ float at(index_t n, index_t begin, index_t past, index_t token, index_t head) const {
    return token < past ? *before.at(n, token, head) : *now.at(begin + token - past, head);
  }
};

/// One block per (sequence, gate head). The sum of a token does not depend on those behind it.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    sum_decays(token_places places, decay_tokens g, int gate_heads, double* sums) {
  using scan = cub::BlockScan<double, Threads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename scan::TempStorage memory;
  index_t const n = blockIdx.x / gate_heads, h = blockIdx.x % gate_heads;
  index_t const begin = places.rows.begin(n), past = places.past(n), count = past + places.rows.length(n);
  double* const to = sums + h * places.count + places.first(n);
  double before = 0.0;
  for (index_t t0 = 0; t0 < count; t0 += Threads * scan_items) {
    index_t const mine = t0 + int(threadIdx.x) * scan_items;
    double x[scan_items], total;
#pragma unroll
    for (int i = 0; i < scan_items; ++i)
      x[i] = mine + i < count ? double(bounded_bias(g.at(n, begin, past, mine + i, h))) : 0.0;
    scan(memory).InclusiveSum(x, x, total);
#pragma unroll
    for (int i = 0; i < scan_items; ++i)
      if (mine + i < count) to[mine + i] = before + x[i];
    before += total;
    __syncthreads();
  }
}

/// The derivative of G_t of one sequence over the query heads that share a gate head, in their order.
struct shared_sums {
  double const *query, *key;  ///< of token 0 under the first of these heads
  index_t rows, places, past;
  int group;

  __device__ shared_sums(bias_sums const& sums, token_places const& at, index_t n, index_t first_head, int heads)
      : query(sums.of_query + first_head * sums.rows + at.rows.begin(n) - at.past(n)),
        key(sums.of_key + first_head * sums.places + at.first(n)), rows(sums.rows), places(sums.places),
        past(at.past(n)), group(heads) {}
  __device__ double at(index_t token) const {
    double sum = 0.0;
#pragma unroll 1
    for (int i = 0; i < group; ++i) {
      if (token >= past) sum += query[i * rows + token];
      sum -= key[i * places + token];
    }
    return sum;
  }
};

/// d_g_t = the sum of the derivatives of G_t, G_t+1, ...: the same scan from the end.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    sum_decay_gradients(token_places places, decay_tokens g, bias_sums sums, int gate_heads, int group,
                        heads<float> d_now, past_heads<float> d_before) {
  using scan = cub::BlockScan<double, Threads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename scan::TempStorage memory;
  index_t const n = blockIdx.x / gate_heads, h = blockIdx.x % gate_heads;
  index_t const begin = places.rows.begin(n), past = places.past(n), count = past + places.rows.length(n);
  index_t const least = d_before.data ? 0 : past;  // the first token that is asked for
  shared_sums const of(sums, places, n, h * group, group);
  double before = 0.0;
  for (index_t t0 = 0; t0 < count - least; t0 += Threads * scan_items) {
    index_t const mine = t0 + int(threadIdx.x) * scan_items;
    double x[scan_items], total;
#pragma unroll
    for (int i = 0; i < scan_items; ++i) x[i] = mine + i < count - least ? of.at(count - 1 - mine - i) : 0.0;
    scan(memory).InclusiveSum(x, x, total);
#pragma unroll
    for (int i = 0; i < scan_items; ++i) {
      index_t const token = count - 1 - mine - i;
      if (token < least) continue;
      float* const to = token >= past ? (d_now.data ? d_now.at(begin + token - past, h) : nullptr)
                                      : (d_before.data ? d_before.at(n, token, h) : nullptr);
      if (to) *to = g.at(n, begin, past, token, h) < lowest_bias ? 0.0F : float(before + x[i]);
    }
    before += total;
    __syncthreads();
  }
}

/// d_g of a constant gate: the sum of t times the derivative of G_t over all tokens. One block per gate head.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    sum_constant_gradient(token_places places, index_t sequences, heads<float const> g, bias_sums sums, int group,
                          heads<float> d_g) {
  using reduce = cub::BlockReduce<double, Threads>;
  __shared__ typename reduce::TempStorage memory;
  index_t const h = blockIdx.x;
  double sum = 0.0;
  for (index_t n = 0; n < sequences; ++n) {
    shared_sums const of(sums, places, n, h * group, group);
    index_t const count = of.past + places.rows.length(n);
#pragma unroll 1
    for (index_t token = threadIdx.x; token < count; token += Threads) sum += double(token) * of.at(token);
  }
  sum = reduce(memory).Sum(sum);
  if (threadIdx.x == 0) *d_g.at(0, h) = *g.at(0, h) < lowest_bias ? 0.0F : float(sum);
}

}  // namespace detail

/// Whether an input has a gate; true for the views of a dry run too, which have extents and no data.
template <class T>
bool has_gate(attention_input<T> const& in) {
  return in.g_rhk.extent[1] > 0;
}
template <class T>
bool has_constant_gate(attention_input<T> const& in) {
  return has_gate(in) && in.g_rhk.stride[0] == 0;
}

/// The running log-decays of all tokens, in double: 8 Hg (R + N capacity) bytes of `ws`, none for a constant gate.
/// One block per sequence and gate head; the same bits in a sequence and token by token.
template <class T>
score_bias running_decays(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                          arena& ws) {
  score_bias bias;
  if (!has_gate(in)) return bias;
  if (in.queries_alone)
    throw value_error("seqmix: attention: a gate biases scores by the tokens between query and key; rows without "
                      "keys of their own have none");
  token_places const places(dev, s, in);
  bias.given = true;
  bias.constant = in.g_rhk;
  bias.places = places.count;
  if (has_constant_gate(in)) return bias;
  if (!dev.dry && in.past_length && !in.past_g_nlhk)
    throw value_error("seqmix: attention: past keys under a gate need their log-decays past_g");
  double* const sums = ws.take<double>(s.gate_heads * places.count);
  bias.sums = sums;
  launch(dev, "attention: running log-decays", &detail::sum_decays<detail::scan_threads>,
         blocks(s.seq.count() * s.gate_heads), detail::scan_threads, 0, places,
         detail::decay_tokens{in.g_rhk, in.past_g_nlhk}, int(s.gate_heads), sums);
  return bias;
}

/// Room for the derivatives of the biases: 8 H (2 R + N capacity) bytes of `ws`, none without a gate.
template <class T>
bias_sums take_bias_sums(attention_shape const& s, attention_input<T> const& in, arena& ws) {
  bias_sums sums;
  if (!has_gate(in)) return sums;
  sums.wanted = true;
  sums.rows = s.seq.rows();
  sums.places = sums.rows + s.seq.count() * in.past_k_nlhk.extent[1];
  sums.of_query = ws.take<double>(s.heads * sums.rows);
  sums.of_key = ws.take<double>(s.heads * sums.places);
  return sums;
}

/// Writes d_g, and d_past_g where it is asked for, from the sums; those of shared gate heads are added in the order
/// of their query heads, in double. Deterministic.
template <class T>
void write_decay_gradient(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                          bias_sums const& sums, attention_gradient<T> const& d) {
  if (!sums.wanted || dev.dry) return;
  token_places const places(dev, s, in);
  int const group = int(s.heads / s.gate_heads);
  if (has_constant_gate(in)) {
    if (d.g_rhk)
      launch(dev, "attention: gradient of constant log-decays",
             &detail::sum_constant_gradient<detail::scan_threads>, blocks(s.gate_heads), detail::scan_threads, 0,
             places, s.seq.count(), heads<float const>(in.g_rhk), sums, group, heads<float>(d.g_rhk));
  } else if (d.g_rhk || d.past_g_nlhk) {
    launch(dev, "attention: gradient of log-decays", &detail::sum_decay_gradients<detail::scan_threads>,
           blocks(s.seq.count() * s.gate_heads), detail::scan_threads, 0, places,
           detail::decay_tokens{in.g_rhk, in.past_g_nlhk}, sums, int(s.gate_heads), group, heads<float>(d.g_rhk),
           past_heads<float>(d.past_g_nlhk));
  }
}

}  // namespace seqmix::inline v0::kernels::cuda
