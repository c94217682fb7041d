#pragma once

#include <seqmix/kernels/cuda/recurrence_weights.cuh>

/// The forward of the chunkwise recurrences on a device: states pass from chunk to chunk, one block per sequence,
/// head and 32 value channels; then all chunks are read at once,
///   S' = e^Gn S + (k e^(Gn - G))' z,   o = (scale q e^G) S + (scale q k' e^(G_i - G_j), j <= i) z,
/// where z is write v, or for the delta rule what recurrence_weights.cuh says. Sources: arXiv 2405.21060 section 6,
/// 2312.06635, 2406.06484, 2412.06464.
namespace seqmix::inline v0::kernels::cuda::chunks {

/// [N,H,K,V] in device code, value channels contiguous. No data: zero, or not wanted.
template <class F>
struct state_rows {
  F* data = nullptr;
  index_t sequence = 0, head = 0, key = 0;

  state_rows() = default;
  template <class U>
  state_rows(view4<U> x_nhkv)
      : data(x_nhkv.data), sequence(x_nhkv.stride[0]), head(x_nhkv.stride[1]), key(x_nhkv.stride[2]) {}
  __device__ F* at(index_t n, index_t h, index_t k) const { return data + n * sequence + h * head + k * key; }
};

/// What states pass through. Forward: values are v or u, `made` is z. Backward: values are d_o and `made` is first
/// what reaches z from the chunk's own outputs, then all of it; states are derivatives of those behind the chunks.
template <class T>
struct state_pass {
  chunk_grid grid;
  int heads_count, key_dim, value_dim, value_group, gate_group;
  decayed_rows<T> rows;
  heads<T const> w, values;
  table<float const> write;
  T* made;
  state_rows<float const> first;
  state_rows<float> last;
  float* states;  ///< [slots,H,K,V]: the one that each chunk meets
};

inline constexpr int pass_columns = 32;
template <class T, bool Delta, bool Backward>
struct pass_memory {
  static constexpr int columns_row = padded_row<T>(pass_columns), values_tile = chunk * columns_row;
  static constexpr int left = 0, values = 2 * tile<T>, value_tiles = Delta && Backward ? 2 : 1;
  static constexpr int scaled = values + 2 * value_tiles * values_tile;
  static constexpr int tiles = scaled + value_tiles * values_tile;
  static constexpr int factor_bytes = tiles * int(sizeof(T));
  static constexpr int factors = 4 * chunk, state_row = padded_row<float>(pass_columns);
  /// Delta: the state, and for sixteen-bit products a copy of it.
  static constexpr int bytes(int key_slices) {
    int const state = key_slices * width;
    return factor_bytes + factors * 4 +
           (Delta ? state * (state_row * 4 + (sizeof(T) == 2 ? columns_row * int(sizeof(T)) : 0)) : 0);
  }
};

/// Grid of sequences x heads x (slices of keys, where they do not meet) x slices of values.
template <class T, bool Delta, bool Backward>
__global__ void __launch_bounds__(threads, 4) pass_states(state_pass<T> p) {
  using enum layout;
  using memory = pass_memory<T, Delta, Backward>;
  constexpr int ld = row<T>, column_row = memory::columns_row, state_row = memory::state_row;
  extern __shared__ uint4 shared[];
  T* const base = reinterpret_cast<T*>(shared);
  float* const factors = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + memory::factor_bytes);
  float* const state = factors + memory::factors;
  int const key_slices = slices_of(p.key_dim), value_slices = (p.value_dim + pass_columns - 1) / pass_columns;
  T* const rounded = reinterpret_cast<T*>(sizeof(T) == 4 ? state : state + key_slices * width * state_row);
  constexpr int rounded_row = sizeof(T) == 4 ? state_row : column_row;
  int const warp_row = causal_rows::strip_index() * strip;

