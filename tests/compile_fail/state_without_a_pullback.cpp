// EXPECT: seqmix mixer: the first policy must satisfy seqmix::state
#include <seqmix/mixers/mixer.hpp>

using namespace seqmix;

struct my_state {
  static constexpr std::string_view name = "my_state";
  static constexpr state_spec spec{};
  template <class T>
  static void coefficients(state_token<T> const& token, state_update<T> const& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.w[i] = token.key[i];
  }
#ifdef SEQMIX_TWIN
  template <class T>
  static void pullback(state_token<T> const& token, state_update<T const> const& d,
                       state_token_gradient<T>& out) noexcept {
    for (index_t i = 0; i < token.keys; ++i) out.key[i] += d.w[i];
  }
#endif
};
auto const name = recurrence<my_state, gates::none>::name();
