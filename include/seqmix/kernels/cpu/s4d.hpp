#pragma once

#include <algorithm>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/kernels/reference/s4d.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// S4D on the CPU: channels as lanes, a vector of them a block; states stay in registers while a chunk's tokens
/// pass. Blocks and sequences in parallel. The discretisation is computed in double whatever the numbers are.
namespace seqmix::inline v0::kernels {

/// What forward keeps for backward: the state before every chunk, [slots, blocks, P, 2, lanes].
/// Bytes: 2 H P sizeof(T) for every chunk and sequence, H rounded up to whole vectors.
template <class T>
struct s4d_saved {
  T* states = nullptr;

  template <class Isa>
  static s4d_saved carve(arena& a, s4d_shape const& s);
};

namespace detail {

/// How channels and sequences are cut, from the shape alone.
template <class Isa, class T>
struct s4d_cut {
  static constexpr index_t lanes = Isa::template lanes<T>;
  /// States that stay in registers together: six numbers each and two of its own, in backward 14.
  static constexpr int forward_states = Isa::registers >= 32 ? 4 : 2, backward_states = forward_states / 2;
  static constexpr index_t wanted_units = 64;
  index_t blocks, pairs;  ///< pairs: filled up with states that stay 0
  index_t groups;         ///< of consecutive sequences; sums over rows are added group by group

  explicit s4d_cut(s4d_shape const& s)
      : blocks((s.channels + lanes - 1) / lanes),
        pairs((s.pairs + forward_states - 1) / forward_states * forward_states),
        groups((std::min)(s.seq.count(), (wanted_units + blocks - 1) / blocks)) {}
  index_t state() const noexcept { return pairs * 2 * lanes; }
  index_t table() const noexcept { return pairs * 6 * lanes; }
  index_t group_begin(s4d_shape const& s, index_t group) const noexcept { return group * s.seq.count() / groups; }
  /// Where a sequence's first chunk is kept; every sequence has room for all of its chunks.
  static index_t slot(s4d_shape const& s, index_t n) noexcept { return s.seq.begin(n) / s.chunk + n; }
};

/// E, Bbar and 2 C of every state: a block's [P, 6, lanes] behind one another, 0 where there is no state.
template <class Isa, class Threads, class T>
T* s4d_table(device::basic_cpu<Isa, Threads> dev, s4d_shape const& s, s4d_input<T> const& in, arena& ws) {
  using cut_type = s4d_cut<Isa, T>;
  constexpr index_t lanes = cut_type::lanes;
  cut_type const cut(s);
  T* const all = ws.take<T>(cut.blocks * cut.table());
  parallel_for(dev, cut.blocks, [&](index_t b, int) {
    T* const table = all + b * cut.table();
    std::fill_n(table, cut.table(), T(0));
    for (index_t h = b * lanes; h < (std::min)(s.channels, (b + 1) * lanes); ++h)
      for (index_t p = 0; p < s.pairs; ++p) {
        s4d_step<double> const step(double(in.log_dt_h(h)), double(in.log_A_real_hp(h, p)),
                                    double(in.A_imag_hp(h, p)), s.decay_offset);
        T* const to = table + p * 6 * lanes + h % lanes;
        to[0] = T(step.E.re), to[lanes] = T(step.E.im);
        to[2 * lanes] = T(step.B.re), to[3 * lanes] = T(step.B.im);
        to[4 * lanes] = T(2) * in.C_hpc(h, p, 0), to[5 * lanes] = T(2) * in.C_hpc(h, p, 1);
      }
  });
  return all;
}

/// One thread's memory: a state and its derivative, a chunk's tokens (y: its derivative in a backward), the states
/// of some pairs before each.
template <class Isa, class T>
struct s4d_scratch {
  T *x, *d_x, *u, *y, *d_u, *history;

