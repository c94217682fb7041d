#pragma once

#include <limits>

#include <seqmix/concepts/selector.hpp>
#include <seqmix/kernels/cpu/simd.hpp>

namespace seqmix::inline v0::selectors {

namespace detail {

/// p = softmax(raw / temperature + bias) of one row; all zero when nothing is visible or everything is -inf.
template <scalar T>
void softmax_row(T const* raw, T const* bias, index_t n, double temperature, T* p) noexcept {
  using real = decltype(value_of(T{}));
  real most = -std::numeric_limits<real>::infinity();
  for (index_t j = 0; j < n; ++j) {
    p[j] = raw[j] / T(temperature) + (bias ? bias[j] : T(0));
    most = value_of(p[j]) > most ? value_of(p[j]) : most;
  }
  T sum(0);
  for (index_t j = 0; j < n; ++j) {
    // Where every score is -inf the difference would be NaN; a NaN score stays one.
    bool const masked = value_of(p[j]) == -std::numeric_limits<real>::infinity();
    p[j] = masked ? T(0) : exp(p[j] - T(most));
    sum += p[j];
  }
  if (value_of(sum) == real(0)) return;
  for (index_t j = 0; j < n; ++j) p[j] /= sum;
}

/// A softmax in one pass over tiles of scores: running maximum and sum. NaN scores make the row NaN.
template <class T>
struct softmax_run {
  T most = -std::numeric_limits<T>::infinity();
  T sum = T(0);

  /// weight = e^(score - maximum so far); returns the factor for what was accumulated before this tile.
  template <class Isa>
  T absorb(T const* score, T* weight, index_t n) noexcept {
    auto const tile_most = simd::fold_vectors<Isa, T>(
        n, [](auto const& a, auto const& b) { return simd::larger<Isa, T>(a, b); },
        [&](index_t j) { return simd::load<Isa>(score + j); });
    T const before = most;
    T const here = simd::greatest<Isa, T>(tile_most);
    most = here > most ? here : most;
    // While everything is -inf, subtracting 0 keeps the weights 0 and lets a NaN through.
    T const level = most == -std::numeric_limits<T>::infinity() ? T(0) : most;
    auto const total = simd::fold_vectors<Isa, T>(
        n, [](auto const& a, auto const& b) { return a + b; },
        [&](index_t j) {
          auto const e = simd::exp_of_weight<Isa, T>(simd::load<Isa>(score + j) - level);
          simd::store<Isa>(weight + j, e);
          return e;
        });
    T const factor =
        before == most ? T(1) : simd::exp_of_weight<Isa, T>(simd::broadcast<Isa, T>(before - level))[0];
    add(factor, simd::sum<Isa, T>(total));
    return factor;
  }
  /// What one tile adds.
  SEQMIX_INLINE void add(T factor, T total) noexcept { sum = sum * factor + total; }
  /// With the weight e^sink on nothing; a sink of -inf is none.
  static softmax_run beginning(T sink) noexcept {
    softmax_run run;
    if (sink == run.most) return run;
    run.most = sink;
    run.sum = T(1);
    return run;
  }
  T lse() const noexcept { return sum == T(0) ? T(0) : most + std::log(sum); }
  T inverse_sum() const noexcept { return sum == T(0) ? T(0) : T(1) / sum; }
};

/// The greatest of the n scores of each of as many rows as a vector has lanes, rows `stride` apart: by a transpose,
/// so that no row waits for its own. A NaN may or may not show.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> maxima_of_square(T const* score, index_t stride, index_t n) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  using V = simd::vec<Isa, T>;
  auto const greater = [](V const& a, V const& b) { return simd::larger<Isa, T>(a, b); };
  V rows[std::size_t(w)];
  for (index_t i = 0; i < w; ++i)
    rows[i] =
        simd::fold_vectors<Isa, T>(n, greater, [&](index_t j) { return simd::load<Isa>(score + i * stride + j); });
  simd::transpose_square<Isa, T>(rows);
  return simd::fold_array<Isa, T>(rows, greater);
}
/// softmax_run::absorb for those rows, whose maxima are `here`, with the same bits: a row must not depend on how
/// many others are at work. `run(i)` is row i's.
template <class Isa, class T, class Run>
SEQMIX_INLINE void absorb_square(Run const& run, simd::vec<Isa, T> const& here, T* score, index_t stride, index_t n,
                                 T* factor) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  using V = simd::vec<Isa, T>;
  auto const add = [](V const& a, V const& b) { return a + b; };
  V rows[std::size_t(w)], before{};
  for (index_t i = 0; i < w; ++i) before[i] = run(i).most;
  V const most = simd::larger<Isa, T>(here, before);
  V const level = most == V{} - std::numeric_limits<T>::infinity() ? V{} : most;
  for (index_t i = 0; i < w; ++i)
    rows[i] = simd::fold_vectors<Isa, T>(n, add, [&](index_t j) {
      auto const e = simd::exp_of_weight<Isa, T>(simd::load<Isa>(score + i * stride + j) - level[i]);
      simd::store<Isa>(score + i * stride + j, e);
      return e;
    });
  simd::transpose_square<Isa, T>(rows);
  V const scale = before == most ? V{} + T(1) : simd::exp_of_weight<Isa, T>(before - level);
  V const total = simd::fold_array<Isa, T>(rows, add);
  simd::store<Isa>(factor, scale);
  for (index_t i = 0; i < w; ++i) run(i).most = most[i], run(i).add(scale[i], total[i]);
}
/// The same for any number of rows.
template <class Isa, class T, class Run>
void absorb_rows(Run const& run, T* score, index_t stride, index_t n, index_t rows, T* factor) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  index_t i = 0;
  for (; i + w <= rows; i += w) {
    T* const first = score + i * stride;
    absorb_square<Isa, T>(
        [&](index_t r) -> auto& { return run(i + r); }, maxima_of_square<Isa>(first, stride, n), first, stride, n,
        factor + i);
  }
  for (; i < rows; ++i) factor[i] = run(i).template absorb<Isa>(score + i * stride, score + i * stride, n);
}
/// score becomes p = e^(score - lse); d_score = p (g.v - g.o).
template <class Isa, class T>
void softmax_pullback(T lse, T g_soft, T* score, T const* gv, T* d_score, index_t n) noexcept {
  for (index_t j = 0; j < n; j += Isa::template lanes<T>) {
    auto const p = simd::exp_of_weight<Isa, T>(simd::load<Isa>(score + j) - lse);
    simd::store<Isa>(score + j, p);
    simd::store<Isa>(d_score + j, p * (simd::load<Isa>(gv + j) - g_soft));
  }
}