  index_t block = blockIdx.x;
  int const v0 = int(block % value_slices) * pass_columns;
  block /= value_slices;
  int const own_slice = Delta ? 0 : int(block % key_slices);
  if constexpr (!Delta) block /= key_slices;
  int const head = int(block % p.heads_count);
  index_t const n = block / p.heads_count, slot0 = p.grid.first(n);
  index_t const chunks = divided_up(p.grid.rows.length(n), chunk);
  int const value_left = p.value_dim - v0;
  auto const number = [&](index_t c) { return Backward ? chunks - 1 - c : c; };
  auto const token = [&](index_t r) { return r * p.heads_count + head; };

  // Tiles of the left factors come one after the other, each copied while the one before is computed with.
  int const parts = Delta ? (Backward ? 3 : 2) * key_slices : 1;
  struct left_factor {
    enum { query, key, solved } kind;
    int slice;
  };
  auto const factor_of = [&](int part) -> left_factor {
    if constexpr (!Delta) return {Backward ? left_factor::query : left_factor::key, own_slice};
    if (part < key_slices) return {Backward ? left_factor::key : left_factor::solved, part};
    part -= key_slices;
    if constexpr (!Backward) return {left_factor::key, part};
    return {part % 2 == 0 ? left_factor::query : left_factor::solved, part / 2};
  };
  auto const begin_left = [&](index_t c, int part, int buffer) {
    auto const at = p.grid.chunk_of(n, number(c));
    left_factor const f = factor_of(part);
    heads<T const> const& x = f.kind == left_factor::query ? p.rows.q : f.kind == left_factor::key ? p.rows.k : p.w;
    int const group = f.kind == left_factor::query ? p.rows.query_group
                      : f.kind == left_factor::key ? p.rows.key_group
                                                   : 1;
    begin_tile<width>(base + buffer * tile<T>, chunk, x.at(at.begin, head / group) + f.slice * width, x.row,
                      at.count, p.key_dim - f.slice * width);
  };
  auto const values_of = [&](int buffer) {
    return base + memory::values + buffer * memory::value_tiles * memory::values_tile;
  };
  // Two numbers for each row: of keys, and of queries or values.
  auto const factors_of = [&](int buffer) { return factors + buffer * 2 * chunk; };
  auto const begin_values = [&](index_t c, int buffer) {
    auto const at = p.grid.chunk_of(n, number(c));
    T* const to = values_of(buffer);
    begin_tile<pass_columns>(to, chunk, p.values.at(at.begin, head / p.value_group) + v0, p.values.row, at.count,
                             value_left);
    if constexpr (Delta && Backward)
      begin_tile<pass_columns>(to + memory::values_tile, chunk, p.made + token(at.begin) * p.value_dim + v0,
                               index_t(p.heads_count) * p.value_dim, at.count, value_left);
    if (int const i = int(threadIdx.x); i < chunk) {
      float* const of_row = factors_of(buffer) + i;
      index_t const r = at.begin + i;
      bool const is_row = i < at.count;
      if (is_row && p.rows.end)
        begin_number(of_row, p.rows.end + token(r));
      else
        of_row[0] = is_row ? 1.0F : 0.0F;
      float const* const other = Backward       ? (p.rows.start ? p.rows.start + token(r) : nullptr)
                                 : p.write.data ? &p.write(r, head / p.gate_group)
                                                : nullptr;
      if (is_row && other)
        begin_number(of_row + chunk, other);
      else
        of_row[chunk] = is_row ? 1.0F : 0.0F;
    }
  };
  float const query_scale = p.rows.start ? p.rows.scale : 1.0F;