  static s4d_scratch carve(arena& a, s4d_shape const& s, bool backward) {
    using cut = s4d_cut<Isa, T>;
    index_t const rows = s.chunk * cut::lanes;
    s4d_scratch w{};
    w.x = a.take<T>(cut(s).state());
    for (T** p : {&w.u, &w.y}) *p = a.take<T>(rows);
    if (!backward) return w;
    w.d_x = a.take<T>(cut(s).state());
    w.d_u = a.take<T>(rows);
    w.history = a.take<T>((s.chunk + 1) * cut::backward_states * 2 * cut::lanes);
    return w;
  }
};

/// `States` neighbouring states of a block of channels: their numbers in registers.
template <class Isa, class T, int States>
struct s4d_states {
  using V = simd::vec<Isa, T>;
  static constexpr index_t lanes = Isa::template lanes<T>;
  static constexpr auto size = std::size_t(States);
  V er[size], ei[size], br[size], bi[size], cr[size], ci[size];

  SEQMIX_INLINE explicit s4d_states(T const* table) noexcept {
    for (int j = 0; j < States; ++j, table += 6 * lanes) {
      er[j] = simd::load<Isa>(table), ei[j] = simd::load<Isa>(table + lanes);
      br[j] = simd::load<Isa>(table + 2 * lanes), bi[j] = simd::load<Isa>(table + 3 * lanes);
      cr[j] = simd::load<Isa>(table + 4 * lanes), ci[j] = simd::load<Isa>(table + 5 * lanes);
    }
  }

  /// Passes `count` tokens: y += 2 Re C x, unless nullptr; the state before each token and after the last goes to
  /// `history` [count + 1, States, 2, lanes], unless nullptr.
  SEQMIX_INLINE void advance(index_t count, T const* u, T* x, T* y, T* history) const noexcept {
    V xr[size], xi[size];
    load(x, xr, xi);
    for (index_t t = 0; t < count; ++t) {
      if (history) store(history + t * States * 2 * lanes, xr, xi);
      V const in = simd::load<Isa>(u + t * lanes);
      SEQMIX_UNROLL(4)
      for (int j = 0; j < States; ++j) {
        V const d = br[j] * in - ei[j] * xi[j] + er[j] * xr[j];
        xi[j] += bi[j] * in + ei[j] * xr[j] + er[j] * xi[j];
        xr[j] += d;
      }
      if (!y) continue;
      V sum = simd::load<Isa>(y + t * lanes);
      SEQMIX_UNROLL(4)
      for (int j = 0; j < States; ++j) sum += cr[j] * xr[j] - ci[j] * xi[j];
      simd::store<Isa>(y + t * lanes, sum);
    }
    if (history) store(history + count * States * 2 * lanes, xr, xi);
    store(x, xr, xi);
  }

  /// The tokens backwards: d_x of the state after the last becomes that of the state before the first, d_u is added
  /// to, and `sums` [States, 6, lanes] gets what E, Bbar and 2 C receive.
  SEQMIX_INLINE void retreat(index_t count, T const* u, T const* d_y, T const* history, T* d_x, T* d_u,
                             double* sums) const noexcept {
    V gr[size], gi[size], d[size][6]{}, xr[size], xi[size], past_r[size], past_i[size];
    load(d_x, gr, gi);
    load(history + count * States * 2 * lanes, xr, xi);
    for (index_t t = count; t-- > 0;) {
      load(history + t * States * 2 * lanes, past_r, past_i);
      V const in = simd::load<Isa>(u + t * lanes), dy = simd::load<Isa>(d_y + t * lanes);
      V du = simd::load<Isa>(d_u + t * lanes);
      SEQMIX_UNROLL(4)
      for (int j = 0; j < States; ++j) {
        gr[j] += cr[j] * dy, gi[j] -= ci[j] * dy;
        d[j][0] += gr[j] * past_r[j] + gi[j] * past_i[j], d[j][1] += gi[j] * past_r[j] - gr[j] * past_i[j];
        d[j][2] += gr[j] * in, d[j][3] += gi[j] * in;
        d[j][4] += dy * xr[j], d[j][5] -= dy * xi[j];
        du += br[j] * gr[j] + bi[j] * gi[j];
        V const back = er[j] * gr[j] + ei[j] * gi[j];
        gi[j] += er[j] * gi[j] - ei[j] * gr[j];
        gr[j] += back;
        xr[j] = past_r[j], xi[j] = past_i[j];
      }
      simd::store<Isa>(d_u + t * lanes, du);
    }
    store(d_x, gr, gi);
    SEQMIX_UNROLL(4)
    for (int j = 0; j < States; ++j)
      for (int k = 0; k < 6; ++k)
        for (index_t l = 0; l < lanes; ++l) sums[(j * 6 + k) * lanes + l] += double(d[j][k][l]);
  }

