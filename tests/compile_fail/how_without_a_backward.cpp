// EXPECT: seqmix selector: the second half must satisfy seqmix::how (name, spec, weights, absorb, finish, pullback)
#include <seqmix/selectors/select.hpp>

using namespace seqmix;

struct my_how {
  static constexpr std::string_view name = "my_how";
  static constexpr how_spec spec{};
  template <scalar T>
  static void weights(T const* raw, T const*, index_t n, selector_knobs const&, T* on_values,
                      T* on_stopped) noexcept {
    for (index_t j = 0; j < n; ++j) on_values[j] = raw[j], on_stopped[j] = T(0);
  }
};
#ifdef SEQMIX_TWIN
using half = selectors::softmax;
#else
using half = my_how;
#endif
using both = seqmix::select<selectors::all, half>;
both::how_type const how_half{};