  // The state that a chunk meets goes to device memory, what is left of it behind the chunk stays.
  auto const keep_and_decay = [&](fragment<4>& s, index_t slot, int k0) {
    if (p.states)
      each_pair(s, [&](float& a, float& b, int r, int c) {
        int const k = k0 + warp_row + r;
        if (k < p.key_dim)
          store_pair(p.states + ((slot * p.heads_count + head) * p.key_dim + k) * p.value_dim + v0 + c, a, b,
                     value_left - c);
      });
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const k = k0 + warp_row + fragment<1>::row(2 * half);
      decay[half] =
          k < p.key_dim
              ? p.rows.total[(slot * p.heads_count + head) * p.rows.total_width + (p.rows.total_width == 1 ? 0 : k)]
              : 0.0F;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[j][e] = decayed(s.x[j][e], decay[e / 2]);
  };
  auto const load_first = [&](fragment<4>& s, int k0) {
    s.each([&](float& x, int r, int c) {
      int const k = k0 + warp_row + r;
      x = p.first.data && k < p.key_dim && c < value_left ? p.first.at(n, head, k)[v0 + c] : 0.0F;
    });
  };
  auto const store_last = [&](fragment<4>& s, int k0) {
    if (p.last.data)
      s.each([&](float& x, int r, int c) {
        int const k = k0 + warp_row + r;
        if (k < p.key_dim && c < value_left) p.last.at(n, head, k)[v0 + c] = x;
      });
  };
  // A warp has the rows warp_row ... of each slice of the state, in shared memory or (one slice) in registers.
  auto const get = [&](fragment<4>& s, int k0) {
    s.each([&](float& x, int r, int c) { x = state[(k0 + warp_row + r) * state_row + c]; });
  };
  auto const put = [&](fragment<4>& s, int k0) {
    s.each([&](float& x, int r, int c) {
      state[(k0 + warp_row + r) * state_row + c] = x;
      if constexpr (sizeof(T) == 2) rounded[(k0 + warp_row + r) * rounded_row + c] = from_float<T>(x);
    });
  };

  fragment<4> s, met;
  if constexpr (Delta) {
    for (int k0 = 0; k0 < key_slices * width; k0 += width) load_first(s, k0), put(s, k0);
  } else {
    load_first(s, own_slice * width);
  }
  if (chunks > 0) begin_left(0, 0, 0), begin_values(0, 0);
  T* const scaled = base + memory::scaled;
  int buffer = 0;
  for (index_t c = 0; c < chunks; ++c) {
    index_t const slot = slot0 + number(c);
    int const of_values = int(c % 2);
    T const* const values = values_of(of_values);
    float const* const of_row = factors_of(of_values);
    for (int part = 0; part < parts; ++part, buffer ^= 1) {
      arrive();
      if (part + 1 < parts)
        begin_left(c, part + 1, buffer ^ 1);
      else if (c + 1 < chunks)
        begin_left(c + 1, 0, buffer ^ 1);
      if (part == 0 && c + 1 < chunks) begin_values(c + 1, of_values ^ 1);
      T const* const left = base + buffer * tile<T>;
      left_factor const f = factor_of(part);
      int const k0 = f.slice * width, depth = depth_of(p.key_dim, k0);
      if constexpr (!Delta) {
        for (int i = int(threadIdx.x); i < chunk * pass_columns; i += threads) {
          int const r = i / pass_columns, at = r * column_row + i % pass_columns;
          float const by = Backward ? query_scale * of_row[chunk + r] : of_row[r] * of_row[chunk + r];
          scaled[at] = from_float<T>(to_float(values[at]) * by);
        }
        keep_and_decay(s, slot, k0);
        __syncthreads();
        multiply_add<column_major, row_major>(s, left + warp_row, ld, scaled, column_row, chunk);
      } else if (part < key_slices) {
        if (part == 0) met.fill(0.0F);
        multiply_add<row_major, row_major>(met, left + warp_row * ld, ld, rounded + k0 * rounded_row, rounded_row,
                                           depth);
        if (part + 1 < key_slices) continue;
        auto const at = p.grid.chunk_of(n, number(c));
        each_pair(met, [&](float& a, float& b, int r, int column) {
          int const i = warp_row + r, x = i * column_row + column;
          float const by_key = of_row[i];
          if constexpr (Backward) {
            T const *const d_o = values + x, *const own = values + memory::values_tile + x;
            a = to_float(own[0]) + by_key * a, b = to_float(own[1]) + by_key * b;
            float const by_query = query_scale * of_row[chunk + i];
            store_pair(scaled + x, by_query * to_float(d_o[0]), by_query * to_float(d_o[1]), 2);
            store_pair(scaled + memory::values_tile + x, -a, -b, 2);
          } else {
            a = to_float(values[x]) - a, b = to_float(values[x + 1]) - b;
            store_pair(scaled + x, by_key * a, by_key * b, 2);
          }
          if (i < at.count)
            store_pair(p.made + token(at.begin + i) * p.value_dim + v0 + column, a, b, value_left - column);
        });
      } else {
        get(s, k0);
        if (f.kind != left_factor::solved) keep_and_decay(s, slot, k0);
        multiply_add<column_major, row_major>(s, left + warp_row, ld,
                                              scaled + (f.kind == left_factor::solved ? memory::values_tile : 0),
                                              column_row, chunk);
        put(s, k0);
      }
    }
  }
  if constexpr (Delta) {
    for (int k0 = 0; k0 < key_slices * width; k0 += width) get(s, k0), store_last(s, k0);
  } else {
    store_last(s, own_slice * width);
  }
}