 private:
  SEQMIX_INLINE static void load(T const* x, V* xr, V* xi) noexcept {
    SEQMIX_UNROLL(4)
    for (int j = 0; j < States; ++j) {
      xr[j] = simd::load<Isa>(x + 2 * j * lanes);
      xi[j] = simd::load<Isa>(x + (2 * j + 1) * lanes);
    }
  }
  SEQMIX_INLINE static void store(T* x, V const* xr, V const* xi) noexcept {
    SEQMIX_UNROLL(4)
    for (int j = 0; j < States; ++j) {
      simd::store<Isa>(x + 2 * j * lanes, xr[j]);
      simd::store<Isa>(x + (2 * j + 1) * lanes, xi[j]);
    }
  }
};

/// One block of channels of one sequence.
template <class Isa, class T>
class s4d_block {
 public:
  s4d_block(s4d_shape const& s, s4d_input<T> const& in, index_t n, index_t b, T const* tables,
            s4d_scratch<Isa, T> const& w)
      : s_(s), in_(in), w_(w), cut_(s), n_(n), b_(b), h_(b * lanes), width_((std::min)(lanes, s.channels - h_)),
        first_(s.seq.begin(n)), rows_(s.seq.length(n)), table_(tables + b * cut_.table()) {
    std::fill_n(skip_, lanes, T(0));
    for (index_t l = 0; l < width_; ++l) skip_[l] = in.D_h(h_ + l);
  }

  void forward(view2<T> y_rh, s4d_saved<T> const* saved, view4<T> final_nhpc) const {
    load_state(in_.initial_nhpc, w_.x);
    for (index_t begin = 0; begin < rows_; begin += s_.chunk) {
      index_t const count = (std::min)(s_.chunk, rows_ - begin);
      if (saved) std::copy_n(w_.x, cut_.state(), kept(*saved, begin));
      load_rows(in_.u_rh, begin, count, w_.u);
      times_skip(count, w_.u, w_.y);
      for (index_t p = 0; p < cut_.pairs; p += forward_states)
        s4d_states<Isa, T, forward_states>(table_ + p * 6 * lanes)
            .advance(count, w_.u, w_.x + p * 2 * lanes, w_.y, nullptr);
      store_rows(w_.y, begin, count, y_rh);
    }
    store_state(w_.x, final_nhpc);
  }

  /// Adds to `sums` [P,6,lanes] what E, Bbar and 2 C receive, to `d_skip` [lanes] what D does.
  void backward(s4d_saved<T> const& saved, view2<T const> d_y_rh, view4<T const> d_final_nhpc,
                s4d_gradient<T> const& d, double* sums, double* d_skip) const {
    load_state(d_final_nhpc, w_.d_x);
    for (index_t begin = (rows_ - 1) / s_.chunk * s_.chunk; rows_ > 0 && begin >= 0; begin -= s_.chunk) {
      index_t const count = (std::min)(s_.chunk, rows_ - begin);
      std::copy_n(kept(saved, begin), cut_.state(), w_.x);
      load_rows(in_.u_rh, begin, count, w_.u);
      load_rows(d_y_rh, begin, count, w_.y);
      times_skip(count, w_.y, w_.d_u);
      for (index_t t = 0; t < count; ++t)
        for (index_t l = 0; l < lanes; ++l) d_skip[l] += double(w_.u[t * lanes + l] * w_.y[t * lanes + l]);
      for (index_t p = 0; p < cut_.pairs; p += backward_states) {
        s4d_states<Isa, T, backward_states> const states(table_ + p * 6 * lanes);
        states.advance(count, w_.u, w_.x + p * 2 * lanes, nullptr, w_.history);
        states.retreat(count, w_.u, w_.y, w_.history, w_.d_x + p * 2 * lanes, w_.d_u, sums + p * 6 * lanes);
      }
      store_rows(w_.d_u, begin, count, d.u_rh);
    }
    store_state(w_.d_x, d.initial_nhpc);
  }

 private:
  static constexpr index_t lanes = s4d_cut<Isa, T>::lanes;
  static constexpr int forward_states = s4d_cut<Isa, T>::forward_states;
  static constexpr int backward_states = s4d_cut<Isa, T>::backward_states;

