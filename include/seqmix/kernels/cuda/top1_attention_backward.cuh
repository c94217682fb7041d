#pragma once

#include <seqmix/kernels/cuda/attention_backward.cuh>
#include <seqmix/kernels/cuda/top1_attention_forward.cuh>

/// The backward of a hard choice on a device. Surrogates go through the tiles of softmax attention: with p the
/// weights at the surrogate's temperature and i the chosen key,
///   d_score_j = p_j (slope g.v_j - level) + through [j = i],   weight of g in d_v_j = share p_j + held [j = i].
/// Where values get a derivative by the choice alone, every tile of keys looks for the rows that chose one of them
/// and adds these in ascending order: a scatter without atomics.
namespace seqmix::inline v0::kernels::cuda {

/// A row's own part of these formulas; `token`: its choice, -1 for none.
struct choice_terms {
  float lse, level, through, held;
  int token;
};

/// A rule for pull_back_attention.
template <class T>
struct choice_upstream {
  heads<T const> d_o;
  saved_choice const* saved;      ///< [R,H]
  heads<float const> average;     ///< softmax outputs [R,H,V]
  choice_terms* terms = nullptr;  ///< [H,R]
  index_t rows;
  float slope, share;
  float hard;      ///< hard_fraction
  bool adds_held;  ///< the chosen value's factor is in its weight
  bool through;    ///< the chosen weight gets the derivative of the chosen value
  bool values;     ///< d_v is made of weights, else by scatter_values

  /// Terms are read when they are needed: they would cost ten registers.
  struct lane : detail::lane_terms {
    choice_terms const* first;
    index_t count;  ///< of rows from the first on
  };
  __device__ void load(lane& x, attention_problem<T> const& p, attended_head const& head, index_t first) const {
    x.load_sums(p, head, first);
    index_t const i = first + fragment<1>::row(0);
    x.first = terms + head.head * rows + head.begin + i;
    x.count = head.rows - i;
  }
  template <int Columns>
  __device__ void pull_back(fragment<Columns>& x, fragment<Columns>& y, lane const& mine, float scale,
                            split_sum const* gate, int first_column, key_tile<T> const& tile) const {
    score(x, mine, scale, gate, first_column, mine.all_seen);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      choice_terms row{INFINITY, 0.0F, 0.0F, 0.0F, -1};
      if (8 * r < mine.count) row = mine.first[8 * r];
      index_t const of_tile = row.token - tile.token;
      int const chosen = of_tile < 0 || of_tile >= tile.count ? -1 : int(of_tile) - first_column;
#pragma unroll
      for (int n = 0; n < Columns; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          bool const hidden = x.x[n][e] == -INFINITY, here = fragment<Columns>::column(n, e) == chosen;
          float const weight = hidden ? 0.0F : weight_of(x.x[n][e] - row.lse);
          float const d = hidden ? 0.0F : weight * fmaf(slope, y.x[n][e], -row.level);
          y.x[n][e] = here ? d + row.through : d;
          x.x[n][e] = here ? fmaf(share, weight, row.held) : share * weight;
        }
    }
  }
};

