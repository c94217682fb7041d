#pragma once

#include <seqmix/kernels/cuda/recurrence_forward.cuh>

/// The backward of the chunkwise recurrences on a device: through the outputs of each chunk, states backwards from
/// chunk to chunk, then through what each chunk writes, its system, its queries and keys. The derivative of a decay
/// is a sum over what crosses its token; nothing cancels, so it is 0 where the factor is. Heads that share an input
/// have sums of their own, added in their order.
namespace seqmix::inline v0::kernels::cuda::chunks {

/// Where derivatives of rows go: to the rows themselves, or of heads that share them to float sums [R,H,C].
template <class T>
struct row_target {
  heads<T> to;
  float* per_head = nullptr;
  int heads_count = 1, channels = 1;

  /// A pair of neighbours of which `valid` exist.
  __device__ void put(index_t r, int head, int c, float a, float b, int valid) const {
    if (per_head)
      store_pair(per_head + (r * heads_count + head) * channels + c, a, b, valid);
    else if (to.data)
      store_pair(to.at(r, head) + c, a, b, valid);
  }
  __device__ void put(index_t r, int head, int c, float x) const {
    if (per_head)
      per_head[(r * heads_count + head) * channels + c] = x;
    else if (to.data)
      to.at(r, head)[c] = from_float<T>(x);
  }
  /// One channel of a strip's first `left` tokens.
  __device__ void put_lane(index_t r, int head, int c, float const (&x)[strip], int left) const {
    auto const same = [](float value, int) { return value; };
    if (per_head)
      store_lane(x, per_head + (r * heads_count + head) * channels + c, index_t(heads_count) * channels, left,
                 same);
    else if (to.data)
      store_lane(x, to.at(r, head) + c, to.row, left, same);
  }
};
/// Adds the heads that share rows: to [R,Hx,C] from [R,H,C].
template <class T>
__global__ void __launch_bounds__(256)
    add_heads(float const* per_head, heads<T> to, int shared_heads, int group, int channels, index_t count) {
  index_t const i = index_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  index_t const c = i % channels, h = i / channels % shared_heads, r = i / channels / shared_heads;
  float sum = 0.0F;
  for (int g = 0; g < group; ++g) sum += per_head[((r * shared_heads + h) * group + g) * channels + c];
  to.at(r, h)[c] = from_float<T>(sum);
}
/// Adds up numbers of chunks and heads [slots,H,C] to one of each shared head and channel: grid of these.
__device__ inline void add_chunks(double const* parts, index_t slots, int heads_count, int group, int channels,
                                  int head, int c, float* to) {
  constexpr int count = 256;
  __shared__ double sums[count];
  double sum = 0.0;
  for (index_t i = threadIdx.x; i < slots * group; i += count)
    sum += parts[(i / group * heads_count + head * group + i % group) * channels + c];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = count / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *to = float(sums[0]);
}
template <int Threads>
__global__ void __launch_bounds__(Threads)
    add_constants(double const* parts, index_t slots, int heads_count, int group, int channels, heads<float> to) {
  static_assert(Threads == 256);
  int const head = int(blockIdx.x) / channels, c = int(blockIdx.x) % channels;
  add_chunks(parts, slots, heads_count, group, channels, head, c, to.at(0, head) + c);
}

/// Derivatives of decays on their way; all of them may be wanted or not.
struct decay_target {
  row_target<float> tokens;    ///< of log-decays of tokens
  double* constant = nullptr;  ///< [slots,H,C]: of constant ones
  double* rate = nullptr;      ///< [slots,H,K]
  float* crossing = nullptr;   ///< [R,H]: one decay per head, what crosses a token within its chunk
  bool wanted = false;
};

inline constexpr int crossing_row = chunk + 1, crossing_bytes = chunk * crossing_row * int(sizeof(float));
/// Sums of the x_ij with j < t <= i; x [64, crossing_row] in shared memory is used up. put(t, sum)
template <class F>
__device__ void sum_crossing(float* x, F const& put) {
  int const t = int(threadIdx.x);
  __syncthreads();
  if (t < chunk) {
    float sum = 0.0F;
    for (int j = 0; j <= t; ++j) {
      float const here = x[t * crossing_row + j];
      x[t * crossing_row + j] = sum;
      sum += here;
    }
  }
  __syncthreads();
  if (t < chunk) {
    float sum = 0.0F;
    for (int i = t; i < chunk; ++i) sum += x[i * crossing_row + t];
    put(t, sum);
  }
}

/// What is made on the way back.
template <class T>
struct pulled_back {
  T* z = nullptr;             ///< [R,H,V]: the delta rule's, in the place of u
  T* d_z = nullptr;           ///< [R,H,V]: what reaches z; of the system later what reaches its right side
  T* d_read = nullptr;        ///< [slots,H,64,64]: of the products of queries and keys (per head: times decays)
  T* d_erased = nullptr;      ///< the same of keys and keys
  float* states = nullptr;    ///< [slots,H,K,V]: of the states behind the chunks
  float* strength = nullptr;  ///< [R,H]: what has reached beta
};

/// From the outputs to what was written and to the weights in them; z of the delta rule again.
template <class T, bool Delta, bool PerChannel>
__global__ void __launch_bounds__(threads, PerChannel ? 3 : 2)
    pull_back_outputs(problem<T> p, T const* read, written_rows<T> z, heads<T const> w, float const* states,
                      heads<T const> d_o, pulled_back<T> out, decay_target d_decay) {
  using enum layout;
  using memory = read_memory<T>;
  constexpr int ld = row<T>;
  extern __shared__ uint4 shared[];
  __shared__ head_decays decays;
  T *const left = reinterpret_cast<T*>(shared), *const right = left + memory::right,
           *const weights = left + memory::weights;
  static_assert(crossing_bytes <= memory::weights * int(sizeof(T)));
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = causal_rows::strip_index() * strip;
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  causal_rows x, d;
  d.fill(0.0F);
  if constexpr (PerChannel) {
    begin_tile<width>(weights, chunk, read + p.pair(slot, head), chunk, chunk, chunk);
  } else {
    decays.load(p, at, head);
    x.fill(0.0F);
    multiply_queries(x, left, right, p, at, head);
    x.each([&](float& value, int i, int j) { value = j <= i ? p.scale * value * decays.between(i, j) : 0.0F; });
    x.each_pair_of([&](float& a, float& b, int i, int j) { store_pair(weights + i * ld + j, a, b, 2); });
  }
  for (int v0 = 0; v0 < p.value_dim; v0 += width) {
    int const rest = p.value_dim - v0;
    fragment<8> sum;
    if constexpr (Delta) {
      sum.fill(0.0F);
      for (int k0 = 0; k0 < p.key_dim; k0 += width) {
        begin_tile<width>(left, chunk, w.at(at.begin, head) + k0, w.row, at.count, p.key_dim - k0);
        begin_numbers<width>(right, chunk, states + p.state(slot, head) + index_t(k0) * p.value_dim + v0,
                             p.value_dim, p.key_dim - k0, rest);
        arrive();
        multiply_add<row_major, row_major>(sum, left + first * ld, ld, right, ld, depth_of(p.key_dim, k0));
        __syncthreads();
      }
      each_pair(sum, [&](float& a, float& b, int r, int c) {
        int const i = first + r;
        T* const own = out.z + p.token(at.begin + i, head) * p.value_dim + v0 + c;
        float2 const u = load_pair(own, i < at.count ? rest - c : 0);
        a = u.x - a, b = u.y - b;
        if (i < at.count) store_pair(own, a, b, rest - c);
        store_pair(right + i * ld + c, a, b, 2);
      });
    } else {
      begin_tile<width>(right, chunk, z.values.at(at.begin, head / z.group) + v0, z.values.row, at.count, rest);
    }
    begin_tile<width>(left, chunk, d_o.at(at.begin, head) + v0, d_o.row, at.count, rest);
    arrive();
    if constexpr (!Delta) scale_written(right, z, at, head / p.gate_group);
    d.multiply(left, right, ld, depth_of(p.value_dim, v0));
    sum.fill(0.0F);
    multiply_add<column_major, row_major>(sum, weights + first * ld + first, ld, left + first * ld, ld,
                                          chunk - first);
    each_pair(sum, [&](float& a, float& b, int r, int c) {
      if (first + r < at.count)
        store_pair(out.d_z + p.token(at.begin + first + r, head) * p.value_dim + v0 + c, a, b, rest - c);
    });
    __syncthreads();
  }
  T* const to = out.d_read + p.pair(slot, head);
  if constexpr (PerChannel) {
    d.each_pair_of([&](float& a, float& b, int i, int j) {
      store_pair(to + i * chunk + j, j <= i ? p.scale * a : 0.0F, j < i ? p.scale * b : 0.0F, 2);
    });
  } else {
    d.each_pair_of([&](float& a, float& b, int i, int j) {
      store_pair(to + i * chunk + j, j <= i ? p.scale * a * decays.between(i, j) : 0.0F,
                 j < i ? p.scale * b * decays.between(i, j + 1) : 0.0F, 2);
    });
    if (!d_decay.wanted) return;
    float* const products = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          products[(first + fragment<1>::row(e)) * crossing_row + 32 * half + fragment<1>::column(n, e)] =
              x.part[half].x[n][e] * d.part[half].x[n][e];
    sum_crossing(products, [&](int t, float sum) {
      if (t < at.count) d_decay.crossing[p.token(at.begin + t, head)] = sum;
    });
  }
}

/// Additive states: what reaches values and write scales, from the outputs of the chunk and the state behind it.
template <class T>
__global__ void __launch_bounds__(threads, 4)
    pull_back_values(problem<T> p, decayed_rows<T> rows, pulled_back<T> made, row_target<T> d_v,
                     row_target<float> d_write) {
  using enum layout;
  constexpr int ld = row<T>;
  extern __shared__ uint4 shared[];
  T *const left = reinterpret_cast<T*>(shared), *const right = left + tile<T>;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = causal_rows::strip_index() * strip;
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  float by[2], scale[2], sum[2] = {0.0F, 0.0F};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    bool const is_row = i < at.count;
    by[half] = is_row ? rows.key_factor(p.token(at.begin + i, head)) : 0.0F;
    scale[half] = is_row ? p.write_scale(at.begin + i, head) : 0.0F;
  }
  for (int v0 = 0; v0 < p.value_dim; v0 += width) {
    int const rest = p.value_dim - v0;
    fragment<8> x;
    x.fill(0.0F);
    for (int k0 = 0; k0 < p.key_dim; k0 += width) {
      if (p.key_dim > width || v0 == 0)
        begin_tile<width>(left, chunk, rows.k.at(at.begin, head / rows.key_group) + k0, rows.k.row, at.count,
                          p.key_dim - k0);
      begin_numbers<width>(right, chunk, made.states + p.state(slot, head) + index_t(k0) * p.value_dim + v0,
                           p.value_dim, p.key_dim - k0, rest);
      arrive();
      multiply_add<row_major, row_major>(x, left + first * ld, ld, right, ld, depth_of(p.key_dim, k0));
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const i = first + fragment<1>::row(2 * half), c = v0 + fragment<1>::column(n, 0);
        if (i >= at.count) continue;
        index_t const r = at.begin + i;
        float2 const own = load_pair(made.d_z + p.token(r, head) * p.value_dim + c, p.value_dim - c);
        float2 const v = load_pair(p.v.at(r, head / p.value_group) + c, p.value_dim - c);
        float const a = own.x + by[half] * x.x[n][2 * half], b = own.y + by[half] * x.x[n][2 * half + 1];
        sum[half] = fmaf(a, v.x, fmaf(b, v.y, sum[half]));
        d_v.put(r, head, c, scale[half] * a, scale[half] * b, p.value_dim - c);
      }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    float const d = row_sum(sum[half]);
    if (i < at.count && threadIdx.x % 4 == 0) d_write.put(at.begin + i, head, 0, d);
  }
}

