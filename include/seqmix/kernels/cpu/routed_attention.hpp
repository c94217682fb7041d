#pragma once

#include <numeric>

#include <seqmix/kernels/cpu/chunk_router.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// Softmax attention for the selectors that choose chunks per query. Queries are gathered by the chunks they chose,
/// so that a tile of keys serves many of them and a query costs what it sees; no T x T and no T x T / chunk memory.
/// Work is cut by (sequence, head); shared key heads add up in the order of their query heads.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward. Bytes: R H (top_k sizeof(index_t) + 2 sizeof(T)).
template <class Which, class T>
struct routed_saved {
  index_t* choice = nullptr;  ///< [R,H,top_k]
  T* lse = nullptr;           ///< [R,H] over the keys seen
  T* weight = nullptr;        ///< [R,H] on the output, when gated

  static routed_saved carve(arena& a, attention_shape const& s) {
    index_t const count = s.seq.rows() * s.heads;
    routed_saved saved;
    saved.choice = a.take<index_t>(count * choices_per_query(Which::spec, s.select));
    saved.lse = a.take<T>(count);
    if (Which::spec.gradient == chunk_gradient::gated) saved.weight = a.take<T>(count);
    return saved;
  }
};

namespace detail {

/// One thread's memory for one head of one sequence of at most `keys` tokens, past ones included.
template <class Which, class Isa, class T>
struct routed_scratch {
  chunk_tile_scratch<T> tile;
  chunk_router_scratch<T> router;
  routed_rows<T> routed;
  T* weight;                               ///< [rows] on the output
  index_t *order, *start;                  ///< rows in the order of their chunks; where each chunk's begin
  selectors::detail::softmax_run<T>* run;  ///< [rows]
  T *acc, *tile_acc;                       ///< [rows] weighted values; those of a block
  T *d_q, *g_output;                       ///< [rows]

  static routed_scratch carve(arena& a, attention_shape const& s, index_t keys, bool backward) {
    index_t const kp = simd::padded<Isa, T>(s.key_dim), vp = simd::padded<Isa, T>(s.value_dim);
    routed_scratch w{};
    w.tile = chunk_tile_scratch<T>::template carve<Isa>(a, s, keys, backward);
    w.router = chunk_router_scratch<T>::template carve<Which, Isa>(a, s, keys, backward);
    index_t const choices = choices_per_query(Which::spec, s.select);
    w.routed.choice = a.take<index_t>(keys * choices);
    w.routed.valid = a.take<T>(keys);
    w.routed.per_row = choices;
    w.weight = a.take<T>(keys);
    w.order = a.take<index_t>(keys * choices);
    w.start = a.take<index_t>(chunk_grid::of<Isa, T>(keys, s.select.chunk).count + 1);
    if (!backward) {
      w.run = a.take<selectors::detail::softmax_run<T>>(keys);
      w.acc = a.take<T>(keys * vp);
      w.tile_acc = a.take<T>(block_rows * vp);
      return w;
    }
    w.d_q = a.take<T>(keys * kp);
    w.g_output = a.take<T>(keys);
    return w;
  }
};

/// One head of one sequence.
template <class Which, class Isa, class T>
class routed_head {
 public:
  routed_head(attention_shape const& s, attention_input<T> const& in, index_t n, index_t h,
              routed_scratch<Which, Isa, T> const& scratch)
      : w_(scratch), t_(s, in, n, h, scratch.tile), router_(t_, scratch.router) {}
  routed_head(routed_head const&) = delete;
  routed_head& operator=(routed_head const&) = delete;

  /// Keys, their means and the gate: what scores need.
  void pack_keys() const noexcept {
    t_.pack_keys();
    router_.average_keys();
  }
  void begin_scores() const noexcept {
    running_decay(t_.place, t_.w.g);
    router_.average_biases();
  }

  void choose() const noexcept {
    for_blocks([&](index_t i0) {
      t_.load_queries();
      router_.choose(w_.routed.from(i0), w_.weight + i0);
    });
  }
  /// The choice that heads [h, end) share; this one is the first of them.
  static void choose_together(attention_shape const& s, attention_input<T> const& in, index_t n, index_t h,
                              index_t end, routed_scratch<Which, Isa, T> const& scratch) noexcept {
    routed_head const first(s, in, n, h, scratch);
    first.for_blocks([&](index_t i0) {
      first.router_.clear_sums();
      for (index_t member = h; member < end; ++member) {
        routed_head const head(s, in, n, member, scratch);
        head.begin_scores();
        head.t_.load_queries();
        head.router_.add_probabilities();
      }
      first.router_.choose_by_sums(scratch.routed.from(i0));
    });
  }

  void weigh() const noexcept {
    for_blocks([&](index_t i0) {
      t_.load_queries();
      router_.weigh(w_.routed.from(i0), w_.weight + i0);
    });
  }

