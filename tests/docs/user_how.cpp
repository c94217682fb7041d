#include "../support/laws.hpp"
#include "../support/models.hpp"
#include <seqmix/mixers/mixer.hpp>

// The weights of docs/adding-a-policy.md.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

// [doc:how]
/// Weights s^2 / (1 + s^2), not normalised: each key is judged alone.
struct rational {
  static constexpr std::string_view name = "rational";
  static constexpr how_spec spec{};

  template <class T>
  static T weight(T s) noexcept {
    return s * s / (T(1) + s * s);
  }

  /// The definition, on one row of n visible keys, for any scalar: the oracle.
  template <scalar T>
  static void weights(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values,
                      T* on_stopped) noexcept {
    for (index_t j = 0; j < n; ++j) {
      T const s = raw[j] / T(knobs.temperature) + (bias ? bias[j] : T(0));
      on_values[j] = weight(s);
      on_stopped[j] = T(0);
    }
  }

  // The same in one pass over tiles of scores, where -inf stands for a key that is not visible.
  template <class T>
  struct row {};  // carried from tile to tile: nothing
  template <class T>
  struct saved {};  // kept for backward: nothing
  static constexpr bool soft(selector_knobs const&, bool) noexcept { return true; }

  template <class Isa, class T>
  static T absorb(row<T>&, T* score, T const*, index_t n, index_t, bool) noexcept {
    for (index_t j = 0; j < n; ++j) score[j] = std::isinf(score[j]) ? T(0) : weight(score[j]);
    return T(1);  // what was accumulated before stays as it is
  }
  template <class T>
  static how_output<T> finish(row<T> const&, selector_knobs const&, saved<T>&) noexcept {
    return {.soft = T(1), .normaliser = T(1)};
  }
  /// d_score = g.v w'(s); scores become the weights, which multiply g on its way to the values.
  template <class Isa, class T>
  static void pullback(saved<T> const&, row_gradient<T> const&, T* score, T const* gv, T* d_score, index_t n,
                       index_t, selector_knobs const&) noexcept {
    for (index_t j = 0; j < n; ++j) {
      bool const visible = !std::isinf(score[j]);
      T const s = visible ? score[j] : T(0), slope = T(2) * s / ((T(1) + s * s) * (T(1) + s * s));
      score[j] = weight(s);
      d_score[j] = gv[j] * slope;
    }
  }
};
static_assert(how<rational>);
using rational_attention = attention<rational>;  // select<selectors::all, rational>
// [/doc:how]

}  // namespace

// [doc:how-test]
DOCTEST_TEST_CASE("a user's weights: the tiled form equals the definition, and the laws and both oracles hold") {
  check_laws<rational_attention>();
  using rational_layer = layer<rational_attention, extras{.rope = true, .head_norm = output_norm::per_head}>;
  check_model_gradients<rational_layer>({.heads = 2, .key_dim = 4, .value_dim = 5});
  check_model_difference<rational_layer>({.heads = 2, .key_dim = 4, .value_dim = 5});
}
// [/doc:how-test]
