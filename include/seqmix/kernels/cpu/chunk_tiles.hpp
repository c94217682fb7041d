#pragma once

#include <array>
#include <limits>

#include <seqmix/kernels/cpu/attention_parts.hpp>
#include <seqmix/kernels/cpu/tile_product.hpp>
#include <seqmix/selectors/softmax.hpp>

/// The keys of one head cut into tiles that begin where their chunk begins, so that equal chunks get the same bits
/// wherever they stand; and what router and attention both do with such a tile.
namespace seqmix::inline v0::kernels::detail {

inline constexpr index_t block_rows = 64;  ///< queries worked on together
inline constexpr index_t block_keys = 64;  ///< row length of a tile of scores

/// `keys` tokens in chunks, each chunk in tiles of `width` keys.
struct chunk_grid {
  index_t keys = 0, chunk = 1, count = 0, width = 1, per_chunk = 1;

  template <class Isa, class T>
  static chunk_grid of(index_t keys, index_t chunk) noexcept {
    chunk_grid g;
    g.keys = keys;
    g.chunk = std::max<index_t>(1, (std::min)(chunk, keys));
    g.count = (keys + g.chunk - 1) / g.chunk;
    g.width = (std::min)(block_keys, simd::padded<Isa, T>(g.chunk));
    g.per_chunk = (g.chunk + g.width - 1) / g.width;
    return g;
  }
  index_t begin(index_t c) const noexcept { return c * chunk; }
  index_t end(index_t c) const noexcept { return (std::min)((c + 1) * chunk, keys); }
  /// Columns of all tiles, padding included.
  index_t columns() const noexcept { return count * per_chunk * width; }
  /// Row length of a table with one column per chunk.
  index_t table_row() const noexcept { return (count + block_keys - 1) / block_keys * block_keys; }
};

/// Keys [begin, end) of one chunk.
struct key_tile {
  index_t chunk, begin, end;
  index_t column;  ///< among chunk_grid::columns()
  bool first;      ///< the chunk's first one

  index_t size() const noexcept { return end - begin; }
};

/// Up to block_rows queries of a head in ascending order, and the keys that each of them is to meet.
struct query_rows {
  index_t count = 0;
  std::array<index_t, std::size_t(block_rows)> row;
  std::array<key_range, std::size_t(block_rows)> seen;

  void clear() noexcept { count = 0; }
  void add(index_t r, key_range keys) noexcept {
    row[std::size_t(count)] = r;
    seen[std::size_t(count++)] = keys;
  }
};

/// One thread's memory for the tiles of one head of at most `keys` tokens.
template <class T>
struct chunk_tile_scratch {
  T *key_t, *value, *q, *score;                                    // forward
  T *key, *value_t, *dout, *gv, *d_score, *d_q, *d_key, *d_value;  // backward
  double *g, *d_g;
  query_rows* rows;

  template <class Isa>
  static chunk_tile_scratch carve(arena& a, attention_shape const& s, index_t keys, bool backward) {
    index_t const columns = chunk_grid::of<Isa, T>(keys, s.select.chunk).columns();
    index_t const kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    chunk_tile_scratch w{};
    w.key_t = a.take<T>(columns * s.key_dim);
    w.value = a.take<T>(keys * vp);
    w.q = a.take<T>(block_rows * kp);
    w.score = a.take<T>(block_rows * block_keys);
    w.g = a.take<double>(keys);
    w.rows = a.take<query_rows>(1);
    if (!backward) return w;
    w.key = a.take<T>(keys * kp);
    w.value_t = a.take<T>(columns * s.value_dim);
    w.dout = a.take<T>(block_rows * vp);
    w.gv = a.take<T>(block_rows * block_keys);
    w.d_score = a.take<T>(block_rows * block_keys);
    w.d_q = a.take<T>(block_rows * kp);
    w.d_key = a.take<T>(keys * kp);
    w.d_value = a.take<T>(keys * vp);
    w.d_g = a.take<double>(keys);
    return w;
  }
};

/// One head of one sequence in tiles, and the block of queries `rows` at work on them.
template <class Isa, class T>
class chunk_tiles {
 public:
  chunk_tiles(attention_shape const& shape, attention_input<T> const& in, index_t n, index_t h,
              chunk_tile_scratch<T> const& scratch)
      : s(shape), place(shape, in, n, h), grid(chunk_grid::of<Isa, T>(place.keys, shape.select.chunk)), w(scratch),
        rows(*scratch.rows), kp(simd::padded<Isa, T>(shape.key_dim)), vp(simd::padded<Isa, T>(shape.value_dim)) {}