  void forward(view3<T> o_rhv, routed_saved<Which, T> const* saved, attention_record const& record) const noexcept {
    index_t const rows = t_.place.rows;
    t_.pack_values();
    std::fill_n(w_.acc, rows * t_.vp, T(0));
    std::fill_n(w_.run, rows, t_.first_run());
    for_seen_blocks([&] { absorb_block(); });
    for (index_t i = 0; i < rows; ++i) finish_row(i, o_rhv, saved, record);
  }

  void backward(view3<T const> o_rhv, view3<T const> d_o_rhv, routed_saved<Which, T> const& saved,
                attention_gradient<T> const& d, double* d_constant, double* d_sink) const noexcept {
    index_t const rows = t_.place.rows;
    t_.pack_for_backward();
    running_decay(t_.place, t_.w.g);
    std::fill_n(w_.d_q, rows * t_.kp, T(0));
    for (index_t i = 0; i < rows; ++i) {
      std::copy_n(saved.choice + at(i) * w_.routed.per_row, w_.routed.per_row, w_.routed.of(i));
      w_.weight[i] = gated ? saved.weight[at(i)] : T(1);
      T const* const g = d_o_rhv.at(t_.place.first + i, t_.place.head);
      T const* const o = o_rhv.at(t_.place.first + i, t_.place.head);
      // In the order of tile_product, so that a row that sees one key alone gets exact zeros.
      T dot = T(0);
      for (index_t c = 0; c < t_.s.value_dim; ++c) dot += g[c] * o[c];
      w_.g_output[i] = dot;
    }
    *d_sink = sink_gradient(saved);
    for_seen_blocks([&] { pull_block(d_o_rhv, saved); });
    if constexpr (Which::spec.gradient != chunk_gradient::index_constant) pull_router(d_o_rhv);
    T const scale = t_.q_scale();
    if (d.q_rhk)
      for (index_t i = 0; i < rows; ++i)
        write_rows(w_.d_q + i * t_.kp, 0, 1, t_.s.key_dim, scale, d.q_rhk.at(t_.place.first + i, t_.place.head), 0,
                   false);
    write_token_gradients(t_.s, t_.place, t_.w.d_key, t_.kp, t_.w.d_value, t_.vp, t_.w.d_g, d, d_constant);
  }

 private:
  static constexpr bool gated = Which::spec.gradient == chunk_gradient::gated;

  index_t at(index_t row) const noexcept { return (t_.place.first + row) * t_.s.heads + t_.place.head; }

  /// f(first row) with the block of consecutive queries from there.
  template <class F>
  void for_blocks(F const& f) const {
    for (index_t i0 = 0; i0 < t_.place.rows; i0 += block_rows) {
      t_.rows.clear();
      for (index_t i = i0; i < (std::min)(i0 + block_rows, t_.place.rows); ++i) t_.rows.add(i, {});
      f(i0);
    }
  }

  /// f() for blocks of queries and the keys they see: first those they always see, then chunk by chunk those that
  /// its choosers see in it. A query meets its keys in the same order whatever the others chose.
  template <class F>
  void for_seen_blocks(F const& f) const {
    for_blocks([&](index_t i0) {
      for (index_t i = 0; i < t_.rows.count; ++i)
        t_.rows.seen[std::size_t(i)] = seen_always<Which>(t_.place.past + i0 + i, t_.s.select);
      f();
    });
    group_by_chunk();
    for (index_t c = 0; c < t_.grid.count; ++c)
      for (index_t x0 = w_.start[c]; x0 < w_.start[c + 1]; x0 += block_rows) {
        t_.rows.clear();
        for (index_t x = x0; x < (std::min)(x0 + block_rows, w_.start[c + 1]); ++x)
          t_.rows.add(w_.order[x], seen_by_choice<Which>(t_.place.past + w_.order[x], c, t_.grid, t_.s.select));
        f();
      }
  }
  /// Counting sort of the rows by choice, a row under each of its choices; within a chunk they stay in ascending
  /// order.
  void group_by_chunk() const noexcept {
    index_t const k = w_.routed.per_row;
    index_t const* const choice = w_.routed.choice;
    std::fill_n(w_.start, t_.grid.count + 1, index_t(0));
    for (index_t x = 0; x < t_.place.rows * k; ++x)
      if (choice[x] >= 0) ++w_.start[choice[x] + 1];
    std::partial_sum(w_.start, w_.start + t_.grid.count + 1, w_.start);
    for (index_t i = 0; i < t_.place.rows; ++i)
      for (index_t x = i * k; x < (i + 1) * k; ++x)
        if (choice[x] >= 0) w_.order[w_.start[choice[x]]++] = i;
    for (index_t c = t_.grid.count; c > 0; --c) w_.start[c] = w_.start[c - 1];
    w_.start[0] = 0;
  }

