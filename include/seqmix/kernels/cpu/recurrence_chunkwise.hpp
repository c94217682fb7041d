#pragma once

#include <numeric>

#include <seqmix/kernels/cpu/causal_tiles.hpp>
#include <seqmix/kernels/cpu/recurrence_tokens.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// The additive recurrence S = e^g S + (write k) v' with at most one decay per head, a chunk of n tokens at a time.
/// With G_i the sum of g within the chunk:
///   O  = (scale Q e^G) S + (scale Q K' e^(G_i - G_j), j <= i) V,     S' = e^Gn S + (K e^(Gn - G))' V
/// Only differences G_i - G_j <= 0 are exponentiated. Source: Dao, Gu (arXiv 2405.21060), section 6, in the form
/// for any decay per head; the backward is its derivative.
namespace seqmix::inline v0::kernels {

namespace detail {

/// One thread's memory. Of a chunk for all heads that share queries and keys, then of one head at a time; but every
/// head has its own state.
template <class Isa, class T>
struct chunk_scratch {
  T *q, *k, *key_t, *product, *S;
  T *v, *decay, *P, *o, *weighted, *from_start, *to_end;
  T *query_t, *d_product, *dq, *dk, *dq_t, *dk_t, *dS;
  T *value_t, *dout, *dout_t, *dP, *dv, *through_S, *through_dS, *column_sum, *read, *written;
  double *G, *dG;

  static chunk_scratch carve(arena& a, recurrence_shape const& s, index_t heads, bool backward) {
    index_t const C = s.chunk, Cp = simd::padded<Isa, T>(C), kp = simd::padded<Isa, T>(s.key_dim),
                  vp = simd::padded<Isa, T>(s.value_dim);
    chunk_scratch w{};
    for (T** p : {&w.q, &w.k}) *p = a.take<T>(C * kp);
    for (T** p : {&w.product, &w.decay, &w.P}) *p = a.take<T>(C * Cp);
    for (T** p : {&w.v, &w.o, &w.weighted}) *p = a.take<T>(C * vp);
    for (T** p : {&w.from_start, &w.to_end}) *p = a.take<T>(Cp);
    w.key_t = a.take<T>(s.key_dim * Cp);
    w.S = a.take<T>(heads * s.key_dim * vp);
    w.G = a.take<double>(Cp);
    if (!backward) return w;
    for (T** p : {&w.dq, &w.dk}) *p = a.take<T>(C * kp);
    for (T** p : {&w.query_t, &w.dq_t, &w.dk_t, &w.through_S, &w.through_dS}) *p = a.take<T>(s.key_dim * Cp);
    for (T** p : {&w.d_product, &w.dP}) *p = a.take<T>(C * Cp);
    for (T** p : {&w.dout, &w.dv}) *p = a.take<T>(C * vp);
    for (T** p : {&w.value_t, &w.dout_t}) *p = a.take<T>(s.value_dim * Cp);
    for (T** p : {&w.column_sum, &w.read, &w.written}) *p = a.take<T>(Cp);
    w.dS = a.take<T>(heads * s.key_dim * vp);
    w.dG = a.take<double>(C);
    return w;
  }
};

/// Some heads of one sequence, a chunk of all of them after the other; those that read the same queries and keys
/// form their products q.k once.
template <class Isa, class T>
class chunkwise_heads {
 public:
  /// How many heads share queries and keys; backward they stay together.
  static index_t sharing(recurrence_shape const& s) noexcept {
    return s.heads / std::lcm(s.query_heads, s.key_heads);
  }