  void pack_keys() const noexcept {
    for_grid([&](index_t begin, index_t end, index_t column) {
      place.template transpose_keys<Isa>(begin, end, s.key_dim, w.key_t + column * s.key_dim, grid.width);
    });
  }
  void pack_values() const noexcept {
    place.copy_values(s.value_dim, w.value, vp);
    finite_values = place.keys == 0 || !simd::may_hold_nan<Isa>(w.value, place.keys * vp);
  }
  void pack_for_backward() const noexcept {
    pack_keys();
    pack_values();
    place.copy_keys(s.key_dim, w.key, kp);
    for_grid([&](index_t begin, index_t end, index_t column) {
      place.template transpose_values<Isa>(begin, end, s.value_dim, w.value_t + column * s.value_dim, grid.width);
    });
    std::fill_n(w.d_key, place.keys * kp, T(0));
    std::fill_n(w.d_value, place.keys * vp, T(0));
    std::fill_n(w.d_g, place.keys, 0.0);
  }

  T q_scale() const noexcept { return T(s.scale / s.knobs.temperature); }
  index_t position(index_t i) const noexcept { return place.past + rows.row[std::size_t(i)]; }

  /// A row's softmax before it has met a key: the sink, or nothing.
  selectors::detail::softmax_run<T> first_run() const noexcept {
    if (!place.in->sink_h) return {};
    return selectors::detail::softmax_run<T>::beginning(place.in->sink_h(place.head));
  }

  /// Scaled queries of the block.
  void load_queries() const noexcept {
    T const scale = q_scale();
    for (index_t i = 0; i < rows.count; ++i) {
      T* const q = w.q + i * kp;
      copy_rows(place.query(rows.row[std::size_t(i)]), 0, 1, s.key_dim, q, kp);
      for (index_t c = 0; c < s.key_dim; ++c) q[c] *= scale;
    }
  }

  /// f(tile, i, end) for every tile that a query of the block is to meet, keys ascending; queries [i, end) meet it.
  template <class F>
  void for_tiles(F const& f) const {
    index_t low = place.keys, high = 0;
    for (index_t i = 0; i < rows.count; ++i) {
      auto const seen = rows.seen[std::size_t(i)];
      if (seen.size() == 0) continue;
      low = (std::min)(low, seen.begin);
      high = (std::max)(high, seen.end);
    }
    for (index_t c = low / grid.chunk; c * grid.chunk < high; ++c)
      for (index_t t = 0; t < grid.per_chunk; ++t) {
        index_t const begin = grid.begin(c) + t * grid.width;
        index_t const limit = (std::min)(begin + grid.width, grid.end(c));
        key_tile tile{c, begin, begin, (c * grid.per_chunk + t) * grid.width, t == 0};
        index_t first = rows.count, last = 0;
        for (index_t i = 0; i < rows.count; ++i) {
          auto const seen = rows.seen[std::size_t(i)];
          index_t const end = (std::min)(seen.end, limit);
          if ((std::max)(seen.begin, begin) >= end) continue;
          first = (std::min)(first, i);
          last = i + 1;
          tile.end = (std::max)(tile.end, end);
        }
        if (first < last) f(tile, first, last);
      }
  }

  /// Columns of a tile in whole vectors.
  static index_t columns(key_tile const& tile) noexcept { return simd::padded<Isa, T>(tile.size()); }
  T* score(index_t i) const noexcept { return w.score + i * block_keys; }
  T* gv(index_t i) const noexcept { return w.gv + i * block_keys; }
  T* d_score(index_t i) const noexcept { return w.d_score + i * block_keys; }

  /// f(first, rows, columns) for the queries [first, last): a tile that they do not all see to its end falls into
  /// strips, each with the columns that it sees at most. What lies behind is not computed.
  template <class F>
  void for_strips(key_tile const& tile, index_t first, index_t last, F const& f) const {
    constexpr index_t strip = 16;
    auto const seen_end = [&](index_t i) { return rows.seen[std::size_t(i)].end; };
    bool whole = true;
    for (index_t i = first; i < last; ++i) whole = whole && seen_end(i) >= tile.end;
    if (whole) return f(first, last - first, columns(tile));
    for (index_t i0 = first; i0 < last; i0 += strip) {
      index_t const count = (std::min)(strip, last - i0);
      index_t end = tile.begin;
      for (index_t i = i0; i < i0 + count; ++i) end = (std::max)(end, (std::min)(seen_end(i), tile.end));
      if (end > tile.begin) f(i0, count, simd::padded<Isa, T>(end - tile.begin));
    }
  }

