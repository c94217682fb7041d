#pragma once

#include <seqmix/kernels/cuda/recurrence_chunks.cuh>

/// What is made of the chunks before any state is known, all chunks at once: weights between tokens where decays
/// are per channel, and for the delta rule the triangular system of a chunk. With A_ij = beta_i k_i.k_j (decayed),
/// j < i, and S the state before the chunk, what the chunk writes under its keys is
///   z = (I + A)^-1 (beta (write v) - beta (k e^G) S) = u - w S.
/// Source: Yang et al., arXiv 2406.06484, section 3, and with decays arXiv 2412.06464.
namespace seqmix::inline v0::kernels::cuda::chunks {

/// What those kernels make; nullptr: not wanted.
template <class T>
struct weighed_chunks {
  T *q = nullptr, *k = nullptr;  ///< [R,H,K] decayed from the chunk's start (and scaled), to its end
  float* total = nullptr;        ///< [slots,H,K]: decay_step of the chunk
  T* read = nullptr;             ///< [slots,H,64,64]: weights in what queries read
  T *u = nullptr, *w = nullptr;  ///< [R,H,V], [R,H,K]
  T* inverse = nullptr;          ///< [slots,H,64,64]: (I + A)^-1
  T* erased = nullptr;           ///< [slots,H,64,64]: A without beta
};

inline constexpr int system_row = padded_row<float>(chunk), system_tile = chunk * system_row;

/// a = (I + a)^-1 for a strictly lower triangular a with zeros above: strips by substitution, what lies between
/// them by products, all in float. `scratch`: 32 padded_row<float>(32) numbers. Between two barriers.
__device__ inline void invert(float* a, float* scratch) {
  using enum layout;
  constexpr int ld = system_row, scratch_row = padded_row<float>(32);
  int const s = int(threadIdx.x) / warp, lane = int(threadIdx.x) % warp, column = lane % strip;
  float* const own = a + s * strip * (ld + 1);
  float t[strip];
#pragma unroll
  for (int i = 0; i < strip; ++i) {
    float sum = i == column ? 1.0F : 0.0F;
#pragma unroll
    for (int j = 0; j < i; ++j) sum = fmaf(-own[i * ld + j], t[j], sum);
    t[i] = sum;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < strip; ++i)
    if (lane < strip) own[i * ld + column] = t[i];
  __syncthreads();
  // [[L, 0], [X, M]]^-1 = [[L^-1, 0], [-M^-1 X L^-1, M^-1]]: of 16 and 16 tokens, then of 32 and 32.
  if (s % 2 == 1) {
    float *const x = own - strip, *const product = scratch + (s / 2) * strip * scratch_row;
    fragment<2> c;
    c.fill(0.0F);
    multiply_add<row_major, row_major>(c, x, ld, x - strip * ld, ld, strip);
    store_fragment(c, product, scratch_row);
    __syncwarp();
    c.fill(0.0F);
    multiply_add<row_major, row_major>(c, own, ld, product, scratch_row, strip);
    c.each([&](float& value, int r, int k) { x[r * ld + k] = -value; });
  }
  __syncthreads();
  int const i = s / 2 * strip, j = s % 2 * strip;
  float* const below = a + 32 * ld;
  fragment<2> c;
  c.fill(0.0F);
  multiply_add<row_major, row_major>(c, below + i * ld, ld, a + j, ld, 32);
  store_fragment(c, scratch + i * scratch_row + j, scratch_row);
  __syncthreads();
  c.fill(0.0F);
  multiply_add<row_major, row_major>(c, below + i * ld + 32, ld, scratch + j, scratch_row, 32);
  c.each([&](float& value, int r, int k) { below[(i + r) * ld + j + k] = -value; });
  __syncthreads();
}

/// to = from with its columns times numbers, as T.
template <class T>
__device__ void scale_columns(T* to, float const* from, float const* factor) {
  for (int i = int(threadIdx.x); i < pairs; i += threads) {
    int const r = i / chunk, c = i % chunk;
    to[r * row<T> + c] = from_float<T>(from[r * system_row + c] * factor[c]);
  }
}
/// A tile of weights to device memory.
template <class T>
__device__ void store_pairs(T* to, T const* from) {
  constexpr int w = vector_elements<T>;
  for (int i = int(threadIdx.x); i < pairs / w; i += threads)
    *reinterpret_cast<uint4*>(to + i * w) =
        *reinterpret_cast<uint4 const*>(from + i / (chunk / w) * row<T> + i % (chunk / w) * w);
}

/// The strip's rows of a lower triangular t times a tile of `Columns` columns, written to rows of `to`.
template <int Columns, class T>
__device__ void multiply_triangle(T const* t, T const* right, T* to, index_t to_row, int count, int channels) {
  int const first = causal_rows::strip_index() * strip;
  fragment<Columns / 8> x;
  x.fill(0.0F);
  multiply_add<layout::row_major, layout::row_major>(x, t + first * row<T>, row<T>, right, padded_row<T>(Columns),
                                                     first + strip);
  each_pair(x, [&](float& a, float& b, int r, int c) {
    if (first + r < count) store_pair(to + (first + r) * to_row + c, a, b, channels - c);
  });
}

/// u from the inverse in `a`, and the inverse times beta and what else w takes (`columns`) to the tile t.
/// `columns`: [2][64], what the columns of u's and w's factor are multiplied by.
template <class T>
__device__ void solve_values(problem<T> const& p, chunk_grid::place const& at, index_t slot, int head, float* a,
                             T* t, T* right, float const* columns, weighed_chunks<T> const& out) {
  invert(a, reinterpret_cast<float*>(right));
  if (out.inverse)
    for (int i = int(threadIdx.x); i < pairs; i += threads)
      out.inverse[p.pair(slot, head) + i] = from_float<T>(a[i / chunk * system_row + i % chunk]);
  scale_columns(t, a, columns);
  index_t const to_row = index_t(p.heads_count) * p.value_dim;
  for (int s = 0; s < slices_of(p.value_dim); ++s) {
    int const left = p.value_dim - s * width;
    begin_tile<width>(right, chunk, p.v.at(at.begin, head / p.value_group) + s * width, p.v.row, at.count, left);
    arrive();
    multiply_triangle<width>(t, right, out.u + p.token(at.begin, head) * p.value_dim + s * width, to_row, at.count,
                             left);
    __syncthreads();
  }
  scale_columns(t, a, columns + chunk);
}

template <class T>
struct solve_memory {
  static constexpr int t = 0, right = tile<T>, system_bytes = 2 * tile<T> * int(sizeof(T));
  static constexpr int bytes = system_bytes + (system_tile + 2 * chunk) * int(sizeof(float));
};
/// The delta rule's system under one decay per head: one block per chunk and head.
template <class T>
__global__ void __launch_bounds__(threads, 4) solve_heads(problem<T> p, weighed_chunks<T> out) {
  using memory = solve_memory<T>;
  extern __shared__ uint4 shared[];
  __shared__ head_decays decays;
  T *const t = reinterpret_cast<T*>(shared), *const right = t + memory::right;
  float* const a = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + memory::system_bytes);
  float* const columns = a + system_tile;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), i = int(threadIdx.x);
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  T const* const k = p.k.at(at.begin, head / p.key_group);
  decays.load(p, at, head);
  if (i < chunk) {
    bool const is_row = i < at.count;
    float const beta = is_row ? p.strength(at.begin + i, head) : 0.0F;
    columns[i] = is_row ? beta * p.write_scale(at.begin + i, head) : 0.0F;
    columns[chunk + i] = beta * decays.from_start(i);
  }
  causal_rows x;
  x.fill(0.0F);
  for (int s = 0; s < slices_of(p.key_dim); ++s) {
    begin_tile<width>(t, chunk, k + s * width, p.k.row, at.count, p.key_dim - s * width);
    arrive();
    x.multiply(t, t, row<T>, depth_of(p.key_dim, s * width));
    __syncthreads();
  }
  if (out.erased) {
    T* const to = out.erased + p.pair(slot, head);
    x.each_pair_of([&](float& left, float& second, int r, int c) {
      store_pair(to + r * chunk + c, r > c ? left * decays.between(r, c) : 0.0F,
                 r > c + 1 ? second * decays.between(r, c + 1) : 0.0F, 2);
    });
  }
  x.each([&](float& value, int r, int c) {
    float const beta = r < at.count ? p.strength(at.begin + r, head) : 0.0F;
    a[r * system_row + c] = r > c ? beta * (value * decays.between(r, c)) : 0.0F;
  });
  __syncthreads();
  solve_values(p, at, slot, head, a, t, right, columns, out);
  index_t const to_row = index_t(p.heads_count) * p.key_dim;
  for (int s = 0; s < slices_of(p.key_dim); ++s) {
    int const left = p.key_dim - s * width;
    begin_tile<width>(right, chunk, k + s * width, p.k.row, at.count, left);
    arrive();
    multiply_triangle<width>(t, right, out.w + p.token(at.begin, head) * p.key_dim + s * width, to_row, at.count,
                             left);
    __syncthreads();
  }
}