/// Products of queries and keys of a chunk, by way of two tiles.
template <class T>
__device__ void multiply_queries(causal_rows& x, T* left, T* right, problem<T> const& p,
                                 chunk_grid::place const& at, int head) {
  for (int s = 0; s < slices_of(p.key_dim); ++s) {
    int const rest = p.key_dim - s * width;
    if (s > 0) __syncthreads();
    begin_tile<width>(left, chunk, p.q.at(at.begin, head / p.query_group) + s * width, p.q.row, at.count, rest);
    begin_tile<width>(right, chunk, p.k.at(at.begin, head / p.key_group) + s * width, p.k.row, at.count, rest);
    arrive();
    x.multiply(left, right, row<T>, depth_of(p.key_dim, s * width));
  }
  __syncthreads();
}

/// What has been written: rows of v times numbers, or z.
template <class T>
struct written_rows {
  heads<T const> values;
  int group = 1;
  table<float const> write;  ///< no data: 1
};
/// Scales a tile that has arrived by the write scale of each row.
template <class T>
__device__ void scale_written(T* tile_of, written_rows<T> const& z, chunk_grid::place const& at, int hg) {
  if (!z.write.data) return;
  for (int i = int(threadIdx.x); i < chunk * width; i += threads) {
    int const r = i / width;
    T& x = tile_of[r * row<T> + i % width];
    if (r < at.count) x = from_float<T>(to_float(x) * z.write(at.begin + r, hg));
  }
  __syncthreads();
}