  T* kept(s4d_saved<T> const& saved, index_t begin) const noexcept {
    return saved.states + ((cut_.slot(s_, n_) + begin / s_.chunk) * cut_.blocks + b_) * cut_.state();
  }
  void load_rows(view2<T const> x_rh, index_t begin, index_t count, T* to) const {
    for (index_t t = 0; t < count; ++t, to += lanes) {
      std::copy_n(x_rh.at(first_ + begin + t, h_), width_, to);
      std::fill_n(to + width_, lanes - width_, T(0));
    }
  }
  void store_rows(T const* x, index_t begin, index_t count, view2<T> to_rh) const {
    for (index_t t = 0; t < count; ++t) std::copy_n(x + t * lanes, width_, to_rh.at(first_ + begin + t, h_));
  }
  void times_skip(index_t count, T const* x, T* y) const {
    auto const skip = simd::load<Isa>(skip_);
    for (index_t t = 0; t < count; ++t)
      simd::store<Isa>(y + t * lanes, simd::vec<Isa, T>(skip * simd::load<Isa>(x + t * lanes)));
  }
  void load_state(view4<T const> x_nhpc, T* to) const {
    std::fill_n(to, cut_.state(), T(0));
    if (!x_nhpc) return;
    for (index_t l = 0; l < width_; ++l)
      for (index_t p = 0; p < s_.pairs; ++p)
        for (index_t c = 0; c < 2; ++c) to[(2 * p + c) * lanes + l] = x_nhpc(n_, h_ + l, p, c);
  }
  void store_state(T const* x, view4<T> to_nhpc) const {
    if (!to_nhpc) return;
    for (index_t l = 0; l < width_; ++l)
      for (index_t p = 0; p < s_.pairs; ++p)
        for (index_t c = 0; c < 2; ++c) to_nhpc(n_, h_ + l, p, c) = x[(2 * p + c) * lanes + l];
  }

  s4d_shape const& s_;
  s4d_input<T> const& in_;
  s4d_scratch<Isa, T> const& w_;
  s4d_cut<Isa, T> cut_;
  index_t n_, b_, h_, width_, first_, rows_;
  T const* table_;
  T skip_[std::size_t(lanes)];
};

template <class Isa, class T>
s4d_scratch<Isa, T>* s4d_scratch_per_thread(arena& ws, int threads, s4d_shape const& s, bool backward) {
  using scratch = s4d_scratch<Isa, T>;
  scratch* const all = ws.take<scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = scratch::carve(ws, s, backward);
    if (all) all[t] = one;
  }
  return all;
}

/// Adds what channel h's parameters get from `sum(p, i)`: the derivatives of E (0, 1), Bbar (2, 3) and 2 C (4, 5).
/// With z = dt A, E = e^z - 1 and Bbar = dt phi(z): dE/dz = dBbar/d dt = e^z.
template <class T, class Sum>
void s4d_parameter_gradient(s4d_shape const& s, s4d_input<T> const& in, s4d_gradient<same<T>> const& d, index_t h,
                            Sum const& sum) {
  using number = complex_pair<double>;
  double d_log_dt = 0.0;
  for (index_t p = 0; p < s.pairs; ++p) {
    s4d_step<double> const step(double(in.log_dt_h(h)), double(in.log_A_real_hp(h, p)), double(in.A_imag_hp(h, p)),
                                s.decay_offset);
    number const d_E{sum(p, 0), sum(p, 1)}, d_B{sum(p, 2), sum(p, 3)};
    number const d_z = conj_times(step.decay, d_E) + conj_times(step.dt * step.slope, d_B);
    d_log_dt += conj_times(step.z * step.decay, d_E).re + step.dt * conj_times(step.decay, d_B).re;
    d.log_A_real_hp(h, p) += T(d_z.re * step.z.re);
    d.A_imag_hp(h, p) += T(d_z.im * step.dt);
    d.C_hpc(h, p, 0) += T(2.0 * sum(p, 4));
    d.C_hpc(h, p, 1) += T(2.0 * sum(p, 5));
  }
  d.log_dt_h(h) += T(d_log_dt);
}

}  // namespace detail