// ---- decays per channel

/// Channels that decay on their own are worked on 32 at a time: a lane of a warp has one, for the tokens of the
/// warp's strip. Weights between tokens of one strip are summed pair by pair in float. Those between strips are
/// products of rows that are decayed to a token between them: of strips 0 and 1 (2 and 3) to where the later
/// begins, of 0 and 1 with 2 and 3 to the middle of the chunk.
inline constexpr int lanes = 32;
template <class T>
inline constexpr int lane_row = padded_row<T>(lanes);
template <class T>
inline constexpr int lane_tile = chunk* lane_row<T>;

/// Rows of the tiles of later and of earlier tokens where the strip's begin. Near: its neighbour's partner, far:
/// the other half of the chunk.
__device__ inline int near_row(int s) { return s / 2 * strip; }
__device__ inline int far_row(int s) { return 32 + s % 2 * strip; }

/// The log-decays of a strip's tokens in one channel.
template <class T>
__device__ void load_log_decays(float (&g)[strip], problem<T> const& p, chunk_grid::place const& at, int head,
                                int channel) {
  int const left = at.count - int(threadIdx.x) / warp * strip, hg = head / p.gate_group;
  bool const given = p.decay_keys > 0 && channel < p.key_dim;
  float const rate = p.rate.data && given ? p.rate(hg, channel) : 1.0F;
  float const* from = p.g.at(at.begin + at.count - left, hg) + (p.decay_keys == 1 ? 0 : channel);
  index_t const step = again(p.g.row);
#pragma unroll
  for (int t = 0; t < strip; ++t, from += step) {
    g[t] = given && t < left ? *from : 0.0F;
    if (p.rate.data) g[t] = p.bounded(g[t] * rate);
  }
}

