#pragma once

#include <numeric>

#include <seqmix/kernels/cpu/pack.hpp>
#include <seqmix/kernels/cpu/tile_product.hpp>
#include <seqmix/kernels/recurrence_shape.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// The additive recurrence S = e^g S + (write k) v' with at most one decay per head, a chunk of n tokens at a time. With
/// G_i the sum of g within the chunk:
///   O  = (scale Q e^G) S + (scale Q K' e^(G_i - G_j), j <= i) V,     S' = e^Gn S + (K e^(Gn - G))' V
/// Only differences G_i - G_j <= 0 are exponentiated. Source: Dao, Gu (arXiv 2405.21060), section 6, in the form for any
/// decay per head; the backward is its derivative.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: the state before every chunk, [chunks, H, K, Vp]. Bytes: H K Vp sizeof(T) a chunk.
template <class T>
struct recurrence_saved {
  T* states = nullptr;

  template <class Isa>
  static recurrence_saved carve(arena& a, recurrence_shape const& s) {
    return {a.take<T>(s.chunks_before(s.seq.count()) * s.heads * s.key_dim * simd::padded<Isa, T>(s.value_dim))};
  }
};

namespace detail {

template <class Isa, class T>
struct chunk_scratch {
  T *S, *q, *k, *v, *key_t, *P, *q_decayed, *k_decayed, *o;
  T *from_start, *to_end;  // e^G and e^(Gn - G)
  T *dS, *value_t, *S_t, *dS_t, *dout, *dP, *dq, *dk, *dv, *through_S, *through_dS, *column_sum;
  double *G, *dG;

  static chunk_scratch carve(arena& a, recurrence_shape const& s, bool backward) {
    index_t const C = s.chunk, Cp = simd::padded<Isa, T>(C), kp = simd::padded<Isa, T>(s.key_dim),
                  vp = simd::padded<Isa, T>(s.value_dim);
    chunk_scratch w{};
    w.S = a.take<T>(s.key_dim * vp);
    w.q = a.take<T>(C * kp);
    w.k = a.take<T>(C * kp);
    w.v = a.take<T>(Cp * vp);
    w.key_t = a.take<T>(s.key_dim * Cp);
    w.P = a.take<T>(C * Cp);
    w.q_decayed = a.take<T>(C * kp);
    w.k_decayed = a.take<T>(C * kp);
    w.o = a.take<T>(C * vp);
    w.from_start = a.take<T>(Cp);
    w.to_end = a.take<T>(Cp);
    w.G = a.take<double>(C);
    if (!backward) return w;
    w.dS = a.take<T>(s.key_dim * vp);
    w.value_t = a.take<T>(s.value_dim * Cp);
    w.S_t = a.take<T>(s.value_dim * kp);
    w.dS_t = a.take<T>(s.value_dim * kp);
    w.dout = a.take<T>(C * vp);
    w.dP = a.take<T>(C * Cp);
    w.dq = a.take<T>(C * kp);
    w.dk = a.take<T>(C * kp);
    w.dv = a.take<T>(C * vp);
    w.through_S = a.take<T>(C * kp);
    w.through_dS = a.take<T>(C * kp);
    w.column_sum = a.take<T>(Cp);
    w.dG = a.take<double>(C);
    return w;
  }
};

/// One head of one sequence.
template <class Isa, class T>
class chunkwise_head {
 public:
  chunkwise_head(recurrence_shape const& s, recurrence_input<T> const& in, index_t n, index_t h,
                 chunk_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), n_(n), h_(h), K_(s.key_dim), V_(s.value_dim), Cp_(simd::padded<Isa, T>(s.chunk)),
        kp_(simd::padded<Isa, T>(s.key_dim)), vp_(simd::padded<Isa, T>(s.value_dim)), first_(s.seq.begin(n)),
        rows_(s.seq.length(n)) {}