template <class T>
template <class Isa>
s4d_saved<T> s4d_saved<T>::carve(arena& a, s4d_shape const& s) {
  detail::s4d_cut<Isa, T> const cut(s);
  return {a.take<T>((s.seq.rows() / s.chunk + s.seq.count()) * cut.blocks * cut.state())};
}

/// S4D (kernels/reference/s4d.hpp): y [R,H] and the final state (empty: not wanted). `saved` is nullptr when no
/// backward follows. Work: 16 P flops a channel and token, and once a call four transcendental functions for every
/// channel and state. Deterministic: the same bits for any number of threads and wherever a sequence is cut.
template <class Isa, class Threads, class T>
void s4d_forward(device::basic_cpu<Isa, Threads> dev, s4d_shape const& s, s4d_input<T> const& in,
                 view2<same<T>> y_rh, s4d_saved<same<T>> const* saved, view4<same<T>> final_nhpc, arena& ws) {
  validate(s, in);
  detail::check_s4d_rows("S4D output y", s, y_rh);
  detail::check_s4d_state("S4D final state", s, final_nhpc);
  arena_scope const scope(ws);
  T const* const tables = detail::s4d_table(dev, s, in, ws);
  auto* const scratch = detail::s4d_scratch_per_thread<Isa, T>(ws, thread_count(dev), s, false);
  index_t const blocks = detail::s4d_cut<Isa, T>(s).blocks;
  parallel_for(dev, s.seq.count() * blocks, [&](index_t unit, int thread) {
    detail::s4d_block<Isa, T>(s, in, unit / blocks, unit % blocks, tables, scratch[thread])
        .forward(y_rh, saved, final_nhpc);
  });
}

/// The derivatives of s4d_forward, from d_y and the derivative of the final state (empty: zero). Work: 44 P flops a
/// channel and token; a chunk's states are computed again from the one that was kept. Sums over tokens are added in
/// double, sequence by sequence within at most 64 groups of consecutive ones, then group by group.
template <class Isa, class Threads, class T>
void s4d_backward(device::basic_cpu<Isa, Threads> dev, s4d_shape const& s, s4d_input<T> const& in,
                  s4d_saved<same<T>> const& saved, view2<same<T> const> d_y_rh, view4<same<T> const> d_final_nhpc,
                  s4d_gradient<same<T>> const& d, arena& ws) {
  validate(s, in);
  validate(s, d);
  detail::check_s4d_rows("S4D output derivative d_y", s, d_y_rh);
  detail::check_s4d_state("S4D final state derivative", s, d_final_nhpc);
  arena_scope const scope(ws);
  detail::s4d_cut<Isa, T> const cut(s);
  constexpr index_t lanes = detail::s4d_cut<Isa, T>::lanes;
  T const* const tables = detail::s4d_table(dev, s, in, ws);
  auto* const scratch = detail::s4d_scratch_per_thread<Isa, T>(ws, thread_count(dev), s, true);
  index_t const size = cut.table() + lanes;  // of a block's sums: the states', then D's
  double* const sums = ws.take<double>(cut.groups * cut.blocks * size);
  parallel_for(dev, cut.groups * cut.blocks, [&](index_t unit, int thread) {
    index_t const group = unit / cut.blocks, b = unit % cut.blocks;
    double* const own = sums + unit * size;
    std::fill_n(own, size, 0.0);
    for (index_t n = cut.group_begin(s, group); n < cut.group_begin(s, group + 1); ++n)
      detail::s4d_block<Isa, T>(s, in, n, b, tables, scratch[thread])
          .backward(saved, d_y_rh, d_final_nhpc, d, own, own + cut.table());
  });
  parallel_for(dev, cut.blocks, [&](index_t b, int) {
    auto const over_groups = [&](index_t at) {
      double total = 0.0;
      for (index_t group = 0; group < cut.groups; ++group) total += sums[(group * cut.blocks + b) * size + at];
      return total;
    };
    for (index_t h = b * lanes; h < (std::min)(s.channels, (b + 1) * lanes); ++h) {
      index_t const lane = h % lanes;
      detail::s4d_parameter_gradient(s, in, d, h,
                                     [&](index_t p, index_t i) { return over_groups((p * 6 + i) * lanes + lane); });
      d.D_h(h) += T(over_groups(cut.table() + lane));
    }
  });
}

}  // namespace seqmix::inline v0::kernels