/// A strip's decays of one channel; those of tokens in shared memory, where a lane reads what it wrote.
struct lane_decays {
  static constexpr int ld = lane_row<float>, floats = 3 * lane_tile<float> + 4 * lanes;
  float* memory;                         ///< [floats]
  float before, behind, previous, next;  ///< of the strips before and behind, or of the one that lies between
  float total;                           ///< decay_step of the whole chunk

  __device__ explicit lane_decays(float* shared) : memory(shared) {}
  __device__ float* own(int which, int t) const {
    return memory + which * lane_tile<float> + (int(threadIdx.x) / warp * strip + t) * ld + int(threadIdx.x) % warp;
  }
  /// decay_step of a token; from the start of the strip to behind it; from there to the end of the strip.
  __device__ float step(int t) const { return *own(0, t); }
  __device__ float from(int t) const { return *own(1, t); }
  __device__ float to(int t) const { return *own(2, t); }
  /// Steps of all tokens [64, ld].
  __device__ float const* steps() const { return memory; }
  __device__ float* totals() const { return memory + 3 * lane_tile<float>; }

  /// A barrier and `meet` come next.
  __device__ void load(float const (&g)[strip]) {
    float sum = 0.0F;
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      *own(0, t) = decay_step(g[t]);
      *own(1, t) = expf(sum += g[t]);
    }
    totals()[threadIdx.x] = sum;
    sum = 0.0F;
#pragma unroll
    for (int t = strip - 1; t >= 0; --t) {
      *own(2, t) = expf(sum);
      sum += g[t];
    }
  }
  __device__ void meet() {
    int const s = int(threadIdx.x) / warp, lane = int(threadIdx.x) % warp;
    float low = 0.0F, high = 0.0F, all = 0.0F;
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      float const sum = totals()[other * lanes + lane];
      if (other < s) low += sum;
      if (other > s) high += sum;
      all += sum;
    }
    before = expf(low), behind = expf(high), total = decay_step(all);
    previous = s == 3 ? expf(totals()[2 * lanes + lane]) : 1.0F;
    next = s == 0 ? expf(totals()[lanes + lane]) : 1.0F;
  }
  /// Rows x as the later ones of a product, decayed from where the earlier ones end.
  template <class T>
  __device__ void store_later(T* tile, float const (&x)[strip]) const {
    int const s = int(threadIdx.x) / warp, lane = int(threadIdx.x) % warp;
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      if (s % 2 == 1) tile[(near_row(s) + t) * lane_row<T> + lane] = from_float<T>(x[t] * from(t));
      if (s >= 2) tile[(far_row(s) + t) * lane_row<T> + lane] = from_float<T>(x[t] * (from(t) * previous));
    }
  }
  /// The same for earlier ones, decayed to where the later ones begin.
  template <class T>
  __device__ void store_earlier(T* tile, float const (&x)[strip]) const {
    int const s = int(threadIdx.x) / warp, lane = int(threadIdx.x) % warp;
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      if (s % 2 == 0) tile[(near_row(s) + t) * lane_row<T> + lane] = from_float<T>(x[t] * to(t));
      if (s < 2) tile[(far_row(s) + t) * lane_row<T> + lane] = from_float<T>(x[t] * (to(t) * next));
    }
  }
};

