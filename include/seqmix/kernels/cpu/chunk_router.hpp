#pragma once

#include <cmath>

#include <seqmix/kernels/cpu/chunk_tiles.hpp>

/// Which chunks does each query read? Scores of all chunks for a block of queries at a time, the choice, and the
/// way back from a selector's gradient to queries, keys and gates. Tables have a row per query of the block and a
/// column per chunk.
namespace seqmix::inline v0::kernels::detail {

/// The keys that a query sees whatever it chooses: the first range of blocks(query, -1), behind all that a chosen
/// chunk adds.
template <class Which>
key_range seen_always(index_t query, selection const& select) noexcept {
  auto const seen = Which::blocks(query, -1, select);
  return seen.count > 0 ? seen.range[0] : key_range{query + 1, query + 1};
}
/// What chunk c adds to that.
template <class Which>
key_range seen_by_choice(index_t query, index_t c, chunk_grid const& grid, selection const& select) noexcept {
  return {grid.begin(c), (std::min)({grid.end(c), query + 1, seen_always<Which>(query, select).begin})};
}
/// Chunks 0 .. count-1 compete for a query.
template <class Which>
index_t candidate_count(index_t query, chunk_grid const& grid) noexcept {
  return query / grid.chunk + (Which::spec.own_competes ? 1 : 0);
}
/// Their keys are those before this one.
template <class Which>
index_t candidate_end(index_t query, chunk_grid const& grid) noexcept {
  return Which::spec.own_competes ? query + 1 : query / grid.chunk * grid.chunk;
}

/// The score whose softmax the gradient runs through.
constexpr chunk_score surrogate_score(which_spec const& which) noexcept {
  bool const mass =
      which.gradient == chunk_gradient::chunk_straight_through && which.probability == chunk_probability::mass;
  return mass ? chunk_score::exact_mass : which.score;
}

/// One thread's memory for the router of one head of at most `keys` tokens.
template <class T>
struct chunk_router_scratch {
  T *mean, *mean_t, *prefix, *prefix_t, *table, *sums;  // forward
  T *weight, *reading, *d_mean, *d_prefix;              // backward
  double *mean_g, *d_mean_g;  ///< [chunks] mean of the running log-decays, with router_bias
  selectors::detail::softmax_run<T>* run;

  template <class Which, class Isa>
  static chunk_router_scratch carve(arena& a, attention_shape const& s, index_t keys, bool backward) {
    auto const grid = chunk_grid::of<Isa, T>(keys, s.select.chunk);
    index_t const kp = simd::padded<Isa, T>(s.key_dim), table = block_rows * grid.table_row();
    chunk_router_scratch w{};
    w.table = a.take<T>(table);
    w.sums = a.take<T>(table);
    w.run = a.take<selectors::detail::softmax_run<T>>(block_rows);
    if (scores_by_mean(Which::spec.score)) {
      w.mean = a.take<T>(grid.count * kp);
      w.mean_t = a.take<T>(grid.table_row() * s.key_dim);
    }
    if (s.select.router_bias) w.mean_g = a.take<double>(grid.count);
    bool const prefix = scores_by_mean(Which::spec.score) && Which::spec.own_competes;
    if (prefix) {
      w.prefix = a.take<T>(block_rows * kp);
      w.prefix_t = a.take<T>(block_rows * s.key_dim);
    }
    if (!backward) return w;
    w.weight = a.take<T>(table);
    w.reading = a.take<T>(table);
    if (scores_by_mean(Which::spec.score)) w.d_mean = a.take<T>(grid.count * kp);
    if (prefix) w.d_prefix = a.take<T>(keys * kp);
    if (s.select.router_bias) w.d_mean_g = a.take<double>(grid.count);
    return w;
  }
};

/// What routing leaves for rows.
template <class T>
struct routed_rows {
  index_t* choice;  ///< [rows, per_row], the best first; -1: no candidate
  T* valid;         ///< [rows] 1; NaN where a score that decided was NaN
  index_t per_row = 1;

  routed_rows from(index_t row) const noexcept { return {choice + row * per_row, valid + row, per_row}; }
  index_t* of(index_t row) const noexcept { return choice + row * per_row; }
  bool chose(index_t row, index_t c) const noexcept {
    return std::find(of(row), of(row) + per_row, c) != of(row) + per_row;
  }
};

/// Scores of chunks for the block of queries in `tiles`. Work: 2 K flops a query and chunk for means, a query and
/// key for exact scores.
template <class Which, class Isa, class T>
class chunk_router {
 public:
  chunk_router(chunk_tiles<Isa, T> const& tiles, chunk_router_scratch<T> const& scratch)
      : t_(tiles), w_(scratch), row_(tiles.grid.table_row()) {}