/// The delta rule: from z through the triangular system of its chunk to values, write scales and the products of
/// keys, and most of what reaches beta.
template <class T, bool PerChannel>
__global__ void __launch_bounds__(threads, 3)
    pull_back_systems(problem<T> p, T const* inverse, T const* erased, pulled_back<T> made, row_target<T> d_v,
                      row_target<float> d_write, decay_target d_decay) {
  using enum layout;
  constexpr int ld = row<T>;
  extern __shared__ uint4 shared[];
  __shared__ head_decays decays;
  T *const left = reinterpret_cast<T*>(shared), *const right = left + tile<T>, *const t = right + tile<T>;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = causal_rows::strip_index() * strip;
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  if constexpr (!PerChannel) decays.load(p, at, head);
  begin_tile<width>(t, chunk, inverse + p.pair(slot, head), chunk, chunk, chunk);
  float beta[2], write[2], sum[2] = {0.0F, 0.0F};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    bool const is_row = i < at.count;
    beta[half] = is_row ? p.strength(at.begin + i, head) : 0.0F;
    write[half] = is_row ? p.write_scale(at.begin + i, head) : 0.0F;
  }
  causal_rows m;
  m.fill(0.0F);
  index_t const step = index_t(p.heads_count) * p.value_dim;
  for (int v0 = 0; v0 < p.value_dim; v0 += width) {
    int const rest = p.value_dim - v0;
    index_t const offset = p.token(at.begin, head) * p.value_dim + v0;
    begin_tile<width>(left, chunk, made.d_z + offset, step, at.count, rest);
    begin_tile<width>(right, chunk, made.z + offset, step, at.count, rest);
    arrive();
    fragment<8> x;
    x.fill(0.0F);
    multiply_add<column_major, row_major>(x, t + first * ld + first, ld, left + first * ld, ld, chunk - first);
    __syncthreads();
    store_fragment(x, left + first * ld, ld);
    __syncwarp();
    m.multiply(left, right, ld, depth_of(p.value_dim, v0));
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const i = first + fragment<1>::row(2 * half), c = fragment<1>::column(n, 0);
        if (i >= at.count) continue;
        float const a = x.x[n][2 * half], b = x.x[n][2 * half + 1], by = beta[half] * write[half];
        float2 const v = load_pair(p.v.at(at.begin + i, head / p.value_group) + v0 + c, rest - c);
        sum[half] = fmaf(a, v.x, fmaf(b, v.y, sum[half]));
        store_pair(made.d_z + offset + i * step + c, a, b, rest - c);
        d_v.put(at.begin + i, head, v0 + c, by * a, by * b, rest - c);
      }
    __syncthreads();
  }
  float* const products = reinterpret_cast<float*>(shared);
  float erasing[2] = {0.0F, 0.0F};
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const i = first + fragment<1>::row(2 * half), j = 32 * part + fragment<1>::column(n, 0);
        index_t const to = p.pair(slot, head) + i * chunk + j;
        float2 const weight = load_pair(erased + to, 2);
        float const a = j < i ? m.part[part].x[n][2 * half] : 0.0F,
                    b = j + 1 < i ? m.part[part].x[n][2 * half + 1] : 0.0F;
        erasing[half] = fmaf(a, weight.x, fmaf(b, weight.y, erasing[half]));
        float const by = -beta[half];
        if constexpr (PerChannel) {
          store_pair(made.d_erased + to, by * a, by * b, 2);
        } else {
          store_pair(made.d_erased + to, by * a * decays.between(i, j), by * b * decays.between(i, j + 1), 2);
          products[i * crossing_row + j] = by * a * weight.x;
          products[i * crossing_row + j + 1] = by * b * weight.y;
        }
      }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    float const d = row_sum(sum[half]), erased_sum = row_sum(erasing[half]);
    if (i < at.count && threadIdx.x % 4 == 0) {
      d_write.put(at.begin + i, head, 0, beta[half] * d);
      made.strength[p.token(at.begin + i, head)] = write[half] * d - erased_sum;
    }
  }
  if constexpr (!PerChannel)
    if (d_decay.wanted)
      sum_crossing(products, [&](int t0, float crossing) {
        if (t0 < at.count) d_decay.crossing[p.token(at.begin + t0, head)] += crossing;
      });
}