/// p_sink (g.0 - g.o) of one row; nothing where the row has no weights.
template <class T>
T sink_pullback(T lse, T g_soft, T sink) noexcept {
  return sink == -std::numeric_limits<T>::infinity() ? T(0) : -std::exp(sink - lse) * g_soft;
}

}  // namespace detail

/// Weights p = softmax(q.k scale / temperature + bias) over the visible keys.
struct softmax {
  static constexpr std::string_view name = "softmax";
  static constexpr how_spec spec{.takes_sink = true};

  /// The definition on one row of n visible keys: weights on the values, and on values whose derivative is dropped.
  template <scalar T>
  static void weights(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values,
                      T* on_stopped) noexcept {
    detail::softmax_row(raw, bias, n, knobs.temperature, on_values);
    for (index_t j = 0; j < n; ++j) on_stopped[j] = T(0);
  }

  template <class T>
  using row = detail::softmax_run<T>;
  template <class T>
  struct saved {
    T lse = T(0);  ///< log-sum-exp of the row; 0 for a row that sees nothing
  };
  static constexpr bool soft(selector_knobs const&, bool) noexcept { return true; }

  template <class Isa, class T>
  static T absorb(row<T>& run, T* score, T const*, index_t n, index_t, bool) noexcept {
    return run.template absorb<Isa>(score, score, n);
  }
  template <class Isa, class T>
  static void absorb_rows(row<T>* run, T* score, T const*, index_t n, index_t rows, index_t, bool,
                          T* factor) noexcept {
    detail::absorb_rows<Isa>(
        [&](index_t i) -> auto& { return run[i]; }, score, n, n, rows, factor);
  }
  template <class T>
  static how_output<T> finish(row<T> const& run, selector_knobs const&, saved<T>& s) noexcept {
    s.lse = run.lse();
    return {run.inverse_sum(), T(0), -1, run.inverse_sum()};
  }
  template <class Isa, class T>
  static void pullback(saved<T> const& s, row_gradient<T> const& g, T* score, T const* gv, T* d_score, index_t n,
                       index_t, selector_knobs const&) noexcept {
    detail::softmax_pullback<Isa>(s.lse, g.soft, score, gv, d_score, n);
  }

  /// e^sink joins the denominator and weighs nothing.
  template <class T>
  static row<T> start(T sink) noexcept {
    return detail::softmax_run<T>::beginning(sink);
  }
  template <class T>
  static T sink_pullback(saved<T> const& s, row_gradient<T> const& g, T sink) noexcept {
    return detail::sink_pullback(s.lse, g.soft, sink);
  }
};
static_assert(how<softmax>);

}  // namespace seqmix::inline v0::selectors