  void absorb_block() const noexcept {
    t_.load_queries();
    for (index_t i = 0; i < t_.rows.count; ++i)
      std::copy_n(w_.acc + t_.rows.row[std::size_t(i)] * t_.vp, t_.vp, w_.tile_acc + i * t_.vp);
    t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) {
      t_.score_tile(tile, first, last);
      alignas(64) T factor[block_rows];
      selectors::detail::absorb_rows<Isa>(
          [&](index_t i) -> auto& { return w_.run[t_.rows.row[std::size_t(first + i)]]; }, t_.score(first),
          block_keys, t_.columns(tile), last - first, factor);
      for (index_t i = first; i < last; ++i)
        if (T const x = factor[i - first]; x != T(1))
          simd::map<Isa>(
              t_.vp, [=](auto const& acc) { return acc * x; }, w_.tile_acc + i * t_.vp, w_.tile_acc + i * t_.vp);
      t_.add_values(tile, first, last, w_.tile_acc);
    });
    for (index_t i = 0; i < t_.rows.count; ++i)
      std::copy_n(w_.tile_acc + i * t_.vp, t_.vp, w_.acc + t_.rows.row[std::size_t(i)] * t_.vp);
  }

  void finish_row(index_t i, view3<T> o_rhv, routed_saved<Which, T> const* saved,
                  attention_record const& record) const {
    auto const& run = w_.run[i];
    T const weight = w_.weight[i];
    T const factor = run.inverse_sum() * weight;
    T* const o = o_rhv.at(t_.place.first + i, t_.place.head);
    for (index_t c = 0; c < t_.s.value_dim; ++c) o[c] = factor == T(0) ? T(0) : factor * w_.acc[i * t_.vp + c];
    if (saved) {
      std::copy_n(w_.routed.of(i), w_.routed.per_row, saved->choice + at(i) * w_.routed.per_row);
      saved->lse[at(i)] = weight == weight ? run.lse() : weight;
      if (gated) saved->weight[at(i)] = weight;
    }
    if (record.choice_rh) record.choice_rh(t_.place.first + i, t_.place.head) = *w_.routed.of(i);
    for (index_t x = 0; record.choices_rhk && x < record.choices_rhk.extent[2]; ++x)
      record.choices_rhk(t_.place.first + i, t_.place.head, x) = x < w_.routed.per_row ? w_.routed.of(i)[x] : -1;
    if (record.lse_rh)
      record.lse_rh(t_.place.first + i, t_.place.head) =
          run.sum == T(0) ? -std::numeric_limits<double>::infinity() : double(run.lse());
  }

  /// Softmax's derivative at the keys that the block sees. The weight of a gated row multiplies its upstream
  /// gradient.
  void pull_block(view3<T const> d_o_rhv, routed_saved<Which, T> const& saved) const noexcept {
    t_.load_queries();
    load_upstream(d_o_rhv, gated);
    std::fill_n(t_.w.d_q, t_.rows.count * t_.kp, T(0));
    t_.for_tiles([&](key_tile const& tile, index_t first, index_t last) {
      t_.score_tile(tile, first, last);
      t_.gv_tile(tile, first, last);
      for (index_t i = first; i < last; ++i) {
        index_t const row = t_.rows.row[std::size_t(i)];
        selectors::detail::softmax_pullback<Isa>(saved.lse[at(row)], w_.g_output[row], t_.score(i), t_.gv(i),
                                                 t_.d_score(i), t_.columns(tile));
      }
      t_.pull_weights(tile, first, last);
    });
    add_d_q();
  }
  /// The sink's weight times g.(0 - o): of a gated row, the weight on the output is in g.o already.
  double sink_gradient(routed_saved<Which, T> const& saved) const noexcept {
    double sum = 0.0;
    if (!t_.place.in->sink_h) return sum;
    T const sink = t_.place.in->sink_h(t_.place.head);
    for (index_t i = 0; i < t_.place.rows; ++i)
      sum += double(selectors::detail::sink_pullback(saved.lse[at(i)], w_.g_output[i], sink));
    return sum;
  }
  void pull_router(view3<T const> d_o_rhv) const noexcept {
    router_.average_keys();
    router_.average_biases();
    router_.clear_gradients();
    for_blocks([&](index_t i0) {
      t_.load_queries();
      load_upstream(d_o_rhv, false);
      std::fill_n(t_.w.d_q, t_.rows.count * t_.kp, T(0));
      router_.backward(w_.routed.from(i0), w_.g_output + i0);
      add_d_q();
    });
    router_.finish_gradients();
  }
  void load_upstream(view3<T const> d_o_rhv, bool weighted) const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      index_t const row = t_.rows.row[std::size_t(i)];
      T* const g = t_.w.dout + i * t_.vp;
      copy_rows(d_o_rhv.at(t_.place.first + row, t_.place.head), 0, 1, t_.s.value_dim, g, t_.vp);
      if (weighted)
        for (index_t c = 0; c < t_.s.value_dim; ++c) g[c] *= w_.weight[row];
    }
  }
  void add_d_q() const noexcept {
    for (index_t i = 0; i < t_.rows.count; ++i) {
      T* const to = w_.d_q + t_.rows.row[std::size_t(i)] * t_.kp;
      for (index_t c = 0; c < t_.kp; ++c) to[c] += t_.w.d_q[i * t_.kp + c];
    }
  }

  routed_scratch<Which, Isa, T> const& w_;
  chunk_tiles<Isa, T> t_;
  chunk_router<Which, Isa, T> router_;
};

}  // namespace detail