/// x = the sum over the values of `rows` times the rows of a state: a warp's tokens x `Columns` keys from k0 on.
template <int Columns, class T, class Scale>
__device__ void multiply_states(fragment<Columns / 8>& x, T* left, T* right, problem<T> const& p,
                                chunk_grid::place const& at, T const* rows, index_t row_stride, float const* state,
                                int k0, Scale const& scale_left) {
  using enum layout;
  constexpr int ld = row<T>;
  int const first = causal_rows::strip_index() * strip;
  x.fill(0.0F);
#pragma unroll 1
  for (int v0 = 0; v0 < p.value_dim; v0 += width) {
    int const rest = p.value_dim - v0;
    begin_tile<width>(left, chunk, rows + v0, again(row_stride), at.count, rest);
    begin_numbers<width>(right, Columns, state + index_t(k0) * p.value_dim + v0, p.value_dim, p.key_dim - k0, rest);
    arrive();
    scale_left();
    multiply_add<row_major, column_major>(x, left + first * ld, ld, right, ld, depth_of(p.value_dim, v0));
    __syncthreads();
  }
}

/// x times a number per row; returns for each of a lane's two rows the sum of its products with `other`.
template <class T>
__device__ void scale_rows(fragment<8>& x, float const (&by)[2], float (&sum)[2], heads<T const> const& other,
                           int head, chunk_grid::place const& at, int k0, int key_dim) {
  int const first = causal_rows::strip_index() * strip;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &a = x.x[n][2 * half], &b = x.x[n][2 * half + 1];
      a *= by[half], b *= by[half];
      int const i = first + fragment<1>::row(2 * half), c = k0 + fragment<1>::column(n, 0);
      if (i >= at.count) continue;
      float2 const y = load_pair(other.at(at.begin + i, head) + c, key_dim - c);
      sum[half] = fmaf(a, y.x, fmaf(b, y.y, sum[half]));
    }
}