  chunkwise_heads(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h, index_t count,
                  chunk_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(h), end_(h + count), K_(s.key_dim), V_(s.value_dim),
        Cp_(simd::padded<Isa, T>(s.chunk)), kp_(simd::padded<Isa, T>(s.key_dim)),
        vp_(simd::padded<Isa, T>(s.value_dim)), first_(s.seq.begin(n)), rows_(s.seq.length(n)) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    index_t chunk = s_.chunks_before(n_);
    for (index_t h = h_; h < end_; ++h)
      load_state(in_.initial_nhkv, h, saved && rows_ > 0 ? saved_state(*saved, chunk, h) : state(h));
    for (index_t at = 0; at < rows_; at += s_.chunk, ++chunk)
      for (index_t set = h_, next = h_; set < end_; set = next) {
        next = (std::min)(end_, (set / sharing(s_) + 1) * sharing(s_));
        load_chunk(at, set);
        bool const last = at + count_ == rows_;
        for (index_t h = set; h < next; ++h)
          head_forward(h, saved ? saved_state(*saved, chunk, h) : state(h),
                       saved && !last ? saved_state(*saved, chunk + 1, h) : state(h), o_rhv);
      }
    for (index_t h = h_; final_nhkv && h < end_; ++h) store_state(state(h), h, final_nhkv);
  }

  template <class Sums>
  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, Sums const& sums) {
    for (index_t h = h_; h < end_; ++h) load_state(d_final_nhkv, h, d_state(h));
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;)
      for (index_t set = h_; set < end_; set += sharing(s_)) {
        begin_set_backward(c, set);
        for (index_t h = set; h < set + sharing(s_); ++h) {
          head_backward(h, saved_state(saved, base + c, h), d_o_rhv);
          write_head(h, d, sums.at(n_, h).constant);
        }
        end_set_backward(set, d);
      }
    for (index_t h = h_; d.initial_nhkv && h < end_; ++h) store_state(d_state(h), h, d.initial_nhkv);
  }

 private:
  index_t of(index_t h, index_t heads) const noexcept { return h * heads / s_.heads; }
  bool begins_group(index_t h, index_t heads) const noexcept { return h % (s_.heads / heads) == 0; }
  bool gated() const noexcept { return in_.g_rhk.data != nullptr; }
  T* state(index_t h) const noexcept { return w_.S + (h - h_) * K_ * vp_; }
  T* d_state(index_t h) const noexcept { return w_.dS + (h - h_) * K_ * vp_; }
  T* saved_state(recurrence_saved<T> const& saved, index_t chunk, index_t h) const noexcept {
    return saved.states + (chunk * s_.heads + h) * K_ * vp_;
  }
  void load_state(view4<T const> from, index_t h, T* to) const {
    if (from)
      copy_rows(from.at(n_, h), from.stride[2], K_, V_, to, vp_);
    else
      std::fill_n(to, K_ * vp_, T(0));
  }
  void store_state(T const* from, index_t h, view4<T> to) const {
    write_rows(from, vp_, K_, V_, T(1), to.at(n_, h), to.stride[2], false);
  }
  double log_decay(index_t h, index_t r) const noexcept {
    return gated() ? double(in_.g_rhk(r, of(h, s_.gate_heads), 0)) : 0.0;
  }
  T write_scale(index_t h, index_t r) const noexcept {
    return in_.write_rh ? in_.write_rh(r, of(h, s_.gate_heads)) : T(1);
  }

  /// Rows of this chunk times factor(i) to padded rows.
  template <class Factor>
  void load_rows(T const* from, index_t from_row, index_t channels, index_t to_row, T* to,
                 Factor const& factor) const {
    for (index_t i = 0; i < count_; ++i) {
      T const f = factor(i);
      simd::for_vectors<Isa, T>(channels, [&](index_t c, auto const& lanes) {
        simd::store<Isa>(to + i * to_row + c, lanes.load(from + i * from_row + c) * f);
      });
    }
  }
  static constexpr auto unscaled = [](index_t) { return T(1); };