/// One channel of the rows of a strip, 0 where there is none.
template <class T>
__device__ void load_lane(float (&x)[strip], heads<T const> const& rows, chunk_grid::place const& at, int head,
                          int channel, int channels) {
  int const left = at.count - int(threadIdx.x) / warp * strip;
  T const* from = rows.at(at.begin + at.count - left, head) + channel;
  index_t const step = again(rows.row);
#pragma unroll
  for (int t = 0; t < strip; ++t, from += step) x[t] = t < left && channel < channels ? to_float(*from) : 0.0F;
}
/// And back; f(number) is what is written.
template <class T, class F>
__device__ void store_lane(float const (&x)[strip], T* to, index_t row_stride, int left, F const& f) {
  index_t const step = again(row_stride);
#pragma unroll
  for (int t = 0; t < strip; ++t, to += step)
    if (t < left) *to = from_float<T>(f(x[t], t));
}

/// A strip's rows of weights.
struct strip_weights {
  fragment<2> near;
  fragment<4> far;
  float own[strip];  ///< of an earlier token lane % 16, for half of the channels

  __device__ void fill() {
    near.fill(0.0F);
    far.fill(0.0F);
#pragma unroll
    for (int t = 0; t < strip; ++t) own[t] = 0.0F;
  }
  /// Adds what the tiles of later and earlier rows give.
  template <class T>
  __device__ void multiply(T const* later, T const* earlier) {
    using enum layout;
    constexpr int ld = lane_row<T>;
    int const s = int(threadIdx.x) / warp;
    if (s % 2 == 1)
      multiply_add<row_major, column_major>(near, later + near_row(s) * ld, ld, earlier + near_row(s) * ld, ld,
                                            lanes);
    if (s >= 2)
      multiply_add<row_major, column_major>(far, later + far_row(s) * ld, ld, earlier + 32 * ld, ld, lanes);
  }
  /// f(weight, token, earlier token) once for every pair but the zeros.
  template <class F>
  __device__ void each(F const& f) {
    int const s = int(threadIdx.x) / warp, lane = int(threadIdx.x) % warp, first = s * strip;
    if (s % 2 == 1) near.each([&](float& x, int r, int c) { f(x, first + r, first - strip + c); });
    if (s >= 2) far.each([&](float& x, int r, int c) { f(x, first + r, c); });
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      float x = own[t] + __shfl_xor_sync(~0U, own[t], 16);
      if (t >= lane) f(x, first + t, first + lane);
    }
  }
};

