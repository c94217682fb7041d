#pragma once

#include <algorithm>

#include <seqmix/kernels/attention_shape.hpp>
#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/tensor/arena.hpp>

/// What the attention kernels of the CPU share: where a head's tokens lie, how a gate biases scores, where the
/// derivatives of tokens go.
namespace seqmix::inline v0::kernels::detail {

/// A token's log-decay as part of a score bias is kept at or above this, so that sums and their differences are
/// finite; its derivative is 0 where the bound acts, NaN stays NaN.
inline constexpr double lowest_bias = -1e4;

/// One query head of one sequence: its rows, and its tokens 0 .. keys-1, those of the past first. Rows that bring
/// no keys leave those of the past.
template <class T>
struct head_place {
  attention_input<T> const* in;
  index_t sequence, head, key_head, value_head, gate_head;
  index_t first;  ///< row of the sequence's first query
  index_t rows, past, keys;
  index_t position;  ///< of the first query

  head_place(attention_shape const& s, attention_input<T> const& input, index_t n, index_t h) noexcept
      : in(&input), sequence(n), head(h), key_head(h * s.key_heads / s.heads),
        value_head(h * s.value_heads / s.heads), gate_head(h * s.gate_heads / s.heads), first(s.seq.begin(n)),
        rows(s.seq.length(n)), past(input.past(n)), keys(past + (input.queries_alone ? 0 : rows)),
        position(input.queries_alone ? input.position[n] : past) {}

  T const* query(index_t row) const noexcept { return in->q_rhk.at(first + row, head); }
  T const* key(index_t j) const noexcept {
    return j < past ? in->past_k_nlhk.at(sequence, j, key_head) : in->k_rhk.at(first + j - past, key_head);
  }
  T const* value(index_t j) const noexcept {
    return j < past ? in->past_v_nlhv.at(sequence, j, value_head) : in->v_rhv.at(first + j - past, value_head);
  }
  /// Keys [begin, end) to [channel][width], zero behind the last.
  template <class Isa>
  void transpose_keys(index_t begin, index_t end, index_t channels, T* to, index_t width) const noexcept {
    index_t const row = begin < past ? in->past_k_nlhk.stride[1] : in->k_rhk.stride[0];
    transpose_range<Isa>(begin, end, channels, to, width, row, [&](index_t j) { return key(j); });
  }
  template <class Isa>
  void transpose_values(index_t begin, index_t end, index_t channels, T* to, index_t width) const noexcept {
    index_t const row = begin < past ? in->past_v_nlhv.stride[1] : in->v_rhv.stride[0];
    transpose_range<Isa>(begin, end, channels, to, width, row, [&](index_t j) { return value(j); });
  }
  /// All keys, or values, to rows of `to_row`.
  void copy_keys(index_t channels, T* to, index_t to_row) const noexcept {
    copy_rows(key(0), past > 0 ? in->past_k_nlhk.stride[1] : 0, past, channels, to, to_row);
    if (keys > past) copy_rows(key(past), in->k_rhk.stride[0], keys - past, channels, to + past * to_row, to_row);
  }
  void copy_values(index_t channels, T* to, index_t to_row) const noexcept {
    copy_rows(value(0), past > 0 ? in->past_v_nlhv.stride[1] : 0, past, channels, to, to_row);
    if (keys > past) copy_rows(value(past), in->v_rhv.stride[0], keys - past, channels, to + past * to_row, to_row);
  }
  bool gated() const noexcept { return in->g_rhk.data != nullptr; }
  bool constant_gate() const noexcept { return in->g_rhk.stride[0] == 0; }
  T log_decay(index_t j) const noexcept {
    if (constant_gate()) return in->g_rhk(0, gate_head, 0);
    return j < past ? in->past_g_nlhk(sequence, j, gate_head, 0) : in->g_rhk(first + j - past, gate_head, 0);
  }