/// o [R,H,V] = softmax attention over the keys that each query sees with its chosen chunks; times P of the choice
/// when the selector is gated. The lowest indices win ties; a NaN among the scores that decide or are seen makes
/// the row NaN. `saved` is nullptr when no backward follows. Work: 2 K + 2 V flops a visible pair; the router's 2 K
/// a query and chunk (means) or pair of query and key (exact). Deterministic: the same bits for any number of
/// threads.   Errors: value_error, shape_error (see validate).
template <class Which, class Isa, class Threads, class T>
void routed_attention_forward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                              attention_input<T> const& in, view3<same<T>> o_rhv,
                              routed_saved<Which, same<T>> const* saved, attention_record const& record,
                              arena& ws) {
  static_assert(Which::spec.routed, "seqmix attention: this selector chooses no chunk; take attention_forward");
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, how_spec{.takes_sink = true}, in.sink_h);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::routed_scratch<Which, Isa, T>>(
      ws, thread_count(dev), [&] { return detail::routed_scratch<Which, Isa, T>::carve(ws, s, keys, false); });
  bool const together = choose_together(Which::spec, s.select);
  index_t const units = together ? s.key_heads : s.heads;
  index_t const group = s.heads / units;
  parallel_for(dev, s.seq.count() * units, [&](index_t unit, int thread) {
    using head_type = detail::routed_head<Which, Isa, T>;
    index_t const n = unit / units, first = unit % units * group;
    auto const& memory = scratch[thread];
    head_type(s, in, n, first, memory).pack_keys();
    if (together) head_type::choose_together(s, in, n, first, first + group, memory);
    for (index_t h = first; h < first + group; ++h) {
      head_type const head(s, in, n, h, memory);
      head.begin_scores();
      if (together)
        head.weigh();
      else
        head.choose();
      head.forward(o_rhv, saved, record);
    }
  });
}

/// The derivatives of routed_attention_forward by the selector's gradient: scores are recomputed from q and k,
/// choices taken from what was saved. index_constant costs what forward does; the others score all chunks once
/// more, and chunk_straight_through reads g.v of all earlier keys.
template <class Which, class Isa, class Threads, class T>
void routed_attention_backward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                               attention_input<T> const& in, view3<same<T> const> o_rhv,
                               routed_saved<Which, same<T>> const& saved, view3<same<T> const> d_o_rhv,
                               attention_gradient<same<T>> const& d, arena& ws) {
  static_assert(Which::spec.routed, "seqmix attention: this selector chooses no chunk; take attention_backward");
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, how_spec{.takes_sink = true}, in.sink_h);
  expect_shape("attention output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  index_t const keys = detail::longest_with_past(s, in, dev.dry);
  auto* const scratch = detail::scratch_of_threads<detail::routed_scratch<Which, Isa, T>>(
      ws, thread_count(dev), [&] { return detail::routed_scratch<Which, Isa, T>::carve(ws, s, keys, true); });
  double* const d_constant = ws.take<double>(s.seq.count() * s.heads);
  double* const d_sink = ws.take<double>(s.seq.count() * s.heads);
  index_t const groups = std::gcd(std::gcd(s.key_heads, s.value_heads), s.gate_heads);
  index_t const group = s.heads / groups;
  parallel_for(dev, s.seq.count() * groups, [&](index_t unit, int thread) {
    index_t const n = unit / groups;
    for (index_t h = unit % groups * group; h < (unit % groups + 1) * group; ++h)
      detail::routed_head<Which, Isa, T>(s, in, n, h, scratch[thread])
          .backward(o_rhv, d_o_rhv, saved, d, d_constant + n * s.heads + h, d_sink + n * s.heads + h);
  });
  if (dev.dry) return;
  detail::write_constant_gate<T>(s, in.g_rhk, d_constant, d.g_rhk);
  if (in.sink_h) detail::write_sink<T>(s, d_sink, d.sink_h);
}

}  // namespace seqmix::inline v0::kernels