/// Adds the pairs of a strip: x from rows of `left`, y (where Both) from the keys themselves; a lane has one
/// earlier token and every other channel.
template <bool Both, class T>
__device__ void add_own(float (&x)[strip], float (&y)[strip], T const* left, T const* keys, float const* steps) {
  constexpr int ld = lane_row<T>, step_row = lane_row<float>;
  int const first = int(threadIdx.x) / warp * strip, lane = int(threadIdx.x) % warp, earlier = lane % strip;
  left += first * ld, keys += first * ld, steps += first * step_row;
#pragma unroll 1
  for (int c = lane / strip; c < lanes; c += 2) {
    float key = to_float(keys[earlier * ld + c]);
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      key = decayed(key, t > earlier ? steps[t * step_row + c] : 0.0F);
      x[t] = fmaf(to_float(left[t * ld + c]), key, x[t]);
      if constexpr (Both) y[t] = fmaf(to_float(keys[t * ld + c]), key, y[t]);
    }
  }
}

template <class T, bool Delta>
struct channel_memory {
  static constexpr int q = 0, k = lane_tile<T>, earlier = 2 * lane_tile<T>, later = 3 * lane_tile<T>;
  static constexpr int later_key = 4 * lane_tile<T>, tiles = (Delta ? 5 : 4) * lane_tile<T>;
  // Behind the last slice the same place has a tile of weights and one of values.
  static constexpr int right = tile<T>, both = tiles > 2 * tile<T> ? tiles : 2 * tile<T>;
  static constexpr int float_bytes = both * int(sizeof(T));
  static constexpr int decays = 0, columns = lane_decays::floats, system = columns + 2 * chunk,
                       floats = system + (Delta ? system_tile : 0);
  static constexpr int bytes = float_bytes + floats * int(sizeof(float));
};

/// Weights and decayed rows, and for the delta rule its system, where every key channel has a decay of its own: one
/// block per chunk and head.
template <class T, bool Delta>
__global__ void __launch_bounds__(threads, 3) weigh_channels(problem<T> p, weighed_chunks<T> out) {
  using memory = channel_memory<T, Delta>;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  T *const q = base + memory::q, *const k = base + memory::k, *const earlier = base + memory::earlier,
           *const later = base + memory::later, *const later_key = base + memory::later_key;
  float* const floats = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + memory::float_bytes);
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = int(threadIdx.x) / warp * strip,
            lane = int(threadIdx.x) % warp;
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  int const query_head = head / p.query_group, key_head = head / p.key_group;

  strip_weights read, erased;
  read.fill();
  if constexpr (Delta) erased.fill();
