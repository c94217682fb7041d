#pragma once

#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

/// How many tokens a query of a sequence of `length` can draw on, on average over the sequence. A bounded state is
/// counted as all tokens so far, through its decay; a routed selector with its chosen chunk wherever there is one.
template <mixer_type M>
double mean_visible_tokens(index_t length, selection const& s) {
  if (length < 1) return 0.0;
  using which_type = typename M::selector_type::which_type;
  double sum = 0.0;
  for (index_t t = 0; t < length; ++t) {
    if constexpr (M::state_type::spec.kind != state_kind::history) {
      sum += double(t + 1);
    } else if constexpr (which_type::spec.routed) {
      bool const candidate = t / s.chunk > 0 || which_type::spec.own_competes;
      sum += double(which_type::blocks(t, candidate ? 0 : -1, s).size());
    } else {
      sum += double(which_type::blocks(t, -1, s).size());
    }
  }
  return sum / double(length);
}

}  // namespace seqmix::inline v0