 private:
  /// Tokens of one kind lie `row` apart; where the past ends inside the range they go one by one.
  template <class Isa, class Token>
  void transpose_range(index_t begin, index_t end, index_t channels, T* to, index_t width, index_t row,
                       Token const& token) const noexcept {
    if (begin < end && (begin >= past || end <= past))
      return transpose<Isa>(token(begin), row, end - begin, channels, to, width);
    for (index_t j = 0; j < width; ++j) {
      T const* const from = begin + j < end ? token(begin + j) : nullptr;
      for (index_t c = 0; c < channels; ++c) to[c * width + j] = from ? from[c] : T(0);
    }
  }
};

/// sums[j] = G_j: the log-decays of tokens 0 .. j (of tokens 1 .. j when constant), in double, each bounded.
template <class T>
void running_decay(head_place<T> const& p, double* sums) noexcept {
  if (!p.gated()) return;
  double sum = 0.0;
  for (index_t j = 0; j < p.keys; ++j) {
    double g = double(p.log_decay(j));
    g = g < lowest_bias ? lowest_bias : g;
    sum = p.constant_gate() ? g * double(j) : sum + g;
    sums[j] = sum;
  }
}

/// Derivatives of a head's tokens, summed over its queries: d_key [keys] rows of kp, d_value rows of vp, d_sums of
/// G_j. Written by the first query head of a group, added by the others; that of a constant gate goes to
/// *d_constant.
template <class T>
void write_token_gradients(attention_shape const& s, head_place<T> const& p, T const* d_key, index_t kp,
                           T const* d_value, index_t vp, double const* d_sums, attention_gradient<T> const& d,
                           double* d_constant) noexcept {
  auto const put = [&](view4<T> const& past, view3<T> const& rows, index_t count, index_t heads, index_t j,
                       auto const& of) {
    if ((j < p.past ? past.data : rows.data) == nullptr) return;
    index_t const h = p.head * heads / s.heads;
    bool const begins = p.head % (s.heads / heads) == 0;
    T* const to = j < p.past ? past.at(p.sequence, j, h) : rows.at(p.first + j - p.past, h);
    for (index_t c = 0; c < count; ++c) to[c] = of(c) + (begins ? T(0) : to[c]);
  };
  for (index_t j = 0; j < p.keys; ++j) {
    put(d.past_k_nlhk, d.k_rhk, s.key_dim, s.key_heads, j, [&](index_t c) { return d_key[j * kp + c]; });
    put(d.past_v_nlhv, d.v_rhv, s.value_dim, s.value_heads, j, [&](index_t c) { return d_value[j * vp + c]; });
  }
  if (!p.gated()) return;
  if (p.constant_gate()) {
    double sum = 0.0;
    for (index_t j = 0; j < p.keys; ++j) sum += d_sums[j] * double(j);
    *d_constant = double(p.log_decay(0)) < lowest_bias ? 0.0 : sum;
    return;
  }
  double after = 0.0;
  for (index_t j = p.keys; j-- > 0;) {
    after += d_sums[j];
    T const dg = double(p.log_decay(j)) < lowest_bias ? T(0) : T(after);
    put(d.past_g_nlhk, d.g_rhk, 1, s.gate_heads, j, [&](index_t) { return dg; });
  }
}

/// d_g of a constant gate: the sums of d_constant [N,H] in the order of heads and sequences.
template <class T>
void write_constant_gate(attention_shape const& s, view3<T const> g_rhk, double const* d_constant,
                         view3<T> d_g_rhk) noexcept {
  if (!g_rhk || g_rhk.stride[0] != 0 || !d_g_rhk) return;
  for (index_t h = 0; h < s.gate_heads; ++h) d_g_rhk(0, h, 0) = T(0);
  for (index_t h = 0; h < s.heads; ++h) {
    double sum = 0.0;
    for (index_t n = 0; n < s.seq.count(); ++n) sum += d_constant[n * s.heads + h];
    d_g_rhk(0, h * s.gate_heads / s.heads, 0) += T(sum);
  }
}

/// d_sink [H]: the sums of partial [N,H] in the order of sequences.
template <class T>
void write_sink(attention_shape const& s, double const* partial, view1<T> d_sink_h) noexcept {
  for (index_t h = 0; h < s.heads && d_sink_h; ++h) {
    double sum = 0.0;
    for (index_t n = 0; n < s.seq.count(); ++n) sum += partial[n * s.heads + h];
    d_sink_h(h) = T(sum);
  }
}

/// Tokens of the longest sequence, its past included; a dry run plans for a full cache.
template <class T>
index_t longest_with_past(attention_shape const& s, attention_input<T> const& in, bool dry) noexcept {
  if (dry) return s.seq.longest() + in.past_k_nlhk.extent[1];
  index_t most = 0;
  for (index_t n = 0; n < s.seq.count(); ++n) most = (std::max)(most, s.seq.length(n) + in.past(n));
  return most;
}

/// One scratch per thread, carved behind one another; nullptr on a measuring arena.
template <class Scratch, class Make>
Scratch* scratch_of_threads(arena& ws, int threads, Make const& make) {
  Scratch* const all = ws.take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch const one = make();
    if (all) all[t] = one;
  }
  return all;
}

}  // namespace seqmix::inline v0::kernels::detail