  /// scale q.k / temperature + bias where a query is to meet the key, -inf elsewhere.
  void score_tile(key_tile const& tile, index_t first, index_t last) const noexcept {
    for_strips(tile, first, last, [&](index_t i0, index_t count, index_t width) {
      tile_product<Isa>(count, width, s.key_dim, tile_operand<T>{w.q + i0 * kp, kp, 1},
                        w.key_t + tile.column * s.key_dim, grid.width, score(i0), block_keys, false);
    });
    for (index_t i = first; i < last; ++i) {
      auto const seen = seen_of(tile, i);
      if (place.gated()) {
        double const here = w.g[position(i)];
        for (index_t j = seen.begin; j < seen.end; ++j) score(i)[j] += T(here - w.g[tile.begin + j]);
      }
      std::fill(score(i), score(i) + seen.begin, hidden);
      std::fill(score(i) + seen.end, score(i) + columns(tile), hidden);
    }
  }
  /// The columns of a tile that a query is to meet.
  key_range seen_of(key_tile const& tile, index_t i) const noexcept {
    auto const seen = rows.seen[std::size_t(i)];
    index_t const from = std::clamp<index_t>(seen.begin - tile.begin, 0, tile.size());
    return {from, std::clamp<index_t>(seen.end - tile.begin, from, tile.size())};
  }
  /// acc += weights times values, for the weights that stand in place of the scores. A weight of 0 would not keep
  /// an infinite value or a NaN out: where there are such, queries take what they are to meet alone.
  void add_values(key_tile const& tile, index_t first, index_t last, T* acc) const noexcept {
    for (index_t i = first; i < last && !finite_values; ++i) {
      auto const seen = seen_of(tile, i);
      tile_product<Isa>(1, vp, seen.size(), tile_operand<T>{score(i) + seen.begin, block_keys, 1},
                        w.value + (tile.begin + seen.begin) * vp, vp, acc + i * vp, vp, true);
    }
    if (!finite_values) return;
    for_strips(tile, first, last, [&](index_t i0, index_t count, index_t width) {
      tile_product<Isa>(count, vp, (std::min)(width, tile.size()), tile_operand<T>{score(i0), block_keys, 1},
                        w.value + tile.begin * vp, vp, acc + i0 * vp, vp, true);
    });
  }
  /// gv = g.v of every pair up to the last that a query is to meet, for the upstream gradients in w.dout; 0 behind.
  void gv_tile(key_tile const& tile, index_t first, index_t last) const noexcept {
    for_strips(tile, first, last, [&](index_t i0, index_t count, index_t width) {
      tile_product<Isa>(count, width, s.value_dim, tile_operand<T>{w.dout + i0 * vp, vp, 1},
                        w.value_t + tile.column * s.value_dim, grid.width, gv(i0), block_keys, false);
    });
    for (index_t i = first; i < last; ++i) std::fill(gv(i) + seen_of(tile, i).end, gv(i) + columns(tile), T(0));
  }
  /// Hands weights and d_score to the queries of the block, to keys, values and gate.
  void pull_weights(key_tile const& tile, index_t first, index_t last) const noexcept {
    pull_scores(tile, first, last);
    for_strips(tile, first, last, [&](index_t i0, index_t count, index_t width) {
      tile_product<Isa>((std::min)(width, tile.size()), vp, count, tile_operand<T>{score(i0), 1, block_keys},
                        w.dout + i0 * vp, vp, w.d_value + tile.begin * vp, vp, true);
    });
  }
  /// Hands d_score to the queries of the block, the keys and the gate.
  void pull_scores(key_tile const& tile, index_t first, index_t last) const noexcept {
    for (index_t i = first; i < last && place.gated(); ++i) {
      auto const seen = seen_of(tile, i);
      double row = 0.0;
      for (index_t j = seen.begin; j < seen.end; ++j) {
        double const d = double(d_score(i)[j]);
        row += d;
        w.d_g[tile.begin + j] -= d;
      }
      w.d_g[position(i)] += row;
    }
    for_strips(tile, first, last, [&](index_t i0, index_t count, index_t width) {
      index_t const keys = (std::min)(width, tile.size());
      tile_product<Isa>(count, kp, keys, tile_operand<T>{d_score(i0), block_keys, 1}, w.key + tile.begin * kp, kp,
                        w.d_q + i0 * kp, kp, true);
      tile_product<Isa>(keys, kp, count, tile_operand<T>{d_score(i0), 1, block_keys}, w.q + i0 * kp, kp,
                        w.d_key + tile.begin * kp, kp, true);
    });
  }

  static constexpr T hidden = -std::numeric_limits<T>::infinity();
  attention_shape const& s;
  head_place<T> place;
  chunk_grid grid;
  chunk_tile_scratch<T> const& w;
  query_rows& rows;
  index_t kp, vp;
  mutable bool finite_values = true;  ///< found by pack_values

 private:
  template <class F>
  void for_grid(F const& f) const noexcept {
    for (index_t c = 0; c < grid.count; ++c)
      for (index_t t = 0; t < grid.per_chunk; ++t) {
        index_t const begin = grid.begin(c) + t * grid.width;
        f(begin, (std::min)(begin + grid.width, grid.end(c)), (c * grid.per_chunk + t) * grid.width);
      }
  }
};

}  // namespace seqmix::inline v0::kernels::detail