namespace detail {

inline constexpr int choice_slice = 64;  ///< channels of a tile of choose_terms

/// The terms of 64 rows of a head: g.(average) and, where it is asked for, g.(chosen value), by the sums of g.v, so
/// that a row that sees one key alone has exact zeros. Grid of (heads x tiles of rows).
template <class T>
__global__ void __launch_bounds__(128) choose_terms(attention_problem<T> p, row_tiles cut, choice_upstream<T> up) {
  constexpr int row = padded_row<T>(choice_slice);
  extern __shared__ uint4 shared[];
  T *const g = reinterpret_cast<T*>(shared), *const high = g + 64 * row, *const low = high + 64 * row;
  __shared__ attended_head head;
  auto const place = cut.at(blockIdx.x % cut.count);
  if (threadIdx.x == 0) head = attended_head::of(p, place.sequence, int(blockIdx.x / cut.count));
  __syncthreads();
  index_t const begin = head.begin + place.first, left = head.rows - place.first;
  if (left <= 0) return;
  int const count = left < 64 ? int(left) : 64, first = int(threadIdx.x) / warp * 16;
  auto const saved = [&](int i) -> saved_choice const& {
    return up.saved[(begin + i) * p.heads_count + head.head];
  };
  fragment<2> product[2];
  product[0].fill(0.0F);
  product[1].fill(0.0F);
  auto const add = [&](fragment<2>& x, T const* b) {
    multiply_add<layout::row_major, layout::column_major>(x, g + first * row, row, b + first * row, row,
                                                          choice_slice);
  };
  for (int c0 = 0; c0 < p.value_dim; c0 += choice_slice) {
    cuda::begin_slice<choice_slice, 128>(g, 64, up.d_o.at(begin, head.head), up.d_o.row, count, p.value_dim,
                                         c0 / choice_slice);
    // f(row, channel) for all that are there; 0 for the others.
    auto const fill = [&](T* tile, auto const& f) {
      for (int x = int(threadIdx.x); x < 64 * choice_slice; x += 128) {
        int const i = x / choice_slice, c = x % choice_slice;
        tile[i * row + c] = i < count && c0 + c < p.value_dim ? f(i, c0 + c) : from_float<T>(0.0F);
      }
    };
    auto const average = [&](int i, int c) { return up.average.at(begin + i, head.head)[c]; };
    fill(high, [&](int i, int c) { return from_float<T>(average(i, c)); });
    // What sixteen bits leave of a float.
    if constexpr (sizeof(T) == 2)
      fill(low, [&](int i, int c) {
        float const x = average(i, c);
        return from_float<T>(x - to_float(from_float<T>(x)));
      });
    arrive();
    add(product[0], high);
    if constexpr (sizeof(T) == 2) add(product[0], low);
    __syncthreads();
    if (!up.through) continue;
    fill(high, [&](int i, int c) {
      index_t const token = saved(i).chosen;
      return token < 0 ? from_float<T>(0.0F) : value_of_token(p, head, token, head.head)[c];
    });
    __syncthreads();
    add(product[1], high);
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const i = first + fragment<2>::row(e);
      if (fragment<2>::row(e) != fragment<2>::column(n, e) || i >= count) continue;
      auto const& kept = saved(i);
      float const through = up.through ? up.hard * product[1].x[n][e] * kept.chosen_weight : 0.0F;
      up.terms[head.head * up.rows + begin + i] = {kept.lse, fmaf(up.slope, product[0].x[n][e], through), through,
                                                   up.adds_held ? kept.held : 0.0F, int(kept.chosen)};
    }
}

inline constexpr int scatter_threads = 128;  ///< channels of a block, and rows that are looked at together

/// d_v of one tile of keys by the rows of one query head that chose them: grid (heads x tiles, slices of the
/// channels). A thread for each channel, rows in ascending order.
template <class T>
__global__ void __launch_bounds__(scatter_threads)
    scatter_values(attention_problem<T> p, key_blocks cut, choice_upstream<T> up, token_target<T> d_v) {
  struct found_row {
    index_t row;
    int column;
    float held;
  };
  __shared__ attended_head head;
  __shared__ float sums[tile_keys][scatter_threads];
  __shared__ found_row found[scatter_threads];
  __shared__ int counts[scatter_threads / warp];
  auto const place = cut.at(blockIdx.x % cut.slots());
  if (threadIdx.x == 0) head = attended_head::of(p, place.sequence, int(blockIdx.x / cut.slots()));
  __syncthreads();
  if (place.first >= (place.of_past ? head.past : head.rows)) return;
  auto const tile = head.tile(p, int(place.first / tile_keys) + (place.of_past ? 0 : head.past_tiles()));
  int const thread = int(threadIdx.x), mine = thread / warp;
  int const channel = int(blockIdx.y) * scatter_threads + thread;
  for (int j = 0; j < tile_keys; ++j) sums[j][thread] = 0.0F;
  // Rows whose positions are at least the first key's, and less than `window` beyond the last one's.
  index_t first = tile.token - head.position, end = tile.token + tile.count - 1 + p.window - head.position;
  first = first < 0 ? 0 : first;
  end = end < head.rows ? end : head.rows;
  for (index_t i0 = first; i0 < end; i0 += scatter_threads) {
    index_t const row = head.begin + i0 + thread;
    bool const exists = i0 + thread < end;
    auto const* const saved = up.saved + (exists ? row : head.begin) * p.heads_count + head.head;
    index_t const column = saved->chosen - tile.token;
    bool const chose = exists && saved->chosen >= 0 && column >= 0 && column < tile.count;
    unsigned const together = __ballot_sync(~0U, chose);
    if (thread % warp == 0) counts[mine] = __popc(together);
    __syncthreads();
    int before = 0, count = 0;
    for (int w = 0; w < scatter_threads / warp; ++w) {
      before += w < mine ? counts[w] : 0;
      count += counts[w];
    }
    if (chose) found[before + __popc(together & ((1U << thread % warp) - 1U))] = {row, int(column), saved->held};
    __syncthreads();
    if (channel < p.value_dim)
#pragma unroll 4
      for (int x = 0; x < count; ++x) {
        float& sum = sums[found[x].column][thread];
        sum = fmaf(found[x].held, to_float(up.d_o.at(found[x].row, head.head)[channel]), sum);
      }
    __syncthreads();
  }
  if (channel >= p.value_dim) return;
  for (int j = 0; j < tile.count; ++j)
    d_v.write(p.places, head, tile.token + j,
              [&](auto* to) { to[channel] = from_float<std::remove_pointer_t<decltype(to)>>(sums[j][thread]); });
}

/// Zero derivatives of tokens: add_heads over no heads.
template <class T>
void clear_tokens(device::cuda const& dev, attention_problem<T> const& problem, key_blocks const& cut,
                  token_target<T> d, index_t shared_heads) {
  d.group = 0;
  launch(dev, "choice backward: no derivative", &add_heads<T>, blocks(shared_heads * cut.count()), 128, 0,
         problem.places, cut, d);
}

inline void clear_sums(device::cuda const& dev, bias_sums const& sums, index_t heads_count) {
  if (!sums.wanted || dev.dry) return;
  auto const clear = [&](double* x, index_t count) {
    check(cudaMemsetAsync(x, 0, std::size_t(heads_count * count) * sizeof(double),
                          static_cast<cudaStream_t>(dev.stream)),
          "choice backward: no derivative of gates");
  };
  clear(sums.of_query, sums.rows);
  clear(sums.of_key, sums.places);
}

/// `surrogate`: scores get a derivative. Writes d_q, d_k, d_v and the sums of the biases' derivatives.
template <class T>
void choice_backward(device::cuda const& dev, attention_shape const& s, attention_problem<T> const& problem,
                     key_blocks const& keys, choice_upstream<T> const& up, bool surrogate,
                     token_target<T> const& d_k, token_target<T> const& d_v, heads<T> d_q, bias_sums const& sums) {
  if (!up.values)
    launch(dev, "choice backward: values", &scatter_values<T>,
           blocks(s.heads * keys.count(), divided_up(s.value_dim, scatter_threads)), scatter_threads, 0, problem,
           keys, up, d_v);
  if (!surrogate) {
    clear_tokens(dev, problem, keys, d_k, s.key_heads);
    clear_tokens(dev, problem, key_blocks{keys.own, 0, keys.own.count},
                 token_target<T>{d_q, {}, nullptr, int(s.key_dim), 0}, s.heads);
    clear_sums(dev, sums, s.heads);
    if (d_v.group > 1)
      launch(dev, "choice backward: shared heads", &add_heads<T>, blocks(s.value_heads * keys.count()), 128, 0,
             problem.places, keys, d_v);
    return;
  }
  launch(dev, "choice backward: rows", &choose_terms<T>, blocks(s.heads * keys.own.count), 128,
         std::size_t((sizeof(T) == 2 ? 3 : 2) * 64 * padded_row<T>(choice_slice)) * sizeof(T), problem, keys.own,
         up);
  // Of few widths, so that programs compile fast.
  if (s.key_dim <= 64 && s.value_dim <= 64)
    pull_back_attention<T, 64>(dev, s, problem, keys, up, d_k, d_v, d_q, sums);
  else
    pull_back_attention<T, widest_slice<T>>(dev, s, problem, keys, up, d_k, d_v, d_q, sums);
}

}  // namespace detail
}  // namespace seqmix::inline v0::kernels::cuda
