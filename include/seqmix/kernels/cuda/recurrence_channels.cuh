#pragma once

#include <seqmix/kernels/cuda/recurrence_backward.cuh>

/// The last step of the backward where every key channel has a decay of its own: queries, keys, beta and decays.
/// Lanes are channels, as in recurrence_weights.cuh.
namespace seqmix::inline v0::kernels::cuda::chunks {

template <class T, bool Delta>
struct channel_pull_memory {
  static constexpr int read = 0, erased = tile<T>, left = (Delta ? 2 : 1) * tile<T>, right = left + tile<T>;
  static constexpr int later = left, earlier = left + lane_tile<T>;
  static constexpr int values_end = right + lanes * row<T>, lanes_end = earlier + lane_tile<T>;
  static constexpr int float_bytes = (values_end > lanes_end ? values_end : lanes_end) * int(sizeof(T));
  // In floats, the doubles first.
  static constexpr int of_strips = 0, exchange = 2 * 4 * lanes, decays = exchange + lane_tile<float>,
                       carries = decays + lane_decays::floats, through = carries + 3 * 4 * lanes,
                       tokens = through + lanes, strengths = tokens + chunk, betas = strengths + chunk,
                       floats = betas + chunk;
  static constexpr int bytes = float_bytes + floats * int(sizeof(float));
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int other = 1; other < warp; other *= 2) x += __shfl_xor_sync(~0U, x, other);
  return x;
}

/// A warp's tokens x 32 channels, from a fragment to the lanes by way of the warp's rows of `exchange`.
__device__ inline void to_lanes(float (&to)[strip], fragment<4>& x, float* exchange) {
  constexpr int ld = lane_row<float>;
  exchange += int(threadIdx.x) / warp * strip * ld;
  __syncwarp();
  store_fragment(x, exchange, ld);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < strip; ++t) to[t] = exchange[t * ld + int(threadIdx.x) % warp];
}

/// Derivatives of a strip's log-decays of one channel: terms that cross the tokens before theirs (later ones) or
/// behind (earlier ones).
struct lane_crossing {
  float d[strip];

  __device__ float add_later(float const (&x)[strip]) {
    float sum = 0.0F;
#pragma unroll
    for (int t = strip - 1; t >= 0; --t) d[t] += sum += x[t];
    return sum;
  }
  __device__ float add_earlier(float const (&x)[strip]) {
    float sum = 0.0F;
#pragma unroll
    for (int t = 0; t < strip; ++t) d[t] += sum, sum += x[t];
    return sum;
  }
};

/// d += what reaches rows y by way of rows that are y times decay(t) and `more`; x, what reaches those, becomes the
/// terms of the decay.
template <class Decay>
__device__ void pull_back_rows(float (&x)[strip], float (&d)[strip], float const (&y)[strip], float more,
                               Decay const& decay) {
#pragma unroll
  for (int t = 0; t < strip; ++t) {
    float const here = x[t] * (decay(t) * more);
    d[t] += here;
    x[t] = y[t] * here;
  }
}

/// Pairs of one strip: weights of queries and (Delta) of keys in shared memory, where the strip's own begin.
template <bool Delta, class T>
__device__ void pull_back_own(T const* d_read, T const* d_erased, lane_decays const& decays,
                              float const (&q)[strip], float const (&k)[strip], float (&d_q)[strip],
                              float (&d_k)[strip], lane_crossing& crossing) {
  constexpr int ld = row<T>;
#pragma unroll
  for (int j = 0; j < strip; ++j) {
    float terms[strip], decay = 1.0F, sum = 0.0F;
#pragma unroll
    for (int i = j; i < strip; ++i) {
      if (i == j || i % 8 == 0) __syncwarp();  // or more is read at once than there are registers
      if (i > j) decay = decayed(decay, decays.step(i));
      float const by_query = to_float(d_read[i * ld + j]), key = k[j] * decay;
      float all = by_query * q[i];
      d_q[i] = fmaf(by_query, key, d_q[i]);
      if constexpr (Delta)
        if (i > j) {
          float const by_key = to_float(d_erased[i * ld + j]);
          all = fmaf(by_key, k[i], all);
          d_k[i] = fmaf(by_key, key, d_k[i]);
        }
      sum = fmaf(all, decay, sum);
      terms[i] = all * key;
    }
    d_k[j] += sum;
    sum = 0.0F;
#pragma unroll
    for (int i = strip - 1; i > j; --i) crossing.d[i] += sum += terms[i];
  }
}