template <class T>
struct read_memory {
  static constexpr int left = 0, right = tile<T>, weights = 2 * tile<T>, bytes = 3 * tile<T> * int(sizeof(T));
};
/// Outputs of one chunk and head by one block.
template <class T, bool PerChannel>
__global__ void __launch_bounds__(threads, 4) read_states(problem<T> p, decayed_rows<T> rows, T const* read,
                                                          written_rows<T> z, float const* states, heads<T> o) {
  using enum layout;
  using memory = read_memory<T>;
  constexpr int ld = row<T>;
  extern __shared__ uint4 shared[];
  T *const left = reinterpret_cast<T*>(shared), *const right = left + memory::right,
           *const weights = left + memory::weights;
  index_t const slot = blockIdx.x / p.heads_count;
  int const head = int(blockIdx.x % p.heads_count), first = causal_rows::strip_index() * strip;
  auto const at = p.grid.at(slot);
  if (at.count == 0) return;
  if constexpr (PerChannel) {
    begin_tile<width>(weights, chunk, read + p.pair(slot, head), chunk, chunk, chunk);
  } else {
    __shared__ head_decays decays;
    decays.load(p, at, head);
    causal_rows x;
    x.fill(0.0F);
    multiply_queries(x, left, right, p, at, head);
    x.each_pair_of([&](float& a, float& b, int i, int j) {
      store_pair(weights + i * ld + j, j <= i ? p.scale * a * decays.between(i, j) : 0.0F,
                 j < i ? p.scale * b * decays.between(i, j + 1) : 0.0F, 2);
    });
  }
  float by[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = first + fragment<1>::row(2 * half);
    by[half] = i < at.count ? rows.query_factor(p.token(at.begin + i, head)) : 0.0F;
  }
  int const key_slices = slices_of(p.key_dim);
  for (int v0 = 0; v0 < p.value_dim; v0 += width) {
    int const rest = p.value_dim - v0;
    fragment<8> x;
    x.fill(0.0F);
    for (int k0 = 0; k0 < p.key_dim; k0 += width) {
      // Scaled queries of one slice stay where they are.
      if (key_slices > 1 || v0 == 0)
        begin_tile<width>(left, chunk, rows.q.at(at.begin, head / rows.query_group) + k0, rows.q.row, at.count,
                          p.key_dim - k0);
      begin_numbers<width>(right, chunk, states + p.state(slot, head) + index_t(k0) * p.value_dim + v0, p.value_dim,
                           p.key_dim - k0, rest);
      arrive();
      multiply_add<row_major, row_major>(x, left + first * ld, ld, right, ld, depth_of(p.key_dim, k0));
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) x.x[j][e] *= by[e / 2];
    begin_tile<width>(right, chunk, z.values.at(at.begin, head / z.group) + v0, z.values.row, at.count, rest);
    arrive();
    scale_written(right, z, at, head / p.gate_group);
    multiply_add<row_major, row_major>(x, weights + first * ld, ld, right, ld, first + strip);
    each_pair(x, [&](float& a, float& b, int r, int c) {
      if (first + r < at.count) store_pair(o.at(at.begin + first + r, head) + v0 + c, a, b, rest - c);
    });
    __syncthreads();
  }
}

/// Sequences of at most one token: grid of sequences x heads x 32 value channels, a lane has one of these. Nothing
/// is rounded to T but the outputs.
template <class T, bool Delta>
__global__ void __launch_bounds__(threads)
    step_states(problem<T> p, state_rows<float const> before, state_rows<float> after, heads<T> o) {
  constexpr int warps = threads / warp;
  __shared__ float sums[2][warps][warp];
  int const value_slices = (p.value_dim + warp - 1) / warp, lane = int(threadIdx.x) % warp,
            part = int(threadIdx.x) / warp;
  index_t block = blockIdx.x;
  int const v = int(block % value_slices) * warp + lane;
  block /= value_slices;
  int const head = int(block % p.heads_count);
  index_t const n = block / p.heads_count, r = p.grid.rows.begin(n);
  bool const is_value = v<p.value_dim, is_row = p.grid.rows.length(n)> 0;
  auto const state = [&](int k) { return before.data && is_value ? before.at(n, head, k)[v] : 0.0F; };
  auto const decayed_state = [&](int k) { return decayed(state(k), decay_step(p.log_decay(r, head, k))); };
  auto const put = [&](int k, float x) {
    if (after.data && is_value) after.at(n, head, k)[v] = x;
  };
  if (!is_row) {
    for (int k = part; k < p.key_dim; k += warps) put(k, state(k));
    return;
  }
  T const *const q = p.q.at(r, head / p.query_group), *const key = p.k.at(r, head / p.key_group);
  auto const sum_of = [&](int which, float x) {
    sums[which][part][lane] = x;
    __syncthreads();
    float sum = 0.0F;
    for (int w = 0; w < warps; ++w) sum += sums[which][w][lane];
    return sum;
  };
  float z = is_value ? p.write_scale(r, head) * to_float(p.v.at(r, head / p.value_group)[v]) : 0.0F;
  if constexpr (Delta) {
    float found = 0.0F;
    for (int k = part; k < p.key_dim; k += warps) found = fmaf(to_float(key[k]), decayed_state(k), found);
    z = p.strength(r, head) * (z - sum_of(0, found));
  }
  float read = 0.0F;
  for (int k = part; k < p.key_dim; k += warps) {
    float const now = fmaf(to_float(key[k]), z, decayed_state(k));
    put(k, now);
    read = fmaf(to_float(q[k]), now, read);
  }
  read = sum_of(1, read);
  if (part == 0 && is_value) o.at(r, head)[v] = from_float<T>(p.scale * read);
}