  /// Means of all chunks: a sum in the order of tokens and one true division.
  void average_keys() const noexcept {
    if constexpr (scores_by_mean(spec.score)) {
      for (index_t c = 0; c < t_.grid.count; ++c) {
        T* const mean = w_.mean + c * t_.kp;
        std::fill_n(mean, t_.kp, T(0));
        for (index_t j = t_.grid.begin(c); j < t_.grid.end(c); ++j) add_key(j, mean);
        T const size = T(t_.grid.end(c) - t_.grid.begin(c));
        for (index_t x = 0; x < t_.s.key_dim; ++x) mean[x] /= size;
      }
      for (index_t c = 0; c < t_.grid.count; c += block_keys)
        transpose<Isa>(w_.mean + c * t_.kp, t_.kp, (std::min)(block_keys, t_.grid.count - c), t_.s.key_dim,
                       w_.mean_t + c * t_.s.key_dim, block_keys);
    }
  }

  /// What the head's gate adds to the means: needs the running log-decays.
  void average_biases() const noexcept {
    if (!biased()) return;
    for (index_t c = 0; c < t_.grid.count; ++c) {
      double sum = 0.0;
      for (index_t j = t_.grid.begin(c); j < t_.grid.end(c); ++j) sum += t_.w.g[j];
      w_.mean_g[c] = sum / double(t_.grid.end(c) - t_.grid.begin(c));
    }
  }

  /// The choices of the loaded block by this head's scores, and what multiplies the outputs.
  void choose(routed_rows<T> const& rows, T* weight) const noexcept {
    score_chunks<spec.score>();
    take_greatest(w_.table, rows);
    weigh_scored(rows, weight);
  }
  /// The same in three steps for a choice that heads share: sums of their probabilities ...
  void clear_sums() const noexcept { std::fill_n(w_.sums, block_rows * row_, T(0)); }
  void add_probabilities() const noexcept {
    score_chunks<spec.score>();
    for (index_t i = 0; i < t_.rows.count; ++i) {
      T* const p = table(i);
      make_probabilities(p, p, i);
      for (index_t c = 0; c < candidates(i); ++c) w_.sums[i * row_ + c] += p[c];
    }
  }
  /// ... their greatest ...
  void choose_by_sums(routed_rows<T> const& rows) const noexcept { take_greatest(w_.sums, rows); }
  /// ... and each head's own weights.
  void weigh(routed_rows<T> const& rows, T* weight) const noexcept {
    if constexpr (gated) score_chunks<spec.score>();
    weigh_scored(rows, weight);
  }