/// One block per chunk and head.
template <class T, bool Delta>
__global__ void __launch_bounds__(threads)
    pull_back_channels(problem<T> p, written_rows<T> z, float const* states, heads<T const> d_o,
                       pulled_back<T> made, row_target<T> d_q, row_target<T> d_k, row_target<float> d_beta,
                       decay_target d_decay) {
  using enum layout;
  using memory = channel_pull_memory<T, Delta>;
  constexpr int ld = row<T>, narrow = lane_row<T>;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  T *const weights = base + memory::read, *const erased = base + memory::erased, *const left = base + memory::left,
           *const right = base + memory::right, *const later = base + memory::later,
           *const earlier = base + memory::earlier;
  float* const floats = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + memory::float_bytes);
  double* const of_strips = reinterpret_cast<double*>(floats + memory::of_strips);
  float *const exchange = floats + memory::exchange, *const carries = floats + memory::carries,
               *const through = floats + memory::through, *const tokens = floats + memory::tokens,
               *const strengths = floats + memory::strengths, *const betas = floats + memory::betas;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), s = causal_rows::strip_index(), first = s * strip,
            lane = int(threadIdx.x) % warp;
  auto const at = p.grid.at(slot);
  bool const per_channel = p.decay_keys > 1;
  index_t const part = (slot * p.heads_count + head) * p.key_dim;
  if (at.count == 0) {
    if (d_decay.constant && !per_channel && threadIdx.x == 0) d_decay.constant[slot * p.heads_count + head] = 0.0;
    for (int c = int(threadIdx.x); c < p.key_dim; c += threads) {
      if (d_decay.constant && per_channel) d_decay.constant[part + c] = 0.0;
      if (d_decay.rate) d_decay.rate[part + c] = 0.0;
    }
    return;
  }
  if (int const t = first + lane; lane < strip) {
    tokens[t] = strengths[t] = 0.0F;
    if constexpr (Delta) betas[t] = t < at.count ? p.strength(at.begin + t, head) : 0.0F;
  }
  begin_tile<width>(weights, chunk, made.d_read + p.pair(slot, head), chunk, chunk, chunk);
  if constexpr (Delta) begin_tile<width>(erased, chunk, made.d_erased + p.pair(slot, head), chunk, chunk, chunk);
  float const *const before = states + p.state(slot, head), *const d_behind = made.states + p.state(slot, head);
  auto const no_scale = [] {};