  void forward(view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv) {
    index_t chunk = s_.chunks_before(n_);
    T* S = saved && rows_ > 0 ? saved_state(*saved, chunk) : w_.S;
    load_state(in_.initial_nhkv, S);
    for (index_t at = 0; at < rows_; at += s_.chunk) {
      load_chunk(at);
      scores();
      tile_product<Isa>(count_, vp_, count_, tile_operand<T>{w_.P, Cp_, 1}, w_.v, vp_, w_.o, vp_, false);
      tile_product<Isa>(count_, vp_, K_, tile_operand<T>{w_.q_decayed, kp_, 1}, S, vp_, w_.o, vp_, true);
      write_rows(w_.o, vp_, count_, V_, T(1), o_rhv.at(first_ + at, h_), o_rhv.stride[0], false);
      T* const next = saved && at + count_ < rows_ ? saved_state(*saved, ++chunk) : w_.S;
      decay_state(S, next);
      tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.k_decayed, 1, kp_}, w_.v, vp_, next, vp_, true);
      S = next;
    }
    if (final_nhkv) store_state(S, final_nhkv);
  }

  void backward(recurrence_saved<T> const& saved, view3<T const> d_o_rhv, view4<T const> d_final_nhkv,
                recurrence_gradient<T> const& d, double* d_constant) {
    load_state(d_final_nhkv, w_.dS);
    *d_constant = 0.0;
    index_t const chunks = (rows_ + s_.chunk - 1) / s_.chunk, base = s_.chunks_before(n_);
    for (index_t c = chunks; c-- > 0;) {
      T const* const S = saved_state(saved, base + c);
      load_chunk(c * s_.chunk);
      scores();
      chunk_backward(S, d_o_rhv);
      write_chunk(d, d_constant);
    }
    if (d.initial_nhkv) store_state(w_.dS, d.initial_nhkv);
  }

 private:
  index_t head(index_t heads) const noexcept { return h_ * heads / s_.heads; }
  bool begins_group(index_t heads) const noexcept { return h_ % (s_.heads / heads) == 0; }
  bool gated() const noexcept { return in_.g_rhk.data != nullptr; }
  T* saved_state(recurrence_saved<T> const& saved, index_t chunk) const noexcept {
    return saved.states + (chunk * s_.heads + h_) * K_ * vp_;
  }
  void load_state(view4<T const> from, T* to) const {
    if (!from) {
      std::fill_n(to, K_ * vp_, T(0));
      return;
    }
    copy_rows(from.at(n_, h_), from.stride[2], K_, V_, to, vp_);
  }
  void store_state(T const* from, view4<T> to) const {
    write_rows(from, vp_, K_, V_, T(1), to.at(n_, h_), to.stride[2], false);
  }
  double log_decay(index_t r) const noexcept { return gated() ? double(in_.g_rhk(r, head(s_.gate_heads), 0)) : 0.0; }
  T write_scale(index_t r) const noexcept { return in_.write_rh ? in_.write_rh(r, head(s_.gate_heads)) : T(1); }

  /// The chunk's scaled queries, keys, scaled values, running decay, and the decayed copies that meet the state.
  void load_chunk(index_t at) {
    at_ = at;
    count_ = (std::min)(s_.chunk, rows_ - at);
    index_t const r = first_ + at;
    copy_rows(in_.q_rhk.at(r, head(s_.query_heads)), in_.q_rhk.stride[0], count_, K_, w_.q, kp_);
    copy_rows(in_.k_rhk.at(r, head(s_.key_heads)), in_.k_rhk.stride[0], count_, K_, w_.k, kp_);
    copy_rows(in_.v_rhv.at(r, head(s_.value_heads)), in_.v_rhv.stride[0], count_, V_, w_.v, vp_);
    running_decay(r);
    for (index_t i = 0; i < count_; ++i) {
      if (in_.write_rh) multiply(w_.v + i * vp_, write_scale(r + i), vp_, w_.v + i * vp_);
      T const scale = T(s_.scale), from_start = w_.from_start[i], to_end = w_.to_end[i];
      simd::for_vectors<Isa, T>(kp_, [&](index_t c, auto const& lanes) {
        auto const q = lanes.load(w_.q + i * kp_ + c) * scale;
        lanes.store(w_.q + i * kp_ + c, q);
        lanes.store(w_.q_decayed + i * kp_ + c, q * from_start);
        lanes.store(w_.k_decayed + i * kp_ + c, lanes.load(w_.k + i * kp_ + c) * to_end);
      });
    }
    transpose(w_.k, kp_, count_, K_, w_.key_t, Cp_);
  }
  /// G in double; from the chunk's start to each token and from there to its end as factors.
  void running_decay(index_t r) {
    double sum = 0.0;
    for (index_t i = 0; i < count_; ++i) w_.G[i] = sum += log_decay(r + i);
    for (index_t i = 0; i < count_; ++i) {
      w_.from_start[i] = T(w_.G[i]);
      w_.to_end[i] = T(sum - w_.G[i]);
    }
    auto const exponential = [](auto const& x) { return simd::exp<Isa, T>(x); };
    simd::map<Isa>(count_, exponential, w_.from_start, w_.from_start);
    simd::map<Isa>(count_, exponential, w_.to_end, w_.to_end);
  }
  static void multiply(T const* from, T factor, index_t n, T* to) noexcept {
    simd::map<Isa>(n, [=](auto const& x) { return x * factor; }, to, from);
  }

  /// P_ij = q_i.k_j e^(G_i - G_j) for j <= i, else 0.
  void scores() {
    tile_product<Isa>(count_, Cp_, K_, tile_operand<T>{w_.q, kp_, 1}, w_.key_t, Cp_, w_.P, Cp_, false);
    for (index_t i = 0; i < count_; ++i) decay_row(i, w_.P + i * Cp_);
  }
  void decay_row(index_t i, T* row) {
    if (gated()) {
      alignas(64) T factor[64];
      for (index_t j0 = 0; j0 <= i; j0 += 64) {
        index_t const n = (std::min)(index_t(64), Cp_ - j0);
        for (index_t j = 0; j < n; ++j) factor[j] = j0 + j <= i ? T(w_.G[i] - w_.G[j0 + j]) : T(0);
        simd::map<Isa>(
            n, [](auto const& x, auto const& e) { return x * simd::exp<Isa, T>(e); }, row + j0, row + j0, factor);
      }
    }
    std::fill(row + i + 1, row + Cp_, T(0));
  }
  void decay_state(T const* from, T* to) const {
    if (gated() || from != to) multiply(from, w_.from_start[count_ - 1], K_ * vp_, to);
  }

  void chunk_backward(T const* S, view3<T const> d_o_rhv) {
    index_t const r = first_ + at_;
    copy_rows(d_o_rhv.at(r, h_), d_o_rhv.stride[0], count_, V_, w_.dout, vp_);
    transpose(w_.v, vp_, count_, V_, w_.value_t, Cp_);
    transpose(S, vp_, K_, V_, w_.S_t, kp_);
    transpose(w_.dS, vp_, K_, V_, w_.dS_t, kp_);

    tile_product<Isa>(count_, Cp_, V_, tile_operand<T>{w_.dout, vp_, 1}, w_.value_t, Cp_, w_.dP, Cp_, false);
    if (gated()) through_scores();
    for (index_t i = 0; i < count_; ++i) decay_row(i, w_.dP + i * Cp_);
    tile_product<Isa>(count_, kp_, V_, tile_operand<T>{w_.dout, vp_, 1}, w_.S_t, kp_, w_.through_S, kp_, false);
    tile_product<Isa>(count_, kp_, V_, tile_operand<T>{w_.v, vp_, 1}, w_.dS_t, kp_, w_.through_dS, kp_, false);
    tile_product<Isa>(count_, kp_, count_, tile_operand<T>{w_.dP, Cp_, 1}, w_.k, kp_, w_.dq, kp_, false);
    tile_product<Isa>(count_, kp_, count_, tile_operand<T>{w_.dP, 1, Cp_}, w_.q, kp_, w_.dk, kp_, false);
    tile_product<Isa>(count_, vp_, count_, tile_operand<T>{w_.P, 1, Cp_}, w_.dout, vp_, w_.dv, vp_, false);
    tile_product<Isa>(count_, vp_, K_, tile_operand<T>{w_.k_decayed, kp_, 1}, w_.dS, vp_, w_.dv, vp_, true);
    through_state(S);
    decay_state(w_.dS, w_.dS);
    tile_product<Isa>(K_, vp_, count_, tile_operand<T>{w_.q_decayed, 1, kp_}, w_.dout, vp_, w_.dS, vp_, true);
  }
  /// What reaches the running decay through the factors e^(G_i - G_j): P holds 0 for j > i.
  void through_scores() {
    std::fill_n(w_.column_sum, Cp_, T(0));
    for (index_t i = 0; i < count_; ++i) {
      T const *const dP = w_.dP + i * Cp_, *const P = w_.P + i * Cp_;
      simd::vec<Isa, T> row{};
      simd::for_vectors<Isa, T>(i, [&](index_t j, auto const& lanes) {
        auto const x = lanes.load(dP + j) * lanes.load(P + j);
        row += x;
        lanes.store(w_.column_sum + j, lanes.load(w_.column_sum + j) + x);
      });
      w_.dG[i] = double(simd::sum<Isa, T>(row));
    }
    for (index_t i = 0; i < count_; ++i) w_.dG[i] -= double(w_.column_sum[i]);
  }
  /// What reaches queries, keys and the running decay through the chunk's two states.
  void through_state(T const* S) {
    auto const dot = [](index_t n, T const* a, T const* b) {
      return double(simd::map_sum<Isa, T>(n, [](auto const& x, auto const& y) { return x * y; }, a, b));
    };
    double at_end = gated() ? double(w_.from_start[count_ - 1]) * dot(K_ * vp_, w_.dS, S) : 0.0;
    for (index_t i = 0; i < count_; ++i) {
      if (gated()) {
        double const read = dot(kp_, w_.q_decayed + i * kp_, w_.through_S + i * kp_);
        double const written = dot(kp_, w_.k_decayed + i * kp_, w_.through_dS + i * kp_);
        w_.dG[i] += read - written;
        at_end += written;
      }
      add(w_.through_S + i * kp_, w_.from_start[i], w_.dq + i * kp_);
      add(w_.through_dS + i * kp_, w_.to_end[i], w_.dk + i * kp_);
    }
    if (gated()) w_.dG[count_ - 1] += at_end;
  }
  void add(T const* x, T factor, T* to) const noexcept {
    simd::map<Isa>(kp_, [=](auto const& sum, auto const& part) { return sum + factor * part; }, to, to, x);
  }

  void write_chunk(recurrence_gradient<T> const& d, double* d_constant) {
    index_t const r = first_ + at_;
    write_rows(w_.dq, kp_, count_, K_, T(s_.scale), d.q_rhk.at(r, head(s_.query_heads)), d.q_rhk.stride[0],
               !begins_group(s_.query_heads));
    write_rows(w_.dk, kp_, count_, K_, T(1), d.k_rhk.at(r, head(s_.key_heads)), d.k_rhk.stride[0],
               !begins_group(s_.key_heads));
    bool const add_gate = !begins_group(s_.gate_heads);
    double after = 0.0;
    for (index_t i = count_; i-- > 0;) {
      T* const dv = w_.dv + i * vp_;
      if (d.write_rh) {
        T const* const v = in_.v_rhv.at(r + i, head(s_.value_heads));
        T const dw = simd::map_sum<Isa, T>(V_, [](auto const& x, auto const& y) { return x * y; }, dv, v);
        T& to = d.write_rh(r + i, head(s_.gate_heads));
        to = dw + (add_gate ? to : T(0));
      }
      if (in_.write_rh) multiply(dv, write_scale(r + i), vp_, dv);
      if (!gated() || !d.g_rhk) continue;
      after += w_.dG[i];
      if (in_.g_rhk.stride[0] == 0) {
        *d_constant += after;
      } else {
        T& to = d.g_rhk(r + i, head(s_.gate_heads), 0);
        to = T(after) + (add_gate ? to : T(0));
      }
    }
    write_rows(w_.dv, vp_, count_, V_, T(1), d.v_rhv.at(r, head(s_.value_heads)), d.v_rhv.stride[0],
               !begins_group(s_.value_heads));
  }

  recurrence_shape const& s_;
  recurrence_input<T> const& in_;
  chunk_scratch<Isa, T> const& w_;
  index_t n_, h_, K_, V_, Cp_, kp_, vp_, first_, rows_;
  index_t at_ = 0, count_ = 0;
};

}  // namespace detail
}  // namespace seqmix::inline v0::kernels