  void clear_gradients() const noexcept {
    if constexpr (scores_by_mean(spec.score)) std::fill_n(w_.d_mean, t_.grid.count * t_.kp, T(0));
    if constexpr (scores_by_mean(spec.score) && spec.own_competes)
      std::fill_n(w_.d_prefix, t_.place.keys * t_.kp, T(0));
    if (biased()) std::fill_n(w_.d_mean_g, t_.grid.count, 0.0);
  }
  /// Adds the selector's gradient of the loaded block: to w.d_q of the block, to keys and gate. `routed` and
  /// `g_output` = g.o are those of its rows.
  void backward(routed_rows<T> const& routed, T const* g_output) const noexcept {
    if constexpr (!reading_finds_mass) score_chunks<surrogate_score(spec)>();
    if constexpr (spec.gradient == chunk_gradient::chunk_straight_through) read_chunks();
    for (index_t i = 0; i < t_.rows.count; ++i) {
      T* const d = w_.weight + i * row_;
      make_probabilities(table(i), d, i);
      if constexpr (gated && spec.several) {
        pull_gate_of_several(routed, i, candidates(i), g_output[i], d);
      } else if constexpr (gated) {
        for (index_t c = 0; c < candidates(i); ++c)
          d[c] = g_output[i] * ((c == *routed.of(i) ? T(1) : T(0)) - d[c]);
      } else if (spec.several && candidates(i) <= routed.per_row) {
        std::fill_n(d, candidates(i), T(0));  // nothing was left to choose
      } else {
        T const* const reading = w_.reading + i * row_;
        T average = T(0);
        for (index_t c = 0; c < candidates(i); ++c) average += d[c] * reading[c];
        for (index_t c = 0; c < candidates(i); ++c) d[c] *= reading[c] - average;
      }
    }
    if constexpr (scores_by_mean(surrogate_score(spec)))
      pull_means();
    else
      pull_scores();
  }
  /// Hands what the means collected to their keys.
  void finish_gradients() const noexcept {
    if (biased() && scores_by_mean(surrogate_score(spec)))
      for (index_t c = 0; c < t_.grid.count; ++c)
        for (index_t j = t_.grid.begin(c); j < t_.grid.end(c); ++j)
          t_.w.d_g[j] += w_.d_mean_g[c] / double(t_.grid.end(c) - t_.grid.begin(c));
    if constexpr (scores_by_mean(surrogate_score(spec)))
      for (index_t c = 0; c < t_.grid.count; ++c) {
        index_t const begin = t_.grid.begin(c), end = t_.grid.end(c);
        T const* const d_mean = w_.d_mean + c * t_.kp;
        for (index_t j = begin; j < end; ++j)
          for (index_t x = 0; x < t_.s.key_dim; ++x) t_.w.d_key[j * t_.kp + x] += d_mean[x] / T(end - begin);
        if constexpr (spec.own_competes)
          for (index_t x = 0; x < t_.s.key_dim; ++x) {
            T after = T(0);
            for (index_t j = end; j-- > begin;) {
              after += w_.d_prefix[j * t_.kp + x];
              t_.w.d_key[j * t_.kp + x] += after;
            }
          }
      }
  }

 private:
  static constexpr which_spec spec = Which::spec;
  static constexpr bool gated = spec.gradient == chunk_gradient::gated;
  /// Without a window no key that is always seen lies in a candidate: what a chunk adds is its whole mass.
  static constexpr bool reading_finds_mass = spec.gradient == chunk_gradient::chunk_straight_through &&
                                             surrogate_score(spec) == chunk_score::exact_mass && !spec.windowed;
  static constexpr T hidden = -std::numeric_limits<T>::infinity();

  T* table(index_t i) const noexcept { return w_.table + i * row_; }
  index_t candidates(index_t i) const noexcept { return candidate_count<Which>(t_.position(i), t_.grid); }
  /// Chunks 0 .. scored - 1 of a row have a score: its candidates, or all complete chunks.
  index_t scored(index_t i) const noexcept {
    return spec.by_compression ? (t_.position(i) + 1) / t_.grid.chunk : candidates(i);
  }
  /// Columns that some row of the block uses.
  index_t used() const noexcept { return t_.rows.count > 0 ? scored(t_.rows.count - 1) : 0; }
  bool biased() const noexcept { return t_.s.select.router_bias && t_.place.gated(); }
  void add_key(index_t j, T* sum) const noexcept {
    T const* const key = t_.place.key(j);
    for (index_t x = 0; x < t_.s.key_dim; ++x) sum[x] += key[x];
  }