  /// The chunk's scaled queries, its keys and their products, of the heads that share those of head h.
  void load_chunk(index_t at, index_t h) {
    at_ = at;
    count_ = (std::min)(s_.chunk, rows_ - at);
    index_t const r = first_ + at;
    load_rows(in_.q_rhk.at(r, of(h, s_.query_heads)), in_.q_rhk.stride[0], K_, kp_, w_.q,
              [&](index_t) { return T(s_.scale); });
    load_rows(in_.k_rhk.at(r, of(h, s_.key_heads)), in_.k_rhk.stride[0], K_, kp_, w_.k, unscaled);
    transpose<Isa>(w_.k, kp_, count_, K_, w_.key_t, Cp_);
    causal().products(K_, {w_.q, kp_, 1}, w_.key_t, w_.product);
  }
  causal_tiles<Isa, T, 1> causal() const noexcept { return {count_, Cp_}; }
  /// One head's scaled values, running decay and weights P_ij = q_i.k_j e^(G_i - G_j) for j <= i.
  void load_head(index_t h) {
    index_t const r = first_ + at_;
    load_rows(in_.v_rhv.at(r, of(h, s_.value_heads)), in_.v_rhv.stride[0], V_, vp_, w_.v,
              [&](index_t i) { return write_scale(h, r + i); });
    running_decay(h, r);
    apply_decay(w_.product, w_.P);
  }
  /// G in double; from the chunk's start to each token and from there to its end as factors.
  void running_decay(index_t h, index_t r) {
    double sum = 0.0;
    for (index_t i = 0; i < count_; ++i) w_.G[i] = sum += log_decay(h, r + i);
    for (index_t i = 0; i < count_; ++i) {
      w_.from_start[i] = T(w_.G[i]);
      w_.to_end[i] = T(sum - w_.G[i]);
    }
    auto const exponential = [](auto const& x) { return simd::exp_of_weight<Isa, T>(x); };
    simd::map<Isa>(count_, exponential, w_.from_start, w_.from_start);
    simd::map<Isa>(count_, exponential, w_.to_end, w_.to_end);
    std::fill(w_.G + count_, w_.G + Cp_, sum);
    for (index_t i = 0; gated() && i < count_; ++i) decay_row(i);
    std::fill(w_.from_start + count_, w_.from_start + Cp_, T(0));
    std::fill(w_.to_end + count_, w_.to_end + Cp_, T(0));
  }
  /// e^(G_i - G_j) for j <= i, and anything behind that up to whole vectors.
  void decay_row(index_t i) const {
    T* const row = w_.decay + i * Cp_;
    index_t const end = simd::padded<Isa, T>(i + 1);
    for (index_t j = 0; j < end; ++j) row[j] = T(w_.G[i] - w_.G[j]);
    simd::map<Isa>(
        end, [](auto const& x) { return simd::exp_of_weight<Isa, T>(x); }, row, row);
  }
  /// to = from times the decay for j <= i, else 0.
  void apply_decay(T const* from, T* to) const {
    constexpr index_t lanes = Isa::template lanes<T>;
    for (index_t at = 0, i = 0; i < count_; ++i, at += Cp_)
      for (index_t j = 0; j < Cp_; j += lanes) {
        simd::vec<Isa, T> x{};
        if (j <= i) x = simd::load<Isa>(from + at + j);
        if (j <= i && gated()) x *= simd::load<Isa>(w_.decay + at + j);
        simd::store<Isa>(to + at + j, simd::first_lanes<Isa, T>(x, i + 1 - j));
      }
  }
  /// Rows of values times the decay that lies between them and the chunk's beginning or end.
  void weigh(T const* from, T const* decay, T* to) const {
    if (!gated() && from == to) return;
    for (index_t i = 0; i < count_; ++i) {
      T const factor = decay[i];
      simd::map<Isa>(
          vp_, [=](auto const& x) { return x * factor; }, to + i * vp_, from + i * vp_);
    }
  }
  /// The state behind the chunk without what the chunk writes.
  void decay_state(T const* from, T* to) const {
    T const factor = w_.from_start[count_ - 1];
    if (gated() || from != to)
      simd::map<Isa>(
          K_ * vp_, [=](auto const& x) { return x * factor; }, to, from);
  }