/// What reaches queries, keys, beta and the decay under one decay per head.
template <class T, bool Delta>
__global__ void __launch_bounds__(threads, 2)
    pull_back_heads(problem<T> p, decayed_rows<T> rows, written_rows<T> z, float const* states, heads<T const> d_o,
                    pulled_back<T> made, row_target<T> d_q, row_target<T> d_k, row_target<float> d_beta,
                    decay_target d_decay) {
  using enum layout;
  constexpr int ld = row<T>;
  extern __shared__ uint4 shared[];
  __shared__ float read_sums[chunk], written_sums[chunk], of_warps[4];
  T *const left = reinterpret_cast<T*>(shared), *const right = left + tile<T>;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = causal_rows::strip_index() * strip;
  auto const at = p.grid.at(slot);
  if (at.count == 0) {
    if (d_decay.constant && threadIdx.x == 0) d_decay.constant[slot * p.heads_count + head] = 0.0;
    return;
  }
  int const query_head = head / p.query_group, key_head = head / p.key_group;
  float by_query[2], by_key[2], erasing[2], beta[2];
  float read[2] = {0.0F, 0.0F}, written[2] = {0.0F, 0.0F}, found[2] = {0.0F, 0.0F};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    bool const is_row = i < at.count;
    index_t const token = p.token(at.begin + i, head);
    by_query[half] = is_row ? rows.query_factor(token) : 0.0F;
    by_key[half] = is_row ? rows.key_factor(token) : 0.0F;
    erasing[half] = Delta && is_row ? -rows.start[token] : 0.0F;
    beta[half] = Delta && is_row ? p.strength(at.begin + i, head) : 0.0F;
  }
  float const *const before = states + p.state(slot, head), *const d_behind = made.states + p.state(slot, head);
  auto const begin_pairs = [&](T const* from) {
    begin_tile<width>(left, chunk, from + p.pair(slot, head), chunk, chunk, chunk);
  };
  auto const begin_rows = [&](heads<T const> const& x, int h, int k0) {
    begin_tile<width>(right, chunk, x.at(at.begin, h) + k0, x.row, at.count, p.key_dim - k0);
  };
  auto const no_scale = [] {};
  for (int k0 = 0; k0 < p.key_dim; k0 += width) {
    auto const put = [&](fragment<8>& x, row_target<T> const& to) {
      each_pair(x, [&](float& a, float& b, int r, int c) {
        if (first + r < at.count) to.put(at.begin + first + r, head, k0 + c, a, b, p.key_dim - k0 - c);
      });
    };
    fragment<8> x;
    multiply_states<width>(x, left, right, p, at, d_o.at(at.begin, head), d_o.row, before, k0, no_scale);
    scale_rows(x, by_query, read, p.q, query_head, at, k0, p.key_dim);
    begin_pairs(made.d_read);
    begin_rows(p.k, key_head, k0);
    arrive();
    multiply_add<row_major, row_major>(x, left + first * ld, ld, right, ld, first + strip);
    put(x, d_q);
    __syncthreads();

    multiply_states<width>(x, left, right, p, at, z.values.at(at.begin, head / z.group), z.values.row, d_behind, k0,
                           [&] { scale_written(left, z, at, head / p.gate_group); });
    scale_rows(x, by_key, written, p.k, key_head, at, k0, p.key_dim);
    if constexpr (Delta) {
      fragment<8> y;
      multiply_states<width>(y, left, right, p, at, made.d_z + p.token(at.begin, head) * p.value_dim,
                             index_t(p.heads_count) * p.value_dim, before, k0, no_scale);
      scale_rows(y, erasing, found, p.k, key_head, at, k0, p.key_dim);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x.x[n][e] = fmaf(beta[e / 2], y.x[n][e], x.x[n][e]);
    }
    begin_pairs(made.d_read);
    begin_rows(p.q, query_head, k0);
    arrive();
    multiply_add<column_major, row_major>(x, left + first * ld + first, ld, right + first * ld, ld, chunk - first);
    if constexpr (Delta) {
      __syncthreads();
      begin_pairs(made.d_erased);
      begin_rows(p.k, key_head, k0);
      arrive();
      multiply_add<row_major, row_major>(x, left + first * ld, ld, right, ld, first + strip);
      multiply_add<column_major, row_major>(x, left + first * ld + first, ld, right + first * ld, ld,
                                            chunk - first);
    }
    put(x, d_k);
    __syncthreads();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    float const d = row_sum(found[half]);
    float const all_read = row_sum(read[half]) + beta[half] * d, all_written = row_sum(written[half]);
    if (threadIdx.x % 4 != 0) continue;
    read_sums[i] = all_read, written_sums[i] = all_written;
    if (Delta && i < at.count) d_beta.put(at.begin + i, head, 0, made.strength[p.token(at.begin + i, head)] + d);
  }
  if (!d_decay.wanted) return;
  float sum = 0.0F;
  for (int i = int(threadIdx.x); i < p.key_dim * p.value_dim; i += threads) sum = fmaf(before[i], d_behind[i], sum);
  float const through = decayed(block_sum(sum, of_warps), rows.total[slot * p.heads_count + head]);
  __shared__ double of_tokens[chunk];
  if (int const t = int(threadIdx.x); t < chunk) {
    float d = through;
    for (int i = t; i < chunk; ++i) d += read_sums[i];
    for (int j = 0; j < t; ++j) d += written_sums[j];
    if (t < at.count) {
      d += d_decay.crossing[p.token(at.begin + t, head)];
      if (!d_decay.constant) d_decay.tokens.put(at.begin + t, head, 0, d);
    }
    of_tokens[t] = t < at.count ? double(d) : 0.0;
  }
  if (!d_decay.constant) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    double all = 0.0;
    for (int t = 0; t < at.count; ++t) all += of_tokens[t];
    d_decay.constant[slot * p.heads_count + head] = all;
  }
}

}  // namespace seqmix::inline v0::kernels::cuda::chunks
