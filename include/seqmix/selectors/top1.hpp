#pragma once

#include <string>

#include <seqmix/selectors/softmax.hpp>

namespace seqmix::inline v0::selectors {

/// What a hard choice puts out: the chosen value itself, or that value times its softmax weight.
enum class top1_output { hard, weighted };
/// What reaches the scores and values on the way back; docs/concepts.md has the formulas.
enum class top1_gradient { straight_through, straight_through_output, selected_weight, none };

/// One key per query: the lowest index among the greatest scores. Ties go to the lowest index on every device.
/// Source: Top-1 element selection of Lu et al. (arXiv 2505.18522); surrogates as in docs/concepts.md.
template <top1_output Output = top1_output::hard, top1_gradient Gradient = top1_gradient::straight_through>
struct top1 {
  static_assert(
      Output == top1_output::weighted || Gradient != top1_gradient::selected_weight,
      "seqmix selector: selected_weight differentiates the weight of the chosen value, which a hard output does "
      "not carry; take top1_output::weighted or straight_through");
  static constexpr std::string_view name = "top1";
  static constexpr top1_output output = Output;
  static constexpr top1_gradient gradient = Gradient;
  static constexpr how_spec spec{.hard = true, .soft_output = true};
  /// What a variant's name says of it beside `name`.
  static std::string details() {
    constexpr char const* outputs[] = {"hard", "weighted"};
    constexpr char const* gradients[] = {"straight_through", "straight_through_output", "selected_weight", "none"};
    return std::string("output=") + outputs[int(Output)] + ",gradient=" + gradients[int(Gradient)];
  }

  /// With onehot the choice at the forward temperature, p the softmax at the temperature, p_f at the forward one:
  ///   straight_through         h + p - stop(p)          h = onehot, or stop(p_f) onehot when weighted
  ///   straight_through_output  p on the values, stop(h - p) on stopped values
  ///   selected_weight          (stop(p_f) + p - stop(p)) onehot
  ///   none                     h
  /// and (1 - m) p + m (that) for hard_fraction m.
  template <scalar T>
  static void weights(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values,
                      T* on_stopped) noexcept {
    index_t const chosen = choose(raw, bias, n, knobs);
    T held(1);
    if constexpr (Output == top1_output::weighted) {
      detail::softmax_row(raw, bias, n, knobs.forward(), on_values);
      if (chosen >= 0) held = stop(on_values[chosen]);
    }
    detail::softmax_row(raw, bias, n, knobs.temperature, on_values);
    T const hard = T(knobs.hard_fraction), soft = T(1.0 - knobs.hard_fraction);
    for (index_t j = 0; j < n; ++j) {
      T const p = on_values[j];
      T const h = j == chosen ? held : T(0);
      T const moved = p - stop(p);  // 0 in value, so that a hard output stays exact
      on_stopped[j] = T(0);
      T out = h;
      if constexpr (Gradient == top1_gradient::straight_through) out = h + moved;
      if constexpr (Gradient == top1_gradient::selected_weight) out = j == chosen ? h + moved : T(0);
      if constexpr (Gradient == top1_gradient::straight_through_output && is_dual<T>) {
        out = p;
        on_stopped[j] = hard * stop(h - p);
      }
      on_values[j] = soft == T(0) ? hard * out : soft * p + hard * out;
    }
  }

  /// The lowest index of the greatest score at the forward temperature; -1 for an empty row. A NaN is chosen, so
  /// that it shows.
  template <scalar T>
  static index_t choose(T const* raw, T const* bias, index_t n, selector_knobs const& knobs) noexcept {
    index_t best = -1;
    auto most = value_of(T(0));
    for (index_t j = 0; j < n; ++j) {
      auto const score = value_of(raw[j] / T(knobs.forward()) + (bias ? bias[j] : T(0)));
      if (best < 0 || score > most || score != score) best = j, most = score;
      if (score != score) return best;
    }
    return best;
  }

  /// The best key so far, and the two softmaxes that the surrogate and a weighted output need.
  template <class T>
  struct row {
    T best = -std::numeric_limits<T>::infinity();
    index_t chosen = -1;
    detail::softmax_run<T> surrogate, forward;
    T chosen_score = T(0);  ///< of the chosen key at the surrogate's temperature
  };
  template <class T>
  struct saved {
    T lse = T(0);
    T chosen_weight = T(0);  ///< p of the chosen key at the surrogate's temperature
    T held = T(0);           ///< the weight its value came out with, times hard_fraction
    index_t chosen = -1;
  };
  /// Values get a derivative by the choice alone.
  static constexpr bool scatters(selector_knobs const& knobs) noexcept {
    return knobs.hard_fraction == 1.0 && Gradient != top1_gradient::straight_through_output;
  }
  static constexpr bool soft(selector_knobs const& knobs, bool training) noexcept {
    return knobs.hard_fraction != 1.0 || (training && Gradient != top1_gradient::none);
  }

  template <class Isa, class T>
  static T absorb(row<T>& run, T* score, T const* forward, index_t n, index_t first_key, bool soft) noexcept {
    T const* const hard = forward ? forward : score;
    take_best<Isa>(run, hard, score, n, first_key);
    if (Output == top1_output::weighted && forward) absorb_unseen<Isa>(run.forward, forward, n);
    if (soft || Output == top1_output::weighted) return run.surrogate.template absorb<Isa>(score, score, n);
    return T(1);
  }

