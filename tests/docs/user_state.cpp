#include "../support/laws.hpp"
#include "../support/models.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/mixer.hpp>

// The state of docs/adding-a-policy.md.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

// [doc:state]
/// Erases half of what the key finds before it writes: S = e^g S - k (k' e^g S) / (2 n) + (write k / n) v', n = 1 +
/// k.k.
struct half_erase {
  static constexpr std::string_view name = "half_erase";
  static constexpr state_spec spec{.low_rank = true};  // b (a' S) is not zero

  template <class T>
  static T size(state_token<T> const& t) noexcept {
    T n(1);
    for (index_t i = 0; i < t.keys; ++i) n += t.key[i] * t.key[i];
    return n;
  }
  template <class T>
  static void coefficients(state_token<T> const& t, state_update<T> const& out) noexcept {
    T const n = size(t);
    for (index_t i = 0; i < t.keys; ++i) {
      out.a[i] = -t.factor[i] * t.key[i] / T(2);  // a acts on the undecayed S, so the decay is in it
      out.b[i] = t.key[i] / n;
      out.w[i] = t.write * t.key[i] / n;
    }
  }
  template <class T>
  static void pullback(state_token<T> const& t, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    T const n = size(t);
    T d_n(0);
    for (index_t i = 0; i < t.keys; ++i) {
      T const d_unit = d.b[i] + t.write * d.w[i];  // of k_i / n
      out.factor[i] -= t.key[i] * d.a[i] / T(2);
      out.key[i] += d_unit / n - t.factor[i] * d.a[i] / T(2);
      out.write += t.key[i] / n * d.w[i];
      d_n -= t.key[i] * d_unit / (n * n);
    }
    for (index_t i = 0; i < t.keys; ++i) out.key[i] += T(2) * t.key[i] * d_n;
  }
};
static_assert(state<half_erase>);
// [/doc:state]

}  // namespace

// [doc:state-test]
DOCTEST_TEST_CASE(
    "a user's state under Mamba-2's gate: the laws hold, and a model has the gradients of both oracles") {
  using mixing = recurrence<half_erase, gates::mamba2>;
  check_laws<mixing>();
  using erasing = layer<mixing, extras{.conv = true, .head_norm = output_norm::per_head}>;
  layer_options const sizes{.heads = 2, .key_dim = 4, .value_dim = 5, .recurrence_chunk = 4};
  check_model_gradients<erasing>(sizes);
  check_model_difference<erasing>(sizes);
}
// [/doc:state-test]
