#pragma once

#include <seqmix/concepts/selector.hpp>

namespace seqmix::inline v0::selectors {

/// The scores themselves are the weights: q.k scale / temperature times the decay e^(G_i - G_j) between the two
/// tokens.
struct linear {
  static constexpr std::string_view name = "linear";
  static constexpr how_spec spec{.multiplies_decay = true, .non_uniform = false};

  template <scalar T>
  static void weights(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values,
                      T* on_stopped) noexcept {
    for (index_t j = 0; j < n; ++j) {
      on_values[j] = raw[j] / T(knobs.temperature) * (bias ? exp(bias[j]) : T(1));
      on_stopped[j] = T(0);
    }
  }

  template <class T>
  struct row {};
  template <class T>
  struct saved {};
  static constexpr bool soft(selector_knobs const&, bool) noexcept { return true; }

  /// The kernel has multiplied the decay in: scores are the weights.
  template <class Isa, class T>
  static T absorb(row<T>&, T*, T const*, index_t, index_t, bool) noexcept {
    return T(1);
  }
  template <class T>
  static how_output<T> finish(row<T> const&, selector_knobs const&, saved<T>&) noexcept {
    return {T(1), T(0), -1, T(1)};
  }
  template <class Isa, class T>
  static void pullback(saved<T> const&, row_gradient<T> const&, T*, T const* gv, T* d_score, index_t n, index_t,
                       selector_knobs const&) noexcept {
    for (index_t j = 0; j < n; ++j) d_score[j] = gv[j];
  }
};
static_assert(how<linear>);

}  // namespace seqmix::inline v0::selectors