  /// Many rows at once: their maxima say which of them have a new best, and are the surrogate's too.
  template <class Isa, class T>
  static void absorb_rows(row<T>* run, T* score, T const* forward, index_t n, index_t rows, index_t first_key,
                          bool soft, T* factor) noexcept {
    constexpr index_t w = Isa::template lanes<T>;
    index_t i = 0;
    for (; i + w <= rows; i += w) {
      T* const first = score + i * n;
      T const* const hard = forward ? forward + i * n : first;
      auto const here = detail::maxima_of_square<Isa>(hard, n, n);
      bool const odd = simd::may_hold_nan<Isa>(hard, w * n);
      for (index_t r = 0; r < w; ++r) {
        if (odd)
          take_best<Isa>(run[i + r], hard + r * n, first + r * n, n, first_key);
        else if (here[r] > run[i + r].best)
          take(run[i + r], here[r], hard + r * n, first + r * n, first_key);
        if (Output == top1_output::weighted && forward) absorb_unseen<Isa>(run[i + r].forward, hard + r * n, n);
        factor[i + r] = T(1);
      }
      if (soft || Output == top1_output::weighted)
        detail::absorb_square<Isa, T>(
            [&](index_t r) -> auto& { return run[i + r].surrogate; },
            forward ? detail::maxima_of_square<Isa>(first, n, n) : here, first, n, n, factor + i);
    }
    for (; i < rows; ++i)
      factor[i] = absorb<Isa>(run[i], score + i * n, forward ? forward + i * n : nullptr, n, first_key, soft);
  }

  template <class T>
  static how_output<T> finish(row<T> const& run, selector_knobs const& knobs, saved<T>& s) noexcept {
    T const hard = T(knobs.hard_fraction);
    // Where no softmax ran there is no log-sum-exp.
    s.lse =
        run.surrogate.sum == T(0) && run.chosen >= 0 ? std::numeric_limits<T>::quiet_NaN() : run.surrogate.lse();
    s.chosen = run.chosen;
    s.held = hard;
    if (run.chosen < 0) return {};
    if (run.best != run.best) return {run.best, run.best, run.chosen, run.best};
    s.chosen_weight = std::exp(run.chosen_score - s.lse);
    if constexpr (Output == top1_output::weighted) {
      bool const same = run.forward.sum == T(0);
      s.held = hard * (same ? s.chosen_weight : std::exp(run.best - run.forward.lse()));
    }
    return {(T(1) - hard) * run.surrogate.inverse_sum(), s.held, run.chosen, run.surrogate.inverse_sum()};
  }

  template <class Isa, class T>
  static void pullback(saved<T> const& s, row_gradient<T> const& g, T* score, T const* gv, T* d_score, index_t n,
                       index_t first_key, selector_knobs const& knobs) noexcept {
    T const hard = T(knobs.hard_fraction), mixed = T(1) - hard;
    index_t const at = s.chosen - first_key;
    bool const here = at >= 0 && at < n;
    if constexpr (Gradient == top1_gradient::none)
      if (mixed == T(0)) {
        for (index_t j = 0; j < n; ++j) score[j] = d_score[j] = T(0);
        if (here) score[at] = s.held;
        return;
      }
    detail::softmax_pullback<Isa>(s.lse, g.soft, score, gv, d_score, n);
    if constexpr (Gradient == top1_gradient::straight_through_output) return;
    if constexpr (Gradient == top1_gradient::selected_weight || Gradient == top1_gradient::none) {
      T const through = Gradient == top1_gradient::none ? T(0) : hard * g.chosen * s.chosen_weight;
      for (index_t j = 0; j < n; ++j) d_score[j] = mixed * d_score[j] - through * score[j];
      if (here) d_score[at] += through;
    }
    for (index_t j = 0; j < n; ++j) score[j] *= mixed;
    if (here) score[at] += s.held;
  }

 private:
  /// Scores whose weights nobody reads.
  template <class Isa, class T>
  static void absorb_unseen(detail::softmax_run<T>& run, T const* score, index_t n) noexcept {
    constexpr index_t strip = 64;
    alignas(64) T unused[strip];
    for (index_t j = 0; j < n; j += strip)
      run.template absorb<Isa>(score + j, unused, n - j < strip ? n - j : strip);
  }
  /// Keeps the lowest index among the greatest scores of a tile; a NaN score is taken and stays.
  template <class Isa, class T>
  static void take_best(row<T>& run, T const* hard, T const* surrogate, index_t n, index_t first_key) noexcept {
    constexpr index_t w = Isa::template lanes<T>;
    auto most = simd::load<Isa>(hard);
    auto odd = most != most;
    for (index_t j = w; j < n; j += w) {
      auto const s = simd::load<Isa>(hard + j);
      most = s > most ? s : most;
      odd |= s != s;
    }
    T const here = simd::greatest<Isa, T>(most);
    bool nan = false;
    for (index_t i = 0; i < w; ++i) nan = nan || odd[i] != 0;
    if (run.best != run.best || (!nan && !(here > run.best))) return;
    if (!nan) return take(run, here, hard, surrogate, first_key);
    index_t at = 0;
    while (hard[at] == hard[at]) ++at;
    run.best = hard[at];
    run.chosen = first_key + at;
    run.chosen_score = surrogate[at];
  }
  /// The first key of a tile whose score is `best`, which one has.
  template <class T>
  static void take(row<T>& run, T best, T const* hard, T const* surrogate, index_t first_key) noexcept {
    index_t at = 0;
    while (hard[at] != best) ++at;
    run.best = best;
    run.chosen = first_key + at;
    run.chosen_score = surrogate[at];
  }
};
static_assert(how<top1<>>);

}  // namespace seqmix::inline v0::selectors