#pragma unroll 1
  for (int c0 = 0; c0 < p.key_dim; c0 += lanes) {
    int const channel = c0 + lane;
    bool const is_channel = channel < p.key_dim;
    // The derivative of the whole chunk's decay, a few channels for each warp.
#pragma unroll 1
    for (int i = 0; d_decay.wanted && i < lanes / 4; ++i) {
      int const c = c0 + s * lanes / 4 + i;
      float sum = 0.0F;
      for (int v = lane; c < p.key_dim && v < p.value_dim; v += warp)
        sum = fmaf(before[index_t(c) * p.value_dim + v], d_behind[index_t(c) * p.value_dim + v], sum);
      sum = warp_sum(sum);
      if (lane == 0) through[s * lanes / 4 + i] = sum;
    }
    lane_decays decays(floats + memory::decays);
    float q[strip], k[strip], a[strip], of_q[strip], of_k[strip];
    load_log_decays(a, p, at, head, channel);
    decays.load(a);
    __syncthreads();
    decays.meet();
    load_lane(q, p.q, at, head / p.query_group, channel, p.key_dim);
    load_lane(k, p.k, at, head / p.key_group, channel, p.key_dim);
    lane_crossing crossing;
    auto const from = [&](int t) { return decays.from(t); };
    auto const to = [&](int t) { return decays.to(t); };
    fragment<4> x;

    // Through the states: what is read of the one before, what is written to the one behind.
    multiply_states<lanes>(x, left, right, p, at, d_o.at(at.begin, head), d_o.row, before, c0, no_scale);
    to_lanes(a, x, exchange);
#pragma unroll
    for (int t = 0; t < strip; ++t) of_q[t] = of_k[t] = crossing.d[t] = 0.0F;
    pull_back_rows(a, of_q, q, p.scale * decays.before, from);
    float read_total = crossing.add_later(a);
    multiply_states<lanes>(x, left, right, p, at, z.values.at(at.begin, head / z.group), z.values.row, d_behind, c0,
                           [&] { scale_written(left, z, at, head / p.gate_group); });
    to_lanes(a, x, exchange);
    pull_back_rows(a, of_k, k, decays.behind, to);
    float const written_total = crossing.add_earlier(a);
    if constexpr (Delta) {
      multiply_states<lanes>(x, left, right, p, at, made.d_z + p.token(at.begin, head) * p.value_dim,
                             index_t(p.heads_count) * p.value_dim, before, c0, no_scale);
      to_lanes(a, x, exchange);
#pragma unroll
      for (int t = 0; t < strip; ++t) {
        float const here = -a[t] * (decays.from(t) * decays.before), beta = betas[first + t];
        float const found = warp_sum(k[t] * here);
        if (lane == 0) strengths[first + t] += found;
        of_k[t] = fmaf(beta, here, of_k[t]);
        a[t] = beta * (k[t] * here);
      }
      read_total += crossing.add_later(a);
    }

    // Pairs of tokens of two strips.
    float far_total = 0.0F;
    auto const between_strips = [&](T const* d, float const(&y)[strip], float(&of_y)[strip]) {
      __syncthreads();
      decays.store_later(later, y);
      decays.store_earlier(earlier, k);
      __syncthreads();
      x.fill(0.0F);
      if (s % 2 == 1)
        multiply_add<row_major, row_major>(x, d + first * ld + first - strip, ld, earlier + near_row(s) * narrow,
                                           narrow, strip);
      else
        multiply_add<column_major, row_major>(x, d + (first + strip) * ld + first, ld, later + near_row(s) * narrow,
                                              narrow, strip);
      to_lanes(a, x, exchange);
      if (s % 2 == 1) {
        pull_back_rows(a, of_y, y, 1.0F, from);
        crossing.add_later(a);
      } else {
        pull_back_rows(a, of_k, k, 1.0F, to);
        crossing.add_earlier(a);
      }
      x.fill(0.0F);
      if (s >= 2)
        multiply_add<row_major, row_major>(x, d + first * ld, ld, earlier + 32 * narrow, narrow, 32);
      else
        multiply_add<column_major, row_major>(x, d + 32 * ld + first, ld, later + 32 * narrow, narrow, 32);
      to_lanes(a, x, exchange);
      if (s >= 2) {
        pull_back_rows(a, of_y, y, decays.previous, from);
        far_total += crossing.add_later(a);
      } else {
        pull_back_rows(a, of_k, k, decays.next, to);
        far_total += crossing.add_earlier(a);
      }
    };
    between_strips(weights, q, of_q);
    if constexpr (Delta) between_strips(erased, k, of_k);
    // What crosses the whole strip, or the whole chunk.
    carries[(0 + s) * lanes + lane] = read_total;
    carries[(4 + s) * lanes + lane] = written_total;
    carries[(8 + s) * lanes + lane] = far_total;
    __syncthreads();
    float carry = d_decay.wanted ? decayed(through[lane], decays.total) : 0.0F;
    for (int other = s + 1; other < 4; ++other) carry += carries[other * lanes + lane];
    for (int other = 0; other < s; ++other) carry += carries[(4 + other) * lanes + lane];
    if (s == 1) carry += carries[8 * lanes + lane];
    if (s == 2) carry += carries[11 * lanes + lane];
    pull_back_own<Delta>(weights + first * (ld + 1), erased + first * (ld + 1), decays, q, k, of_q, of_k, crossing);

    int const left_tokens = at.count - first;
    if (is_channel) {
      d_q.put_lane(at.begin + first, head, channel, of_q, left_tokens);
      d_k.put_lane(at.begin + first, head, channel, of_k, left_tokens);
    }
    if (!d_decay.wanted) {
      __syncthreads();
      continue;
    }
    float const rate = p.rate.data && is_channel ? p.rate(head / p.gate_group, channel) : 1.0F;
    double sum = 0.0;
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      a[t] = t < left_tokens && is_channel ? crossing.d[t] + carry : 0.0F;
      if (per_channel)
        sum += double(a[t]);
      else if (float const all = warp_sum(a[t] * rate); lane == 0)
        tokens[first + t] += all;
    }
    if (per_channel && !d_decay.constant && is_channel)
      d_decay.tokens.put_lane(at.begin + first, head, channel, a, left_tokens);
    if (p.rate.data) {
      index_t const step = again(p.g.row);
      float const* g = p.g.at(at.begin + first, head / p.gate_group);
#pragma unroll
      for (int t = 0; t < strip; ++t, g += step)
        if (t < left_tokens) sum += double(a[t]) * double(*g);
    }
    of_strips[s * lanes + lane] = sum;
    __syncthreads();
    double* const sums = per_channel ? d_decay.constant : d_decay.rate;
    if (sums && s == 0 && is_channel)
      sums[part + channel] =
          ((of_strips[lane] + of_strips[lanes + lane]) + of_strips[2 * lanes + lane]) + of_strips[3 * lanes + lane];
  }
  __syncthreads();
  if (int const t = int(threadIdx.x); t < at.count) {
    index_t const r = at.begin + t;
    if (Delta) d_beta.put(r, head, 0, made.strength[p.token(r, head)] + strengths[t]);
    if (d_decay.wanted && !per_channel && !d_decay.constant) d_decay.tokens.put(r, head, 0, tokens[t]);
  }
  if (d_decay.constant && d_decay.wanted && !per_channel && threadIdx.x == 0) {
    double all = 0.0;
    for (int t = 0; t < at.count; ++t) all += double(tokens[t]);
    d_decay.constant[slot * p.heads_count + head] = all;
  }
}

}  // namespace seqmix::inline v0::kernels::cuda::chunks