#pragma unroll 1
  for (int c0 = 0; c0 < p.key_dim; c0 += lanes) {
    int const channel = c0 + lane, left = p.key_dim - c0;
    begin_tile<lanes>(q, chunk, p.q.at(at.begin, query_head) + c0, p.q.row, at.count, left);
    begin_tile<lanes>(k, chunk, p.k.at(at.begin, key_head) + c0, p.k.row, at.count, left);
    lane_decays decays(floats + memory::decays);
    float x[strip], y[strip];
    load_log_decays(x, p, at, head, channel);
    decays.load(x);
    arrive();
    decays.meet();
#pragma unroll
    for (int t = 0; t < strip; ++t) {
      x[t] = to_float(q[(first + t) * lane_row<T> + lane]);
      y[t] = to_float(k[(first + t) * lane_row<T> + lane]);
    }
    decays.store_later(later, x);
    decays.store_earlier(earlier, y);
    if constexpr (Delta) decays.store_later(later_key, y);
    if (channel < p.key_dim) {
      index_t const step = index_t(p.heads_count) * p.key_dim;
      index_t const to = p.token(at.begin + first, head) * p.key_dim + channel;
      store_lane(x, out.q + to, step, at.count - first,
                 [&](float q_here, int t) { return p.scale * q_here * (decays.from(t) * decays.before); });
      store_lane(y, out.k + to, step, at.count - first,
                 [&](float k_here, int t) { return k_here * (decays.to(t) * decays.behind); });
      if (first == 0) out.total[(slot * p.heads_count + head) * p.key_dim + channel] = decays.total;
    }
    __syncthreads();
    read.multiply(later, earlier);
    if constexpr (Delta) erased.multiply(later_key, earlier);
    add_own<Delta>(read.own, erased.own, q, k, decays.steps());
    __syncthreads();
  }

  T* const weights = base;
  auto const clear = [&] {
    for (int i = int(threadIdx.x); i < tile<T>; i += threads) weights[i] = from_float<T>(0.0F);
    __syncthreads();
  };
  clear();
  read.each([&](float& x, int i, int j) { weights[i * row<T> + j] = from_float<T>(p.scale * x); });
  __syncthreads();
  store_pairs(out.read + p.pair(slot, head), weights);
  if constexpr (Delta) {
    float *const a = floats + memory::system, *const columns = floats + memory::columns;
    __syncthreads();
    for (int i = int(threadIdx.x); i < system_tile; i += threads) a[i] = 0.0F;
    if (int const i = int(threadIdx.x); i < chunk) {
      float const beta = i < at.count ? p.strength(at.begin + i, head) : 0.0F;
      columns[i] = i < at.count ? beta * p.write_scale(at.begin + i, head) : 0.0F;
      columns[chunk + i] = beta;
    }
    clear();
    erased.each([&](float& x, int i, int j) {
      if (i == j) return;
      weights[i * row<T> + j] = from_float<T>(x);
      a[i * system_row + j] = columns[chunk + i] * x;
    });
    __syncthreads();
    if (out.erased) store_pairs(out.erased + p.pair(slot, head), weights);
    __syncthreads();
    T *const t = base, *const right = base + memory::right;
    solve_values(p, at, slot, head, a, t, right, columns, out);
    index_t const to_row = index_t(p.heads_count) * p.key_dim;
    for (int c0 = 0; c0 < p.key_dim; c0 += lanes) {
      lane_decays decays(floats + memory::decays);
      float y[strip];
      load_log_decays(y, p, at, head, c0 + lane);
      decays.load(y);
      load_lane(y, p.k, at, key_head, c0 + lane, p.key_dim);
      __syncthreads();
      decays.meet();
#pragma unroll
      for (int i = 0; i < strip; ++i)
        right[(first + i) * lane_row<T> + lane] = from_float<T>(y[i] * (decays.from(i) * decays.before));
      __syncthreads();
      multiply_triangle<lanes>(t, right, out.w + p.token(at.begin, head) * p.key_dim + c0, to_row, at.count,
                               p.key_dim - c0);
      __syncthreads();
    }
  }
}

}  // namespace seqmix::inline v0::kernels::cuda::chunks