  /// table = score of every candidate, -inf in the columns behind them.
  template <chunk_score Score>
  void score_chunks() const noexcept {
    if constexpr (scores_by_mean(Score)) {
      for (index_t c = 0; c < used(); c += block_keys)
        tile_product<Isa>(t_.rows.count, (std::min)(block_keys, row_ - c), t_.s.key_dim,
                          tile_operand<T>{t_.w.q, t_.kp, 1}, w_.mean_t + c * t_.s.key_dim, block_keys, w_.table + c,
                          row_, false);
      if constexpr (spec.own_competes) score_own_prefix();
      if (biased()) add_biases();
    } else {
      let_candidates_be_seen([&](index_t i) { return candidate_end<Which>(t_.position(i), t_.grid); });
      t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) {
        t_.score_tile(tile, first, last);
        for (index_t i = first; i < last; ++i) {
          if constexpr (Score == chunk_score::exact_mass)
            add_mass(tile, i);
          else
            add_greatest(tile, i);
        }
      });
    }
    for (index_t i = 0; i < t_.rows.count; ++i) std::fill(table(i) + scored(i), table(i) + row_, hidden);
  }
  /// The mean of G_i - G_j over a chunk's keys; of the own one, over those so far.
  void add_biases() const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      index_t const query = t_.position(i), complete = query / t_.grid.chunk;
      double const here = t_.w.g[query];
      for (index_t c = 0; c < complete; ++c) table(i)[c] += T(here - w_.mean_g[c]);
      if constexpr (spec.own_competes) {
        double sum = 0.0;
        for (index_t j = t_.grid.begin(complete); j <= query; ++j) sum += t_.w.g[j];
        table(i)[complete] += T(here - sum / double(query + 1 - t_.grid.begin(complete)));
      }
    }
  }
  void add_mass(key_tile const& tile, index_t i) const noexcept {
    auto& run = w_.run[i];
    if (tile.first) run = {};
    run.template absorb<Isa>(t_.score(i), t_.score(i), t_.columns(tile));
    table(i)[tile.chunk] = run.sum == T(0) ? hidden : run.lse();
  }
  void add_greatest(key_tile const& tile, index_t i) const noexcept {
    T most = tile.first ? hidden : table(i)[tile.chunk];
    auto lanes = simd::load<Isa>(t_.score(i));
    auto odd = lanes != lanes;
    for (index_t j = Isa::template lanes<T>; j < t_.columns(tile); j += Isa::template lanes<T>) {
      auto const s = simd::load<Isa>(t_.score(i) + j);
      lanes = simd::larger<Isa, T>(s, lanes);
      odd |= s != s;
    }
    T const here = simd::greatest<Isa, T>(lanes);
    most = here > most ? here : most;
    for (index_t x = 0; x < Isa::template lanes<T>; ++x)
      if (odd[x] != 0) most = std::numeric_limits<T>::quiet_NaN();
    table(i)[tile.chunk] = most;
  }
  template <class End>
  void let_candidates_be_seen(End const& end) const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) t_.rows.seen[std::size_t(i)] = {0, end(i)};
  }

  /// The own chunk of a query by the mean of its keys so far.
  void score_own_prefix() const noexcept {
    constexpr index_t lanes = Isa::template lanes<T>;
    average_prefixes();
    for (index_t i = 0; i < t_.rows.count; ++i) {
      alignas(64) T product[std::size_t(lanes)];
      tile_product<Isa>(1, lanes, t_.s.key_dim, tile_operand<T>{t_.w.q + i * t_.kp, t_.kp, 1},
                        w_.prefix_t + i / lanes * lanes, block_rows, product, lanes, false);
      table(i)[candidates(i) - 1] = product[i % lanes];
    }
  }
  /// A block holds consecutive queries.
  void average_prefixes() const noexcept {
    alignas(64) T sum[block_keys];
    for (index_t x0 = 0; x0 < t_.s.key_dim; x0 += block_keys) {
      index_t const count = (std::min)(block_keys, t_.s.key_dim - x0);
      index_t const start = t_.rows.count > 0 ? t_.position(0) / t_.grid.chunk * t_.grid.chunk : 0;
      index_t const stop = t_.rows.count > 0 ? t_.position(t_.rows.count - 1) + 1 : 0;
      for (index_t j = start; j < stop; ++j) {
        index_t const held = j % t_.grid.chunk + 1;
        if (held == 1) std::fill_n(sum, count, T(0));
        T const* const key = t_.place.key(j) + x0;
        for (index_t x = 0; x < count; ++x) sum[x] += key[x];
        index_t const i = j - t_.position(0);
        if (i < 0) continue;
        for (index_t x = 0; x < count; ++x) w_.prefix[i * t_.kp + x0 + x] = sum[x] / T(held);
      }
    }
    for (index_t i = 0; i < t_.rows.count; ++i)
      std::fill(w_.prefix + i * t_.kp + t_.s.key_dim, w_.prefix + (i + 1) * t_.kp, T(0));
    transpose<Isa>(w_.prefix, t_.kp, t_.rows.count, t_.s.key_dim, w_.prefix_t, block_rows);
  }

  /// The greatest of each row's candidates, the lowest index first among equals; a NaN is taken alone, and shows in
  /// the weight.
  void take_greatest(T const* values, routed_rows<T> const& rows) const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      T const* const value = values + i * row_;
      index_t* const best = rows.of(i);
      rows.valid[i] = T(1);
      std::fill_n(best, rows.per_row, index_t(-1));
      index_t kept = 0;
      for (index_t c = 0; c < candidates(i); ++c) {
        if (value[c] != value[c]) {
          rows.valid[i] = value[c];
          std::fill_n(best, rows.per_row, index_t(-1));
          best[0] = c;
          break;
        }
        if constexpr (spec.several)
          keep_greatest(value, c, candidates(i), best, kept, rows.per_row);
        else if (best[0] < 0 || value[c] > value[best[0]])
          best[0] = c;
      }
    }
  }
  static bool forced(index_t c, index_t own) noexcept {
    return spec.forced == forced_chunks::first_and_previous && (c == 0 || c == own - 1);
  }
  /// Inserts c, greater than all indices before, into the list of the best; forced chunks stand before all others.
  static void keep_greatest(T const* value, index_t c, index_t own, index_t* best, index_t& kept,
                            index_t most) noexcept {
    auto const beats = [&](index_t other) {
      bool const must = forced(c, own), other_must = forced(other, own);
      return must != other_must ? must : !must && value[c] > value[other];
    };
    if (kept == most && !beats(best[most - 1])) return;
    index_t at = kept < most ? kept++ : most - 1;
    for (; at > 0 && beats(best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = c;
  }
  /// The sum of P over the choices when gated, else 1; 1 without candidates, NaN for a choice that is not valid.
  void weigh_scored(routed_rows<T> const& rows, T* weight) const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      weight[i] = rows.valid[i];
      if (!gated || *rows.of(i) < 0) continue;
      make_probabilities(table(i), table(i), i);
      weight[i] *= probability_of_choices(rows, i, table(i));
    }
  }
  static T probability_of_choices(routed_rows<T> const& rows, index_t i, T const* p) noexcept {
    T sum = p[*rows.of(i)];
    for (index_t x = 1; x < rows.per_row && rows.of(i)[x] >= 0; ++x) sum += p[rows.of(i)[x]];
    return sum;
  }
  /// p becomes g.o P_c ([c chosen] / P - 1), P the sum over the choices.
  static void pull_gate_of_several(routed_rows<T> const& rows, index_t i, index_t count, T g_output,
                                   T* p) noexcept {
    if (*rows.of(i) < 0) return;
    T const sum = probability_of_choices(rows, i, p);
    for (index_t c = 0; c < count; ++c) {
      T const share = rows.chose(i, c) && sum > T(0) ? p[c] / sum : T(0);
      p[c] = g_output * (share - p[c]);
    }
  }
  /// p = softmax over what has a score; all zero where every score is -inf.
  void make_probabilities(T const* score, T* p, index_t i) const noexcept {
    index_t const count = scored(i);
    if (count == 0) return;
    selectors::detail::softmax_run<T> run;
    run.template absorb<Isa>(score, p, simd::padded<Isa, T>(count));
    T const inverse = run.inverse_sum();
    for (index_t c = 0; c < count; ++c) p[c] *= inverse;
  }

  /// reading = g.O_c: what the row would give had it chosen c. Two averages of g.v, over the keys it always sees
  /// and over those the chunk adds, by the masses of both.
  void read_chunks() const noexcept {
    T always[block_rows], always_lse[block_rows], sum[block_rows];
    for (index_t i = 0; i < t_.rows.count; ++i) {
      t_.rows.seen[std::size_t(i)] = seen_always<Which>(t_.position(i), t_.s.select);
      sum[i] = T(0);
      w_.run[i] = t_.first_run();
    }
    t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) { absorb_values(tile, first, last, sum); });
    for (index_t i = 0; i < t_.rows.count; ++i) {
      always[i] = sum[i] * w_.run[i].inverse_sum();
      always_lse[i] = w_.run[i].sum == T(0) ? hidden : w_.run[i].lse();
      std::fill_n(w_.reading + i * row_, candidates(i), always[i]);
      if constexpr (reading_finds_mass) std::fill_n(table(i), row_, hidden);
    }
    let_candidates_be_seen([&](index_t i) {
      index_t const query = t_.position(i);
      return (std::min)(candidate_end<Which>(query, t_.grid), seen_always<Which>(query, t_.s.select).begin);
    });
    t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) {
      if (tile.first)
        for (index_t i = first; i < last; ++i) sum[i] = T(0), w_.run[i] = {};
      absorb_values(tile, first, last, sum);
      for (index_t i = first; i < last; ++i) {
        auto const& run = w_.run[i];
        if (run.sum == T(0)) continue;
        T const lse = run.lse();
        if constexpr (reading_finds_mass) table(i)[tile.chunk] = lse;
        T const share = always_lse[i] == hidden ? T(1) : T(1) / (T(1) + std::exp(always_lse[i] - lse));
        w_.reading[i * row_ + tile.chunk] = always[i] + share * (sum[i] * run.inverse_sum() - always[i]);
      }
    });
  }
  void absorb_values(key_tile const& tile, index_t first, index_t last, T* sum) const noexcept {
    t_.score_tile(tile, first, last);
    t_.gv_tile(tile, first, last);
    for (index_t i = first; i < last; ++i) {
      T const factor = w_.run[i].template absorb<Isa>(t_.score(i), t_.score(i), t_.columns(tile));
      sum[i] = sum[i] * factor +
               simd::map_sum<Isa, T>(
                   t_.columns(tile), [](auto const& a, auto const& b) { return a * b; }, t_.score(i), t_.gv(i));
    }
  }

  void pull_means() const noexcept {
    T* const d = w_.weight;
    if (biased()) pull_biases(d);
    if constexpr (spec.own_competes) {
      for (index_t i = 0; i < t_.rows.count; ++i) {
        index_t const own = candidates(i) - 1, query = t_.position(i);
        T const d_own = d[i * row_ + own];
        T const d_key = d_own / T(query - t_.grid.begin(own) + 1);
        d[i * row_ + own] = T(0);
        for (index_t x = 0; x < t_.s.key_dim; ++x) {
          t_.w.d_q[i * t_.kp + x] += d_own * w_.prefix[i * t_.kp + x];
          w_.d_prefix[query * t_.kp + x] += d_key * t_.w.q[i * t_.kp + x];
        }
      }
    }
    // Columns behind a row's candidates are zero: probabilities of -inf, or cleared here.
    for (index_t i = 0; i < t_.rows.count; ++i)
      std::fill(d + i * row_ + candidates(i), d + i * row_ + used(), T(0));
    tile_product<Isa>(t_.rows.count, t_.kp, used(), tile_operand<T>{d, row_, 1}, w_.mean, t_.kp, t_.w.d_q, t_.kp,
                      true);
    tile_product<Isa>(used(), t_.kp, t_.rows.count, tile_operand<T>{d, 1, row_}, t_.w.q, t_.kp, w_.d_mean, t_.kp,
                      true);
  }

  void pull_biases(T const* d) const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      index_t const query = t_.position(i), complete = query / t_.grid.chunk;
      for (index_t c = 0; c < candidates(i); ++c) {
        double const here = double(d[i * row_ + c]);
        t_.w.d_g[query] += here;
        if (c < complete) {
          w_.d_mean_g[c] -= here;
        } else {
          index_t const begin = t_.grid.begin(c);
          for (index_t j = begin; j <= query; ++j) t_.w.d_g[j] -= here / double(query + 1 - begin);
        }
      }
    }
  }

  /// Through log-sum-exp to every key by its share of the chunk, or through the maximum to the first key that has
  /// it.
  void pull_scores() const noexcept {
    bool found[block_rows];
    let_candidates_be_seen([&](index_t i) { return candidate_end<Which>(t_.position(i), t_.grid); });
    t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) {
      t_.score_tile(tile, first, last);
      for (index_t i = first; i < last; ++i) {
        T const of_chunk = table(i)[tile.chunk], d = w_.weight[i * row_ + tile.chunk];
        T* const d_score = t_.d_score(i);
        if (tile.first) found[i] = of_chunk == hidden;
        if (surrogate_score(spec) == chunk_score::exact_max) {
          std::fill_n(d_score, t_.columns(tile), T(0));
          for (index_t j = 0; j < tile.size() && !found[i]; ++j)
            if (t_.score(i)[j] == of_chunk) d_score[j] = d, found[i] = true;
        } else if (found[i]) {
          std::fill_n(d_score, t_.columns(tile), T(0));
        } else {
          simd::map<Isa>(
              t_.columns(tile), [&](auto const& s) { return d * simd::exp<Isa, T>(s - of_chunk); }, d_score,
              t_.score(i));
        }
      }
      t_.pull_scores(tile, first, last);
    });
  }

  chunk_tiles<Isa, T> const& t_;
  chunk_router_scratch<T> const& w_;
  index_t row_;
};

}  // namespace seqmix::inline v0::kernels::detail