/// Room for what is made of the chunks before any state is known.
template <class T>
struct chunk_workspace {
  head_factors factors;
  weighed_chunks<T> weighed;
  decayed_rows<T> rows;
};

/// Takes that room and launches those kernels. Bytes: one decay per head 8 H R and a little; per channel
/// (2 K sizeof(T)) H R and sizeof(T) 64 H R for weights; the delta rule (K + V) sizeof(T) H R, for its backward
/// twice sizeof(T) 64 H R more.
template <class State, bool PerChannel, class T>
chunk_workspace<T> weigh(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                         problem<T> const& p, bool backward, arena& ws) {
  constexpr bool delta = State::spec.low_rank;
  index_t const R = s.seq.rows(), H = s.heads, K = s.key_dim, V = s.value_dim, slots = p.grid.count;
  chunk_workspace<T> w;
  if constexpr (delta) {
    w.weighed.u = ws.take<T>(R * H * V);
    w.weighed.w = ws.take<T>(R * H * K);
    if (backward) {
      w.weighed.inverse = ws.take<T>(slots * H * pairs);
      w.weighed.erased = ws.take<T>(slots * H * pairs);
    }
  }
  if constexpr (PerChannel) {
    w.weighed.q = ws.take<T>(R * H * K);
    w.weighed.k = ws.take<T>(R * H * K);
    w.weighed.total = ws.take<float>(slots * H * K);
    w.weighed.read = ws.take<T>(slots * H * pairs);
    w.rows.q = dense<T const>(w.weighed.q, H, K);
    w.rows.k = dense<T const>(w.weighed.k, H, K);
    w.rows.total = w.weighed.total;
    w.rows.total_width = int(K);
    launch(dev, "recurrence: weights of chunks", &weigh_channels<T, delta>, blocks(slots * H), threads,
           std::size_t(channel_memory<T, delta>::bytes), p, w.weighed);
  } else {
    w.factors.start = ws.take<float>(R * H);
    w.factors.end = ws.take<float>(R * H);
    w.factors.total = ws.take<float>(slots * H);
    w.rows.q = in.q_rhk;
    w.rows.k = in.k_rhk;
    w.rows.query_group = p.query_group;
    w.rows.key_group = p.key_group;
    w.rows.start = w.factors.start;
    w.rows.end = w.factors.end;
    w.rows.total = w.factors.total;
    w.rows.scale = p.scale;
    launch(dev, "recurrence: decays of chunks", &sum_decays<T>, blocks(slots * H), chunk, 0, p, w.factors);
    if constexpr (delta)
      launch(dev, "recurrence: systems of chunks", &solve_heads<T>, blocks(slots * H), threads,
             std::size_t(solve_memory<T>::bytes), p, w.weighed);
  }
  return w;
}

template <bool Delta, bool Backward, class T>
void launch_pass(device::cuda const& dev, recurrence_shape const& s, state_pass<T> const& p) {
  int const key_slices = slices_of(p.key_dim);
  index_t const value_slices = divided_up(p.value_dim, pass_columns);
  launch(dev, "recurrence: states from chunk to chunk", &pass_states<T, Delta, Backward>,
         blocks(s.seq.count() * s.heads * value_slices * (Delta ? 1 : key_slices)), threads,
         std::size_t(pass_memory<T, Delta, Backward>::bytes(key_slices)), p);
}

}  // namespace seqmix::inline v0::kernels::cuda::chunks