  void head_forward(index_t h, T const* before, T* after, view3<T> o_rhv) {
    load_head(h);
    for (index_t k = 0; k < K_; k += 64)
      tile_product<Isa>(count_, vp_, (std::min)(index_t(64), K_ - k), tile_operand<T>{w_.q + k, kp_, 1},
                        before + k * vp_, vp_, w_.o, vp_, k > 0);
    weigh(w_.o, w_.from_start, w_.o);
    if (simd::may_hold_nan<Isa>(w_.v, count_ * vp_))
      causal().sums_of_seen(w_.P, w_.v, vp_, w_.o, true);
    else
      causal().sums(w_.P, w_.v, vp_, w_.o, true);
    write_rows(w_.o, vp_, count_, V_, T(1), o_rhv.at(first_ + at_, h), o_rhv.stride[0], false);
    decay_state(before, after);
    weigh(w_.v, w_.to_end, w_.weighted);
    tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.k, 1, kp_}, w_.weighted, vp_, after, vp_, true);
  }

  void begin_set_backward(index_t c, index_t set) {
    load_chunk(c * s_.chunk, set);
    transpose<Isa>(w_.q, kp_, count_, K_, w_.query_t, Cp_);
    std::fill_n(w_.d_product, count_ * Cp_, T(0));
    std::fill_n(w_.dq_t, K_ * Cp_, T(0));
    std::fill_n(w_.dk_t, K_ * Cp_, T(0));
  }
  void end_set_backward(index_t set, recurrence_gradient<T> const& d) {
    transpose<Isa>(w_.dq_t, Cp_, K_, count_, w_.dq, kp_);
    transpose<Isa>(w_.dk_t, Cp_, K_, count_, w_.dk, kp_);
    causal().sums(w_.d_product, w_.k, kp_, w_.dq, true);
    causal().sums_back(w_.d_product, w_.q, kp_, w_.dk, true);
    write(set, w_.dq, T(s_.scale), d.q_rhk, s_.query_heads);
    write(set, w_.dk, T(1), d.k_rhk, s_.key_heads);
  }
  void head_backward(index_t h, T const* S, view3<T const> d_o_rhv) {
    T* const dS = d_state(h);
    load_head(h);
    load_rows(d_o_rhv.at(first_ + at_, h), d_o_rhv.stride[0], V_, vp_, w_.dout, unscaled);
    transpose<Isa>(w_.v, vp_, count_, V_, w_.value_t, Cp_);
    transpose<Isa>(w_.dout, vp_, count_, V_, w_.dout_t, Cp_);

    causal().products(V_, {w_.dout, vp_, 1}, w_.value_t, w_.dP);
    if (gated()) through_weights();
    apply_decay(w_.dP, w_.dP);
    simd::map<Isa>(
        count_ * Cp_, [](auto const& sum, auto const& d) { return sum + d; }, w_.d_product, w_.d_product, w_.dP);
    tile_product<Isa>(K_, Cp_, V_, tile_operand<T>{S, vp_, 1}, w_.dout_t, Cp_, w_.through_S, Cp_, false);
    tile_product<Isa>(K_, Cp_, V_, tile_operand<T>{dS, vp_, 1}, w_.value_t, Cp_, w_.through_dS, Cp_, false);
    tile_product<Isa>(count_, vp_, K_, tile_operand<T>{w_.k, kp_, 1}, dS, vp_, w_.dv, vp_, false);
    weigh(w_.dv, w_.to_end, w_.dv);
    causal().sums_back(w_.P, w_.dout, vp_, w_.dv, true);
    through_state(S, dS);
    decay_state(dS, dS);
    weigh(w_.dout, w_.from_start, w_.weighted);
    tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.q, 1, kp_}, w_.weighted, vp_, dS, vp_, true);
  }
  /// What reaches the running decay through the factors e^(G_i - G_j), j < i.
  void through_weights() {
    constexpr index_t lanes = Isa::template lanes<T>;
    std::fill_n(w_.column_sum, Cp_, T(0));
    for (index_t i = 0; i < count_; ++i) {
      T const *const dP = w_.dP + i * Cp_, *const P = w_.P + i * Cp_;
      simd::vec<Isa, T> row{};
      for (index_t j = 0; j < i; j += lanes) {
        auto const x = simd::first_lanes<Isa, T>(simd::load<Isa>(dP + j) * simd::load<Isa>(P + j), i - j);
        row += x;
        simd::store<Isa>(w_.column_sum + j, simd::load<Isa>(w_.column_sum + j) + x);
      }
      w_.dG[i] = double(simd::sum<Isa, T>(row));
    }
    for (index_t i = 0; i < count_; ++i) w_.dG[i] -= double(w_.column_sum[i]);
  }
  /// What reaches queries, keys and the running decay through the chunk's two states; tokens are the lanes.
  void through_state(T const* S, T const* dS) {
    simd::for_vectors<Isa, T>(Cp_, [&](index_t i, auto const& lanes) {
      auto const from_start = lanes.load(w_.from_start + i), to_end = lanes.load(w_.to_end + i);
      simd::vec<Isa, T> read{}, written{};
      for (index_t k = i; k < K_ * Cp_ + i; k += Cp_) {
        auto const through_S = lanes.load(w_.through_S + k) * from_start,
                   through_dS = lanes.load(w_.through_dS + k) * to_end;
        read += lanes.load(w_.query_t + k) * through_S;
        written += lanes.load(w_.key_t + k) * through_dS;
        lanes.store(w_.dq_t + k, lanes.load(w_.dq_t + k) + through_S);
        lanes.store(w_.dk_t + k, lanes.load(w_.dk_t + k) + through_dS);
      }
      lanes.store(w_.read + i, read);
      lanes.store(w_.written + i, written);
    });
    if (!gated()) return;
    auto const product = [](auto const& x, auto const& y) { return x * y; };
    double at_end = double(w_.from_start[count_ - 1]) * double(simd::map_sum<Isa, T>(K_ * vp_, product, dS, S));
    for (index_t i = 0; i < count_; ++i) {
      w_.dG[i] += double(w_.read[i]) - double(w_.written[i]);
      at_end += double(w_.written[i]);
    }
    w_.dG[count_ - 1] += at_end;
  }
  /// Rows of the chunk for queries or keys; added when an earlier head began them.
  void write(index_t h, T const* from, T scale, view3<T> to, index_t heads) const {
    write_rows(from, kp_, count_, K_, scale, to.at(first_ + at_, of(h, heads)), to.stride[0],
               !begins_group(h, heads));
  }
  void write_head(index_t h, recurrence_gradient<T> const& d, double* d_constant) {
    index_t const r = first_ + at_;
    bool const add_gate = !begins_group(h, s_.gate_heads);
    double after = 0.0;
    for (index_t i = count_; i-- > 0;) {
      T* const dv = w_.dv + i * vp_;
      if (d.write_rh) {
        T const* const v = in_.v_rhv.at(r + i, of(h, s_.value_heads));
        T const dw = simd::map_sum<Isa, T>(
            V_, [](auto const& x, auto const& y) { return x * y; }, dv, v);
        T& to = d.write_rh(r + i, of(h, s_.gate_heads));
        to = dw + (add_gate ? to : T(0));
      }
      if (in_.write_rh) {
        T const scale = write_scale(h, r + i);
        simd::map<Isa>(
            vp_, [=](auto const& x) { return x * scale; }, dv, dv);
      }
      if (!gated() || !d.g_rhk) continue;
      after += w_.dG[i];
      if (in_.g_rhk.stride[0] == 0) {
        *d_constant += after;
      } else {
        T& to = d.g_rhk(r + i, of(h, s_.gate_heads), 0);
        to = T(after) + (add_gate ? to : T(0));
      }
    }
    write_rows(w_.dv, vp_, count_, V_, T(1), d.v_rhv.at(r, of(h, s_.value_heads)), d.v_rhv.stride[0],
               !begins_group(h, s_.value_heads));
  }

  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  chunk_scratch<Isa, T> const& w_;
  index_t n_, h_, end_, K_, V_, Cp_, kp_, vp_, first_, rows_;
  index_t at_ = 0, count_ = 0;
};

}  // namespace detail
}  // namespace seqmix::inline v0::kernels
